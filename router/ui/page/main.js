// Asks the router once a second while somebody looks, and shows what it tells.

import { byId, mark, say } from "./dom.js";
import { Figures } from "./figures.js";
import { History } from "./history.js";
import { Pools } from "./pools.js";
import { Requests } from "./requests.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 4000;

const history = new History();
const figures = new Figures(byId("figures"));
const pools = new Pools(byId("pools"));
const requests = new Requests();

let heardAt = null;
let timer = null;
let asking = false;

async function look() {
  clearTimeout(timer);
  if (document.hidden || asking) return;
  asking = true;
  const began = performance.now();
  const response = await ask();
  asking = false;
  if (response?.status === 401) {
    // Each further look would let the browser ask its user again.
    notice("This router wants an API key. Reload the page to enter one.");
    return;
  }
  timer = setTimeout(look, Math.max(0, INTERVAL_MS - (performance.now() - began)));
  if (response?.state) show(response.state);
  else lost();
}

// Undefined: nobody answers.
async function ask() {
  try {
    const response = await fetch("state", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
    return { status: response.status, state: response.ok ? await response.json() : null };
  } catch {
    return undefined;
  }
}

function show(state) {
  heardAt = performance.now();
  notice("");
  history.withRates(state);
  head(state);
  figures.update(state);
  pools.update(state);
  requests.update(state);
}

function head(state) {
  say(byId("cluster"), state.cluster);
  say(byId("models"), state.models.join(", "));
  say(byId("http"), state.endpoints.http);
  say(byId("grpc"), state.endpoints.grpc);
  say(byId("router"), `${state.router.name}, ${state.router.policy}`);
  const ready = byId("ready");
  say(ready, state.ready ? "ready" : "not ready");
  mark(ready, "data-state", state.ready ? "ready" : "not-ready");
  say(byId("reason"), state.reason);
  byId("reason").hidden = !state.reason;
  document.title = `${state.cluster}${state.ready ? "" : " (not ready)"} · kvferry`;
}

function lost() {
  notice("The router does not answer. Trying again.");
  say(byId("notice-age"), heardAt === null ? "" : `Last heard ${Math.round((performance.now() - heardAt) / 1000)} s ago.`);
}

function notice(text) {
  say(byId("notice-text"), text);
  if (!text) say(byId("notice-age"), "");
  byId("notice").hidden = !text;
  document.body.classList.toggle("stale", Boolean(text));
}

document.addEventListener("visibilitychange", look);
look();
