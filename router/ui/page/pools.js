// Workers by role: a card each, or, where there are many, a small cell each and the card of the one looked at.

import { bytesPerSecond, el, keyed, mark, number, plain, say, svg } from "./dom.js";
import { Card, Cell, STATES } from "./workers.js";

// In one pool; more than so many become cells.
const MOST_CARDS = 12;
const TITLES = { prefill: "Prefill", decode: "Decode", colocated: "Colocated", "": "Not heard of yet" };

export class Pools {
  #parent;
  #pools = new Map();
  #strait = new Strait();

  constructor(parent) {
    this.#parent = parent;
  }

  update(state) {
    const roles = Object.keys(TITLES).filter((role) => state.workers.some((one) => one.role === role));
    const of = (role) => state.workers.filter((one) => one.role === role);
    const shown = roles.map((role) => ({ role, workers: of(role) }));
    if (roles.includes("prefill") && roles.includes("decode")) {
      shown.splice(1, 0, { role: "strait", workers: of("decode"), senders: of("prefill") });
    }
    mark(this.#parent, "data-strait", shown.length > roles.length);
    keyed(this.#parent, this.#pools, shown, (one) => one.role, (one) => (one.role === "strait" ? this.#strait : new Pool(one.role)));
  }
}

class Pool {
  #count = el("p", { class: "quiet" });
  #grid = el("div");
  #details = el("div", { class: "picked" });
  #views = new Map();
  #picked = null;
  #card = new Card();
  #dense = null;
  #workers = [];

  constructor(role) {
    const title = el("h2", {}, TITLES[role]);
    const legend = el("ul", { class: "legend" }, ...STATES.map((state) => el("li", {}, el("i", { class: `swatch ${state}` }), state.replace("_", " "))));
    this.node = el("section", { class: "panel pool", "data-role": role, "aria-label": `${TITLES[role]} workers` },
      el("div", { class: "panel-head" }, title, this.#count), this.#grid, this.#details, legend);
    this.#grid.addEventListener("keydown", (event) => this.#move(event));
  }

  update({ workers }) {
    this.#workers = workers;
    this.#say(workers);
    const dense = workers.length > MOST_CARDS;
    if (dense !== this.#dense) {
      this.#dense = dense;
      this.#views.clear();
      this.#grid.replaceChildren();
      this.#grid.className = dense ? "cells" : "cards";
      this.#details.hidden = !dense;
      this.#details.replaceChildren(el("p", { class: "quiet hint" }, "Point at a worker, tap it or use the arrow keys."));
    }
    const pick = (address) => this.#pick(address);
    keyed(this.#grid, this.#views, workers, (one) => one.address, () => (dense ? new Cell(pick) : new Card()));
    if (dense) {
      if (!this.#grid.querySelector('[tabindex="0"]')) this.#grid.firstElementChild.tabIndex = 0;
      if (this.#picked) this.#pick(this.#picked);
    }
  }

  #say(workers) {
    const sum = (read) => workers.reduce((all, one) => all + read(one), 0);
    const ready = workers.filter((one) => one.state === "ready").length;
    const count = ready === workers.length ? `${ready}` : `${ready} of ${workers.length} ready`;
    say(this.#count, `${count} · ${number(sum((one) => one.running))} running · ${number(sum((one) => one.waiting))} waiting`);
  }

  #pick(address) {
    const worker = this.#workers.find((one) => one.address === address);
    if (!worker) return;
    this.#picked = address;
    this.#card.update(worker);
    if (this.#card.node.parentNode !== this.#details) this.#details.replaceChildren(this.#card.node);
    for (const [key, view] of this.#views) mark(view.node, "aria-pressed", key === address);
  }

  // One cell at a time can be reached by Tab; the arrows go on from there.
  #move(event) {
    const cells = [...this.#grid.children];
    const at = cells.indexOf(document.activeElement);
    if (at < 0 || !this.#dense) return;
    const columns = cells.filter((cell) => cell.offsetTop === cells[0].offsetTop).length;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: cells.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = cells[Math.min(Math.max(to, 0), cells.length - 1)];
    cells[at].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }
}

// What the KV crosses.
class Strait {
  #speed = el("b");
  #by = el("span", { class: "quiet" });
  #crossing = el("span", { class: "quiet" });

  constructor() {
    const lines = [8, 22, 36].map((y, at) => svg("path", { class: "current", "data-at": at, d: `M0 ${y}q10 -7 20 0t20 0 20 0 20 0 20 0 20 0`, pathLength: 120 }));
    this.node = el("section", { class: "strait", "aria-label": "KV from prefill to decode" },
      svg("svg", { viewBox: "0 0 120 44", preserveAspectRatio: "none", "aria-hidden": "true" }, ...lines),
      el("p", {}, this.#speed, this.#by, this.#crossing));
  }

  update({ workers, senders }) {
    const speeds = workers.map((one) => one.rates.kv_received).filter((one) => one !== null);
    const speed = speeds.reduce((sum, one) => sum + one, 0);
    const ways = new Set(senders.flatMap((one) => Object.keys(one.transports)));
    const crossing = workers.reduce((sum, one) => sum + one.waiting_for_kv, 0);
    say(this.#speed, plain(bytesPerSecond(speed)));
    say(this.#by, ways.size ? `KV by ${[...ways].sort().join(", ")}` : "no KV yet");
    say(this.#crossing, `${number(crossing)} under way`);
    mark(this.node, "data-flows", speed > 0 || crossing > 0);
  }
}
