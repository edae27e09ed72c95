// Elements, text and numbers. Whatever the router tells becomes text: no markup is ever made of it.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const el = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
export const svg = (tag, properties = {}, ...children) => fill(document.createElementNS(SVG, tag), properties, children);
export const byId = (id) => document.getElementById(id);

export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, name, value) {
  if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

// Views by key, in the order of the items: those that stay keep their node, and with it focus and hover.
export function keyed(parent, views, items, keyOf, make) {
  const seen = new Set();
  items.forEach((item, at) => {
    const key = keyOf(item);
    seen.add(key);
    if (!views.has(key)) views.set(key, make(item));
    const view = views.get(key);
    view.update(item);
    if (parent.children[at] !== view.node) parent.insertBefore(view.node, parent.children[at] ?? null);
  });
  for (const [key, view] of views) {
    if (!seen.has(key)) {
      view.node.remove();
      views.delete(key);
    }
  }
}

// 0, 3.2, 47, 1,234, 56.7k
export function number(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (value >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(value >= 10 ? 0 : 1);
}

// [figure, unit]
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return ["–", ""];
  if (seconds >= 10) return [seconds.toFixed(1), "s"];
  if (seconds >= 1) return [seconds.toFixed(2), "s"];
  const ms = seconds * 1000;
  return [ms >= 100 ? ms.toFixed(0) : ms.toFixed(1), "ms"];
}

export function bytesPerSecond(value) {
  for (const [unit, size] of [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]]) {
    if (value >= size) return [(value / size).toFixed(value >= 10 * size ? 0 : 1), unit];
  }
  return [value ? value.toFixed(0) : "0", "B/s"];
}

export const plain = ([figure, unit]) => (unit ? `${figure} ${unit}` : figure);
