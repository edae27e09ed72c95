// The requests: their timeline, a list of the latest, and all about the one that is looked at.

import { byId, duration, el, mark, number, plain, say } from "./dom.js";
import { KINDS, fate, keyOf, legend, traceCommand, way } from "./phases.js";
import { Timeline } from "./timeline.js";

const MOST_LISTED = 10;
const SPANS_S = [15, 30, 60];

export class Requests {
  #known = new Map();
  #picked = null;
  #timeline = new Timeline(byId("timeline"), (key) => this.#pick(key));
  #rows = el("tbody");
  #details = new Details(byId("request"));
  #pointed = false;

  constructor() {
    byId("phases").append(...legend());
    this.#offerSpans(byId("spans"));
    const list = byId("latest");
    // Nothing moves away under a pointer.
    list.addEventListener("pointerenter", () => (this.#pointed = true));
    list.addEventListener("pointerleave", () => (this.#pointed = false));
    const heads = ["request", "state", "tokens", "TTFT", "TPOT", "workers"].map((name) => el("th", { scope: "col", "data-column": name }, name));
    list.append(el("table", {}, el("caption", {}, "Latest requests"), el("thead", {}, el("tr", {}, ...heads)), this.#rows));
  }

  update(state) {
    const picked = this.#known.get(this.#picked);
    this.#known = new Map(state.requests.map((request) => [keyOf(request), request]));
    // It stays, though the router may tell of others by now.
    if (picked && !this.#known.has(this.#picked)) this.#known.set(this.#picked, picked);
    this.#timeline.update(state);
    if (!this.#pointed && !this.#rows.contains(document.activeElement)) this.#list(state.requests.slice(0, MOST_LISTED));
    this.#show();
  }

  #pick(key) {
    this.#picked = key;
    this.#show();
  }

  #show() {
    this.#timeline.select(this.#picked);
    for (const row of this.#rows.children) row.classList.toggle("picked-row", row.dataset.key === this.#picked);
    this.#details.update(this.#known.get(this.#picked));
  }

  #list(requests) {
    this.#rows.replaceChildren(...requests.map((request) => {
      const [how, sign, words] = fate(request);
      const key = keyOf(request);
      const pick = () => this.#pick(key);
      return el("tr", { "data-key": key, "data-fate": how, onclick: pick },
        el("td", { "data-column": "request" }, el("button", { type: "button", class: "link", onfocus: pick, title: request.id }, request.id)),
        el("td", { "data-column": "state" }, el("span", { class: `glyph ${how}`, "aria-hidden": "true" }, sign), ` ${words}`),
        el("td", { "data-column": "tokens" }, `${number(request.prompt_tokens)} → ${number(request.tokens)}`),
        el("td", { "data-column": "TTFT" }, plain(duration(request.ttft))),
        el("td", { "data-column": "TPOT" }, plain(duration(request.tpot))),
        el("td", { "data-column": "workers" }, way(request)));
    }));
  }

  #offerSpans(parent) {
    const buttons = SPANS_S.map((seconds) => el("button", { type: "button", onclick: () => choose(seconds) }, `${seconds} s`));
    const choose = (seconds) => {
      this.#timeline.span = seconds;
      SPANS_S.forEach((one, at) => mark(buttons[at], "aria-pressed", one === seconds));
    };
    parent.append(...buttons);
    choose(matchMedia("(max-width: 640px)").matches ? 15 : 30);
  }
}

class Details {
  #parent;
  #shown = "";

  constructor(parent) {
    this.#parent = parent;
    this.#parent.append(el("p", { class: "quiet hint" }, "Point at a request, tap it or use the arrow keys."));
  }

  update(request) {
    const looks = JSON.stringify(request);
    if (!request || looks === this.#shown) return;
    this.#shown = looks;
    const [how, sign, words] = fate(request);
    const pair = (name, text) => el("div", {}, el("dt", {}, name), el("dd", {}, text));
    this.#parent.replaceChildren(
      el("h3", {}, request.id),
      el("p", { class: "fate", "data-fate": how }, el("span", { class: `glyph ${how}` }, sign), ` ${words}`),
      el("dl", {},
        pair("prompt", `${number(request.prompt_tokens)} tokens`),
        pair("output", `${number(request.tokens)} tokens`),
        pair("first token", plain(duration(request.ttft))),
        pair("each token", plain(duration(request.tpot))),
        pair("elapsed", plain(duration(request.elapsed))),
        ...(request.tenant ? [pair("tenant", request.tenant)] : [])),
      ...request.tries.map((one, at) => this.#try(one, request.num_tries - request.tries.length + at + 1, request.num_tries)),
      this.#command(traceCommand(request.id)));
  }

  #try(one, number, all) {
    // What a worker told of a phase at its beginning is part of the one that goes on.
    const open = one.phases.find(([, , seconds]) => seconds === null)?.[0];
    const phases = one.phases.filter(([name, , seconds]) => name !== open || seconds === null).map(([name, , seconds]) => el("li", {}, el("i", { class: `phase ${KINDS[name]}` }), `${name.replace("_", " ")} `, el("b", {}, seconds === null ? "…" : plain(duration(seconds)))));
    const on = one.prefill ? `on ${way({ tries: [one] })}` : "no workers yet";
    return el("div", { class: "try" },
      el("p", { class: "quiet" }, all > 1 ? `try ${number}, ${on}` : on),
      el("ul", { class: "legend" }, ...phases),
      ...(one.error ? [el("p", { class: "refused" }, one.error)] : []));
  }

  #command(text) {
    const code = el("code", {}, text);
    const button = el("button", { type: "button" }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        say(button, "Copied");
      } catch {
        // Browsers let pages copy from safe origins only.
        getSelection().selectAllChildren(code);
        say(button, "Selected");
      }
    });
    return el("p", { class: "command" }, code, button);
  }
}
