// How requests and their phases are told and drawn, wherever they are shown.

import { el } from "./dom.js";

// Of the router's names, which are drawn alike.
export const KINDS = { queued: "queued", prefill_queued: "queued", prefill: "prefill", transfer: "transfer", decode_queued: "queued", decode: "decode" };
// Which part of a lane's height each kind takes: not told apart by colour alone.
export const HEIGHTS = { queued: 0.2, prefill: 1, transfer: 0.45, decode: 0.7 };

export const keyOf = (request) => `${request.tenant} ${request.id} ${request.arrived}`;

// [how it stands, a mark, words]
export function fate(request) {
  const { outcome } = request;
  if (outcome === "running") return ["running", "▸", current(request)];
  if (outcome === "stop" || outcome === "length") return ["done", "✓", outcome];
  if (outcome.startsWith("closed")) return ["closed", "■", "closed by its reader"];
  return ["failed", "✕", outcome];
}

function current(request) {
  const phase = request.tries.at(-1)?.phases.at(-1);
  return phase ? KINDS[phase[0]] : "queued";
}

export function way(request) {
  const last = request.tries.at(-1);
  if (!last?.prefill) return "–";
  return last.prefill === last.decode ? last.decode : `${last.prefill} → ${last.decode}`;
}

export function legend() {
  const item = (kind, text) => el("li", {}, el("i", { class: `phase ${kind}` }), text);
  return [item("queued", "queued"), item("prefill", "prefill"), item("transfer", "transfer"), item("decode", "decode"),
    el("li", {}, el("span", { class: "glyph failed" }, "✕"), "failed"), el("li", {}, el("span", { class: "glyph" }, "↻"), "tried again")];
}

// What a shell takes for this one word, whatever a client has put into it.
export function traceCommand(id) {
  const word = /^[\w.:@%+,-]+$/.test(id) ? id : `'${id.replaceAll("'", String.raw`'\''`)}'`;
  return `kvferry trace ${id.startsWith("-") ? "-- " : ""}${word}`;
}
