// One worker: as a card with all there is to say, or as a cell.

import { bytesPerSecond, el, mark, number, plain, say } from "./dom.js";

// Of blocks, in the order in which the router tells them.
export const STATES = ["in_use", "reserved", "quarantined", "cached", "free"];
const WORDS = STATES.map((state) => state.replace("_", " "));
const GLYPHS = { ready: "●", draining: "▼", unreachable: "✕" };

const sum = (values) => values.reduce((all, one) => all + one, 0);
const taken = (worker) => worker.blocks[0] + worker.blocks[1] + worker.blocks[2];
const share = (part, whole) => (whole ? part / whole : 0);
const percent = (value) => `${Math.round(100 * value)} %`;

function inWords(worker) {
  const told = worker.blocks.map((count, at) => [count, WORDS[at]]).filter(([count]) => count > 0);
  return told.map(([count, state]) => `${number(count)} ${state}`).join(" · ") || "no blocks";
}

export class Card {
  #name = el("h3");
  #state = el("span", { class: "state" });
  #parts = STATES.map((state) => el("i", { class: state }));
  #bar = el("div", { class: "blocks", role: "img" }, ...this.#parts);
  #share = el("b");
  #blocks = el("span", { class: "quiet" });
  #work = el("p", { class: "work" });
  #rest = el("p", { class: "quiet" });
  #refused = el("p", { class: "refused" });

  constructor() {
    this.node = el("article", { class: "worker" },
      el("div", { class: "worker-head" }, this.#name, this.#state),
      this.#bar,
      el("p", { class: "counts" }, this.#share, this.#blocks),
      this.#work, this.#rest, this.#refused);
  }

  update(worker) {
    const total = sum(worker.blocks);
    mark(this.node, "data-state", worker.state);
    mark(this.node, "data-role", worker.role);
    say(this.#name, worker.name);
    say(this.#state, `${GLYPHS[worker.state] ?? "○"} ${worker.state}`);
    worker.blocks.forEach((count, at) => {
      this.#parts[at].style.flexGrow = share(count, total);
      this.#parts[at].hidden = !count;
    });
    mark(this.#bar, "aria-label", `${number(total)} KV blocks: ${inWords(worker)}`);
    say(this.#share, `${percent(share(taken(worker), total))} taken`);
    say(this.#blocks, inWords(worker));
    say(this.#work, work(worker));
    say(this.#rest, rest(worker));
    say(this.#refused, worker.refused);
    this.#refused.hidden = !worker.refused;
  }
}

function work(worker) {
  const waiting = worker.waiting ? ` · ${number(worker.waiting)} waiting` : "";
  const coming = worker.waiting_for_kv ? ` · ${number(worker.waiting_for_kv)} awaiting KV` : "";
  return `${number(worker.running)} running${waiting}${coming}`;
}

function rest(worker) {
  const { prompt_tokens: prompt, output_tokens: output, kv_sent: sent } = worker.rates;
  const parts = [];
  if (worker.role !== "decode" && prompt !== null) parts.push(`${number(prompt)} prompt tok/s`);
  if (worker.role !== "prefill" && output !== null) parts.push(`${number(output)} tok/s`);
  if (sent) parts.push(`KV ${plain(bytesPerSecond(sent))}`);
  const ways = Object.keys(worker.transports);
  if (ways.length) parts.push(`by ${ways.join(", ")}`);
  return parts.join(" · ") || worker.address;
}

export class Cell {
  #used = el("i", { class: "in_use" });
  #cached = el("i", { class: "cached" });
  #text = el("span");
  #address = "";

  constructor(pick) {
    const here = () => pick(this.#address);
    this.node = el("button", { class: "cell", type: "button", tabindex: "-1", onclick: here, onfocus: here, onpointerenter: here },
      this.#cached, this.#used, this.#text);
  }

  update(worker) {
    this.#address = worker.address;
    const total = sum(worker.blocks);
    const used = share(taken(worker), total);
    mark(this.node, "data-state", worker.state);
    mark(this.node, "data-role", worker.role);
    mark(this.node, "aria-label", `${worker.name}, ${worker.state}, ${work(worker)}, ${percent(used)} of its blocks taken`);
    this.#used.style.height = `${100 * used}%`;
    this.#cached.style.height = `${100 * (used + share(worker.blocks[3], total))}%`;
    say(this.#text, worker.state === "ready" ? number(worker.running) : (GLYPHS[worker.state] ?? "○"));
  }
}
