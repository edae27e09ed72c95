// The totals at the top, each with its latest minute and a half.

import { bytesPerSecond, duration, el, number, say, svg } from "./dom.js";
import { Series, total } from "./history.js";

const WIDTH = 120;
const HEIGHT = 26;

const count = (value) => (value === null ? ["–", ""] : [number(value), ""]);
const perSecond = (value) => (value === null ? ["–", ""] : [number(value), "/s"]);

// Title, the figures of a state with their names, how they are written.
const FIGURES = [
  ["Requests", (state) => [["running", state.router.running], ["queued", state.router.queued]], count],
  ["Output tokens", (state) => [["", total(state.workers, "output_tokens")]], perSecond],
  ["Prompt tokens", (state) => [["", total(state.workers, "prompt_tokens")]], perSecond],
  ["Time to first token", (state) => spread(state.latency.ttft), duration],
  ["Time per output token", (state) => spread(state.latency.tpot), duration],
  ["KV ferried", (state) => [["", total(state.workers, "kv_received")]], (v) => (v === null ? ["–", ""] : bytesPerSecond(v))],
];

function spread(of) {
  return of.count ? [["p50", of.p50], ["p99", of.p99]] : [["p50", null], ["p99", null]];
}

export class Figures {
  #tiles;

  constructor(parent) {
    this.#tiles = FIGURES.map((figure) => new Tile(...figure));
    parent.append(...this.#tiles.map((tile) => tile.node));
  }

  update(state) {
    for (const tile of this.#tiles) tile.update(state);
  }
}

class Tile {
  #read;
  #write;
  #parts = [];
  #chart;
  #row;

  constructor(title, read, write) {
    this.#read = read;
    this.#write = write;
    this.#chart = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.#row = el("p", { class: "values" });
    this.node = el("div", { class: "figure" }, el("h2", {}, title), this.#row, this.#chart);
  }

  update(state) {
    const values = this.#read(state);
    if (!this.#parts.length) this.#parts = values.map((_, at) => this.#part(at));
    values.forEach(([name, value], at) => {
      const part = this.#parts[at];
      const [figure, unit] = this.#write(value);
      part.series.add(value);
      say(part.figure, figure);
      say(part.unit, unit);
      say(part.name, name);
    });
    const top = Math.max(...this.#parts.flatMap((part) => part.series.values), 1e-9);
    for (const part of this.#parts) part.line.setAttribute("d", path(part.series.values, top));
  }

  #part(at) {
    const part = {
      series: new Series(),
      figure: el("b"),
      unit: el("span", { class: "unit" }),
      name: el("span", { class: "quiet" }),
      line: svg("path", { class: at ? "line second" : "line" }),
    };
    this.#row.append(el("span", { class: "value" }, part.figure, part.unit, part.name));
    this.#chart.append(part.line);
    return part;
  }
}

// From the right, where now is; a gap where nothing was known.
function path(values, top) {
  const step = WIDTH / 89;
  let d = "";
  let pen = "M";
  values.forEach((value, at) => {
    if (value === null) {
      pen = "M";
      return;
    }
    const x = WIDTH - (values.length - 1 - at) * step;
    const y = HEIGHT - 2 - (value / top) * (HEIGHT - 4);
    d += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
  });
  return d;
}
