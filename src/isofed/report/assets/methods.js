// The methods, their lines as means over seeds, and the card around a chart.

// --- methods

const rows = () => page.rows.map((row) => row.method);
const shown = () => rows().filter((row) => !state.off.has(row));
const runsOf = (row) => page.runs.filter((run) => run.row === row);
const place = (row) => rows().indexOf(row);
const colour = (n) => `var(--s${n % 8})`;
const dash = (n) => ["", "7 3", "2 3"][Math.floor(n / 8) % 3];

function drawMethods() {
  const box = $("methods"),
    names = rows();
  if (names.length < 2) return box.replaceChildren();
  const turn = (change) => {
    change();
    refresh();
  };
  box.replaceChildren(
    ...names.map((row, n) =>
      el(
        "button",
        {
          type: "button",
          "aria-pressed": String(!state.off.has(row)),
          "data-method": row,
          title: "click: show or hide; double click: only this one",
          onclick: () => turn(() => (state.off.has(row) ? state.off.delete(row) : state.off.add(row))),
          ondblclick: () =>
            turn(() => {
              state.off = new Set(names.filter((other) => other !== row));
            }),
          onpointerenter: () => light(row),
          onpointerleave: () => light(null),
        },
        svg(
          "svg",
          { width: 22, height: 10, "aria-hidden": "true" },
          svg("line", {
            x1: 1,
            x2: 21,
            y1: 5,
            y2: 5,
            "stroke-width": 3,
            "stroke-dasharray": dash(n),
            style: { stroke: colour(n) },
          }),
        ),
        row,
      ),
    ),
    el(
      "button",
      {
        type: "button",
        class: "all",
        onclick: () =>
          turn(() => {
            state.off = state.off.size ? new Set() : new Set(names);
          }),
      },
      state.off.size ? "show all" : "hide all",
    ),
  );
}
function light(row) {
  document.querySelectorAll("g[data-row]").forEach((g) => {
    g.style.opacity = row === null || g.dataset.row === row ? 1 : 0.15;
  });
}

// Mean and deviation over seeds, round by round; the place on the other axes is a mean as well.
function series(row, x, y, part = "curves") {
  const at = new Map(),
    lines = [];
  for (const run of runsOf(row)) {
    const values = run[part] || {},
      line = [];
    if (!values[y] || !values[x]) continue;
    values.round.forEach((round, n) => {
      if (values[y][n] === null || values[x][n] === null) return;
      if (!at.has(round)) at.set(round, []);
      at.get(round).push([values[x][n], values[y][n]]);
      line.push({ x: values[x][n], y: values[y][n] });
    });
    lines.push(line);
  }
  const points = [...at]
    .sort((a, b) => a[0] - b[0])
    .map(([round, pairs]) => {
      const ys = pairs.map((pair) => pair[1]),
        m = mean(ys),
        d = deviation(ys);
      return { round, x: mean(pairs.map((pair) => pair[0])), y: m, low: m - d, high: m + d, n: ys.length };
    });
  const known = ["accuracy", "loss"].includes(y) && part === "curves",
    finals = known ? runsOf(row).filter((run) => run.asked && typeof run[y] === "number").map((run) => run[y]) : [];
  const final = finals.length ? mean(finals) : null;
  return { name: row, index: place(row), points, lines, final };
}

// --- a line chart: hover or arrow keys to read, drag to zoom, double click or 0 to go back

function chart(key, title, note, make) {
  const plot = el("div", { class: "plot" });
  const zoom = (factor) => () => {
    widen(key, factor);
    draw();
  };
  const tool = (text, label, act) =>
    el("button", { type: "button", "aria-label": `${label}: ${title}`, title: label, onclick: act }, text);
  const card = el(
    "div",
    { class: "card", "data-chart": key },
    el(
      "div",
      { class: "top" },
      el("h3", {}, title),
      el(
        "div",
        { class: "tools" },
        tool("+", "zoom in", zoom(0.6)),
        tool("−", "zoom out", zoom(1 / 0.6)),
        tool("↺", "whole range", () => {
          delete state.zoom[key];
          draw();
        }),
      ),
    ),
    note ? el("p", { class: "note" }, note) : null,
    plot,
  );
  let inner = null;
  const draw = () => {
    inner = lineChart(plot, key, title, make(), draw, inner);
  };
  charts.set(key, draw);
  return card;
}
const views = {}; // what each chart shows now: { x: [low, high], y: [low, high], full }
function widen(key, factor) {
  const view = views[key];
  if (!view) return;
  const [low, high] = view.x,
    middle = (low + high) / 2,
    half = ((high - low) / 2) * factor;
  const x = [Math.max(view.full[0], middle - half), Math.min(view.full[1], middle + half)];
  if (x[0] <= view.full[0] && x[1] >= view.full[1]) delete state.zoom[key];
  else state.zoom[key] = { x };
}
