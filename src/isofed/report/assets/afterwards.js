// What isofed diagnose measured after the runs.

// What was measured after the run; of several seeds the first that has it.
const FEW = 5; // samples of a bin, of which a share means nothing
const list = (value) => (Array.isArray(value) ? value : []);
function found(name) {
  return rows()
    .map((row) => ({ row, it: (runsOf(row).find((run) => run.diagnosis[name]) || { diagnosis: {} }).diagnosis[name] }))
    .filter(({ it }) => it && typeof it === "object");
}
function drawAfter() {
  const cards = [],
    card = (title, note, ...content) =>
      cards.push(
        el(
          "div",
          { class: "card" },
          el("div", { class: "top" }, el("h3", {}, title)),
          el("p", { class: "note" }, note),
          content,
        ),
      );
  const sure = found("calibration").filter(({ it }) => list(it.confidence).length && list(it.accuracy).length);
  if (sure.length) {
    cards.push(
      chart(
        "calibration",
        "Calibration",
        `Below the dashed line a model is surer than it is right; bins of fewer than ${FEW} samples are left out. Expected error: ${sure.map(({ row, it }) => `${row} ${percent(it.error)} %`).join(", ")}.`,
        () => ({
          x: "confidence",
          y: "share that is right",
          percent: true,
          diagonal: true,
          series: sure
            .filter(({ row }) => !state.off.has(row))
            .map(({ row, it }) => ({
              name: row,
              index: place(row),
              points: it.confidence
                .map((x, n) => ({ x, y: it.accuracy[n], n: list(it.counts)[n] ?? FEW }))
                .filter((p) => typeof p.x === "number" && typeof p.y === "number" && p.n >= FEW)
                .map(({ x, y }) => ({ x, y })),
            })),
        }),
      ),
    );
  }
  const curved = found("curvature");
  if (curved.length) {
    const top = (it) => list(it.top_eigenvalues || it.eigenvalues)[0] ?? null;
    card(
      "Curvature",
      "Large values mean a sharp minimum, which tends to carry over less well to new data; H_N and H_D say how differently curved the clients’ losses are (low) and how alike in direction (towards 1).",
      el(
        "div",
        { class: "minis wide" },
        [
          ["largest eigenvalue", top],
          ["trace of the Hessian", (it) => it.trace],
          ["H_N between clients", (it) => (it.clients || {}).H_N],
          ["H_D between clients", (it) => (it.clients || {}).H_D],
        ].map(([title, value]) =>
          bars(
            title,
            curved.map(({ row, it }) => [row, value(it)]),
          ),
        ),
      ),
    );
  }
  const maps = found("landscape")
    .map(({ row, it }) => ({ row, grid: list(it.losses || it.loss), steps: list(it.steps) }))
    .filter(({ grid }) => Array.isArray(grid[0]));
  if (maps.length) {
    const logs = maps
      .flatMap(({ grid }) => grid.flat())
      .filter((v) => v > 0)
      .map(Math.log)
      .sort((a, b) => a - b);
    const low = logs[0],
      high = logs[Math.floor(0.98 * (logs.length - 1))];
    card(
      "Loss around the model",
      `Dark is high, on one scale for all (${short(Math.exp(low))} to ${short(Math.exp(high))}); the model is at the cross. A wide light valley is a flat minimum.`,
      el(
        "div",
        { class: "minis" },
        maps.map(({ row, grid }) =>
          el(
            "figure",
            {},
            el("figcaption", {}, row),
            svg(
              "svg",
              { viewBox: "0 0 100 100", role: "img", "aria-label": `loss around the model of ${row}` },
              picture(
                grid.map((line) =>
                  line.map((v) => 0.02 + (0.97 * (Math.log(Math.max(v, 1e-12)) - low)) / (high - low || 1)),
                ),
                0,
                0,
                100,
                100,
              ),
              svg("path", { d: "M47 50H53M50 47V53", "stroke-width": 0.8, style: { stroke: "#b00020" } }),
            ),
          ),
        ),
      ),
    );
  }
  const clouds = found("tsne").filter(({ it }) => list(it.points).length);
  if (clouds.length) {
    card(
      "Features in the plane (t-SNE)",
      "Points that are near have like features; islands by client rather than by class mean that clients see the same thing differently. Distances between islands mean nothing.",
      ["class", "client"].map((by) => legend(by, clouds)),
      el(
        "div",
        { class: "minis" },
        clouds.flatMap(({ row, it }) =>
          ["class", ...(new Set(list(it.client)).size > 1 ? ["client"] : [])].map((by) => scatter(row, it, by)),
        ),
      ),
    );
  }
  return cards;
}
function bars(title, pairs) {
  const known = pairs.filter(([, v]) => typeof v === "number");
  if (!known.length) return null;
  const most = Math.max(...known.map(([, v]) => Math.abs(v))) || 1;
  return el(
    "div",
    {},
    el("p", { class: "note" }, title),
    el(
      "table",
      { class: "data" },
      el(
        "tbody",
        {},
        known.map(([row, v]) =>
          el(
            "tr",
            {},
            el("td", {}, row),
            el(
              "td",
              { style: { width: "50%", textAlign: "left" } },
              svg(
                "svg",
                { width: "100%", height: 10, "aria-hidden": "true" },
                svg("rect", {
                  width: `${(100 * Math.abs(v)) / most}%`,
                  height: 10,
                  rx: 2,
                  style: { fill: colour(place(row)) },
                }),
              ),
            ),
            el("td", {}, short(v)),
          ),
        ),
      ),
    ),
  );
}
const ordered = (groups) => [...new Set(groups)].sort((a, b) => (a > b ? 1 : -1));
// Beyond the number of colours, rings instead of discs.
const dot = (n) =>
  n < 8
    ? { style: { fill: colour(n) }, "fill-opacity": 0.8 }
    : { style: { fill: "none", stroke: colour(n) }, "stroke-width": 0.45 };
function legend(by, clouds) {
  const names = ordered(clouds.flatMap(({ it }) => list(it[by])));
  if (names.length < 2 || names.length > 20) return null;
  return el(
    "p",
    { class: "note legend" },
    `${by}: `,
    names.map((name, n) =>
      el(
        "span",
        {},
        svg("svg", { width: 12, height: 12, viewBox: "-1.3 -1.3 2.6 2.6", "aria-hidden": "true" }, svg("circle", { r: 1, ...dot(n) })),
        String(name),
      ),
    ),
  );
}
function scatter(row, it, by) {
  const points = it.points.filter((p) => Array.isArray(p) && Number.isFinite(p[0]) && Number.isFinite(p[1]));
  const groups = list(it[by]),
    names = ordered(groups);
  const [xs, ys] = [0, 1].map((axis) => [
    Math.min(...points.map((p) => p[axis])),
    Math.max(...points.map((p) => p[axis])),
  ]);
  const scale = 94 / Math.max(xs[1] - xs[0], ys[1] - ys[0], 1e-9);
  return el(
    "figure",
    {},
    el("figcaption", {}, `${row}, by ${by}`),
    svg(
      "svg",
      { viewBox: "0 0 100 100", role: "img", "aria-label": `features of ${row}, by ${by}` },
      points.map((p, n) =>
        svg(
          "circle",
          {
            cx: 3 + (p[0] - xs[0]) * scale,
            cy: 97 - (p[1] - ys[0]) * scale,
            r: 0.9,
            ...dot(names.indexOf(groups[n])),
          },
          svg("title", {}, `${by} ${groups[n]}`),
        ),
      ),
    ),
  );
}
