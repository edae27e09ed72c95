// Which request is drawn in which lane. It keeps its lane; a lane is used again once what was in it has ended.

const GAP_S = 0.2;

export class Lanes {
  #lanes = new Map();

  // By key, of requests with `key`, `begin` and `end` in seconds, all in one clock.
  assign(spans) {
    const kept = new Map();
    for (const { key } of spans) if (this.#lanes.has(key)) kept.set(key, this.#lanes.get(key));
    this.#lanes = kept;
    const taken = new Map();
    const occupy = (lane, span) => taken.set(lane, [...(taken.get(lane) ?? []), span]);
    for (const span of spans) if (kept.has(span.key)) occupy(kept.get(span.key), span);
    for (const span of spans.toSorted((a, b) => a.begin - b.begin)) {
      if (kept.has(span.key)) continue;
      let lane = 0;
      while ((taken.get(lane) ?? []).some((other) => overlap(other, span))) lane += 1;
      kept.set(span.key, lane);
      occupy(lane, span);
    }
    return kept;
  }
}

const overlap = (a, b) => a.begin < b.end + GAP_S && b.begin < a.end + GAP_S;
