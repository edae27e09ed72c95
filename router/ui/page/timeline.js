// The requests of the last seconds, a lane each, moving to the left: prefill -> transfer -> decode.

import { el, mark, say, svg } from "./dom.js";
import { Lanes } from "./lanes.js";
import { HEIGHTS, KINDS, fate, keyOf, way } from "./phases.js";

const HEIGHT = 216;
const AXIS = 20;
const TALLEST = 18;
const SHORTEST = 6;
// The right edge is so long ago: all that happened before it has been told by then.
const DELAY_S = 1.3;

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Timeline {
  #pick;
  #span = 30;
  #width = 0;
  #lanes = new Lanes();
  #views = new Map();
  #state = null;
  #laneHeight = TALLEST;
  // Unix seconds less performance.now()'s.
  #offset = null;
  // The time that is drawn at x = 0 of the moving group.
  #origin = 0;
  #focused = null;

  #grid = svg("g", { class: "grid" });
  #moving = svg("g");
  #svg = svg("svg", { class: "gantt", height: HEIGHT + AXIS, role: "group", "aria-label": "Requests over time; the arrow keys go from one to the next" }, this.#grid, this.#moving);
  #more = el("p", { class: "quiet more" });
  #empty = el("p", { class: "quiet empty" }, "No requests yet.");

  constructor(parent, pick) {
    this.#pick = pick;
    parent.append(this.#svg, this.#empty, this.#more);
    this.#svg.addEventListener("keydown", (event) => this.#move(event));
    new ResizeObserver(([entry]) => this.#resize(entry.contentRect.width)).observe(parent);
    const step = () => {
      if (!still.matches) this.#shift();
      requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  set span(seconds) {
    this.#span = seconds;
    this.#redraw();
  }

  update(state) {
    const offset = state.time - performance.now() / 1000;
    // The quickest answer is the nearest to the truth; slowly, for clocks that drift.
    this.#offset = this.#offset === null || Math.abs(offset - this.#offset) > 2 ? offset : Math.max(offset, this.#offset - 0.005);
    this.#state = state;
    this.#draw();
  }

  select(key) {
    for (const [one, view] of this.#views) mark(view.node, "aria-pressed", one === key);
  }

  get #edge() {
    return Math.min(performance.now() / 1000 + this.#offset, this.#state.time + DELAY_S) - DELAY_S;
  }

  get #scale() {
    return this.#width / this.#span;
  }

  #resize(width) {
    if (width === this.#width) return;
    this.#width = width;
    this.#svg.setAttribute("width", width);
    this.#redraw();
  }

  #redraw() {
    for (const view of this.#views.values()) view.node.remove();
    this.#views.clear();
    const every = this.#span / 6;
    this.#grid.replaceChildren(...[0, 1, 2, 3, 4, 5].flatMap((at) => {
      const x = this.#width - at * every * this.#scale - (at ? 0 : 0.5);
      const label = at ? `−${every * at} s` : "now";
      return [svg("line", { x1: x, x2: x, y1: AXIS - 4, y2: AXIS + HEIGHT }), svg("text", { x: x - 4, y: 11, "text-anchor": "end" }, label)];
    }));
    if (this.#state) this.#draw();
  }

  #draw() {
    if (!this.#width) return;
    const edge = this.#edge;
    this.#origin = edge;
    const spans = this.#state.requests
      .map((request) => ({ request, key: keyOf(request), begin: request.arrived, end: request.outcome === "running" ? Infinity : request.arrived + request.elapsed }))
      .filter((one) => one.end > edge - this.#span);
    const lanes = this.#lanes.assign(spans);
    const needed = Math.max(0, ...lanes.values()) + 1;
    const height = Math.max(SHORTEST, Math.min(TALLEST, HEIGHT / needed));
    if (Math.abs(height - this.#laneHeight) > 0.1) {
      this.#laneHeight = height;
      for (const view of this.#views.values()) view.outdate();
    }
    const most = Math.floor(HEIGHT / height + 0.01);
    const shown = spans.filter((one) => lanes.get(one.key) < most);
    const keys = new Set(shown.map((one) => one.key));
    for (const [key, view] of this.#views) if (!keys.has(key)) this.#drop(key, view);
    for (const one of shown) this.#show(one, lanes.get(one.key));
    const hidden = spans.length - shown.length;
    say(this.#more, hidden ? `and ${hidden} more at once` : "");
    this.#empty.hidden = spans.length > 0;
    this.#tabStop();
    this.#shift();
  }

  #show({ request, key }, lane) {
    if (!this.#views.has(key)) {
      const view = new Bar(() => this.#pick(key), () => (this.#focused = key));
      this.#views.set(key, view);
      this.#moving.append(view.node);
    }
    const view = this.#views.get(key);
    const x = (request.arrived - this.#origin) * this.#scale;
    view.draw(request, { scale: this.#scale, height: this.#laneHeight, beyond: this.#width, x, y: AXIS + lane * this.#laneHeight });
  }

  #drop(key, view) {
    const focused = view.node === document.activeElement;
    view.node.remove();
    this.#views.delete(key);
    if (focused) this.#views.values().next().value?.node.focus();
  }

  #shift() {
    if (this.#state && this.#width) {
      const x = this.#width - (this.#edge - this.#origin) * this.#scale;
      this.#moving.setAttribute("transform", `translate(${x.toFixed(2)} 0)`);
    }
  }

  #tabStop() {
    const key = this.#views.has(this.#focused) ? this.#focused : [...this.#views.keys()].at(-1);
    for (const [one, view] of this.#views) mark(view.node, "tabindex", one === key ? 0 : -1);
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const views = [...this.#views.values()].sort((a, b) => a.request.arrived - b.request.arrived);
    const at = views.findIndex((view) => view.node === document.activeElement);
    views[Math.min(Math.max(at + step, 0), views.length - 1)]?.node.focus();
    this.#tabStop();
  }
}

class Bar {
  request = null;
  #drawn = "";

  constructor(pick, focus) {
    const key = (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        pick();
      }
    };
    // Bars that move under a pointer at rest pick nothing.
    const point = (event) => (event.movementX || event.movementY) && pick();
    this.node = svg("g", { class: "request", role: "button", tabindex: -1, onclick: pick, onpointermove: point, onkeydown: key, onfocus: () => (focus(), pick()) });
  }

  outdate() {
    this.#drawn = "";
  }

  draw(request, place) {
    this.request = request;
    this.node.setAttribute("transform", `translate(${place.x.toFixed(2)} ${place.y.toFixed(2)})`);
    const looks = JSON.stringify([request.outcome, request.tries, place.scale, place.height]);
    if (looks === this.#drawn) return;
    this.#drawn = looks;
    const [how, , words] = fate(request);
    mark(this.node, "data-fate", how);
    mark(this.node, "data-size", place.height > 9 ? "tall" : "flat");
    mark(this.node, "aria-label", `${request.id}: ${words}, ${way(request)}`);
    this.node.replaceChildren(...shapes(request, place));
  }
}

function* shapes(request, { scale, height, beyond }) {
  const running = request.outcome === "running";
  const inner = height - (height > 9 ? 5 : 2);
  const middle = height / 2;
  const length = running ? beyond + request.elapsed * scale : Math.max(request.elapsed * scale, 2);
  yield svg("rect", { class: "hit", width: length, height });
  yield svg("rect", { class: "spine", y: middle - 0.75, width: length, height: 1.5 });
  for (const one of request.tries) {
    for (const [name, began, seconds] of one.phases) {
      const kind = KINDS[name];
      const tall = Math.max(1.5, inner * HEIGHTS[kind]);
      // What goes on ends beyond the edge, and seems to grow.
      const width = seconds === null ? beyond + 10 : Math.max(1.5, seconds * scale);
      yield svg("rect", { class: `phase ${kind}`, x: began * scale, y: middle - tall / 2, width, height: tall, rx: Math.min(2, tall / 2, width / 2) });
    }
  }
  const size = Math.min(4, inner / 2);
  const first = request.num_tries - request.tries.length;
  yield* request.tries.flatMap((one, at) => [
    ...(first + at > 0 && height > 9 ? [again((one.phases[0]?.[1] ?? 0) * scale + 1.6 * size, middle, size)] : []),
    ...(one.error ? [cross(one.ended * scale - size, middle, size)] : []),
  ]);
}

const cross = (x, y, size) => svg("path", { class: "mark failed", d: `M${x - size} ${y - size}l${2 * size} ${2 * size}m0 ${-2 * size}l${-2 * size} ${2 * size}` });
const again = (x, y, size) => svg("path", { class: "mark again", d: `M${x + size} ${y}a${size} ${size} 0 1 1 ${-size} ${-size}m0 ${-size / 2}l${size / 1.6} ${size / 2}l${-size / 1.6} ${size / 2}` });
