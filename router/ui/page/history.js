// What follows from several looks: rates, and the latest values of each figure.

// Statistics of workers come with their heartbeats, so that two looks close to each other say little.
const RATE_S = 5;
const LENGTH = 90;

export class Rates {
  #looks = new Map();

  // How fast a counter of an incarnation grows, a second; null: not known yet. A new incarnation begins anew.
  of(key, incarnation, value, now) {
    const before = this.#looks.get(key);
    const looks = before && before.incarnation === incarnation ? before.looks : [];
    looks.push([now, value]);
    while (looks.length > 2 && looks[1][0] <= now - RATE_S) looks.shift();
    this.#looks.set(key, { incarnation, looks });
    const [then, old] = looks[0];
    return now - then < 0.5 || value < old ? null : (value - old) / (now - then);
  }

  keep(keys) {
    for (const key of this.#looks.keys()) if (!keys.has(key)) this.#looks.delete(key);
  }
}

export class Series {
  values = [];

  // null: nothing was known then.
  add(value) {
    this.values.push(value);
    if (this.values.length > LENGTH) this.values.shift();
  }
}

// The state, and beside each worker's counters the rates at which they grow.
export class History {
  #rates = new Rates();

  withRates(state) {
    const keys = new Set();
    for (const worker of state.workers) {
      worker.rates = {};
      for (const counter of ["prompt_tokens", "output_tokens", "kv_sent", "kv_received"]) {
        const key = `${worker.address} ${counter}`;
        keys.add(key);
        worker.rates[counter] = this.#rates.of(key, worker.incarnation, worker[counter], state.time);
      }
    }
    this.#rates.keep(keys);
    return state;
  }
}

// Of all workers that answer; null: of none it is known yet.
export function total(workers, counter) {
  const known = workers.filter((one) => one.state !== "unreachable" && one.rates[counter] !== null);
  return known.length ? known.reduce((sum, one) => sum + one.rates[counter], 0) : null;
}
