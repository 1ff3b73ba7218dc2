// What the other files build on: the data of the page, what was chosen, elements and numbers. The files become one
// script, in the order that page.py lists. Texts of the runs are only ever put in as text.

const $ = (id) => document.getElementById(id);
let page = JSON.parse($("data").textContent);
const state = {
  off: new Set(),
  x: "round",
  loss: "loss",
  log: false,
  seeds: false,
  sort: null,
  split: 0,
  round: null,
  local: true,
  zoom: {},
};
let printing = false; // charts are then drawn wide enough for names beside their lines, which tell them apart in grey
const charts = new Map(); // key of a chart: the function that draws it

// --- making elements

const SVG = "http://www.w3.org/2000/svg";
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const scrolled = (names, rows) =>
  // a table that scrolls by itself where a page is narrow; without names it has no head
  el(
    "div",
    { class: "scroll" },
    el(
      "table",
      { class: "data" },
      names.length ? el("thead", {}, el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)))) : null,
      el("tbody", {}, rows),
    ),
  );

// --- numbers

const percent = (v) => (v === null || v === undefined ? "–" : (100 * v).toFixed(1));
const signed = (v) => (v < 0 && v <= -0.0005 ? "−" : "+") + Math.abs(100 * v).toFixed(1);
function short(v) {
  if (v === null || v === undefined || Number.isNaN(v)) return "–";
  const size = Math.abs(v);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return v.toExponential(1).replace(".0e", "e").replace("e+", "e");
  return String(Number(v.toPrecision(size >= 1000 ? 4 : 3)));
}
// Texts of a column, with as many places behind the point as each other: three digits of the largest number, and two of
// the smallest.
function aligned(values) {
  const sizes = values.filter((v) => Number.isFinite(v) && v !== 0).map(Math.abs),
    power = (v) => Math.floor(Math.log10(v));
  const [low, high] = sizes.length ? [Math.min(...sizes), Math.max(...sizes)] : [1, 1];
  const places = Math.max(0, 2 - power(high), 1 - power(low));
  const text = places > 6 || high >= 1e6 ? (v) => v.toExponential(2).replace("e+", "e") : (v) => v.toFixed(places);
  return values.map((v) => (Number.isFinite(v) ? text(v) : "–"));
}
function duration(seconds) {
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const s = Math.round(seconds),
    two = (n) => String(n).padStart(2, "0");
  return s < 3600
    ? `${Math.floor(s / 60)}:${two(s % 60)}`
    : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
function deviation(values) {
  const m = mean(values);
  return values.length > 1 ? Math.sqrt(values.reduce((a, v) => a + (v - m) ** 2, 0) / (values.length - 1)) : 0;
}
function ticks(low, high, count, whole = false) {
  const rough = Math.max((high - low) / count || 1, whole ? 1 : 0),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10]
    .map((m) => m * power)
    .find((s) => s >= rough * 0.999 && (!whole || Number.isInteger(s))); // there is no round 1.5
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}
function logTicks(low, high) {
  const all = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) all.push(10 ** e);
  const every = Math.ceil(all.length / 7),
    inside = all.filter((v) => v >= low && v <= high);
  if (inside.length < 2) return ticks(low, high, 4).filter((v) => v > 0);
  return inside.filter((_, n) => n % every === 0);
}
