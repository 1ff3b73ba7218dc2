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
        `How many of its answers are right, in percent, against how sure it is. Below the dashed line a model is surer than it is right; bins of fewer than ${FEW} samples are left out. Expected error: ${sure.map(({ row, it }) => `${row} ${percent(it.error)} %`).join(", ")}.`,
        () => ({
          x: "confidence, %",
          y: "share that is right, %",
          percent: true,
          percentX: true,
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
    const top = (it) => list(it.top_eigenvalues || it.eigenvalues)[0] ?? null,
      between = (name) => (it) => (it.clients || {})[name];
    card(
      "Curvature",
      [
        "Large values mean a sharp minimum, which tends to carry over less well to new data.",
        curved.some(({ it }) => typeof it.trace_error === "number") ? "± is the standard error of the trace." : "",
        curved.some(({ it }) => it.clients)
          ? "H_N: how much the clients’ curvatures differ in size, 0 if not at all; H_D: how alike their directions are, at most 1; both of the Hessians’ diagonals, and of the traces of their tensors."
          : "",
        curved.some(({ it }) => (it.clients || {}).noise)
          ? "Where noise outweighs the estimate of the diagonals, theirs are left out: more probes would tell."
          : "",
      ]
        .filter(Boolean)
        .join(" "),
      el(
        "div",
        { class: "minis wide" },
        [
          ["largest eigenvalue", top],
          ["trace of the Hessian", (it) => it.trace, (it) => it.trace_error],
          ["H_N, diagonals", between("H_N")],
          ["H_D, diagonals", between("H_D")],
          ["H_N, traces", between("H_N_traces")],
          ["H_D, traces", between("H_D_traces")],
        ].map(([title, value, error]) =>
          bars(
            title,
            curved.map(({ row, it }) => [row, value(it), error ? error(it) : null]),
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
      `Dark is high, on one scale for all (${short(Math.exp(low))} to ${short(Math.exp(high))}); the model is at the cross, and steps go along the two directions. A wide light valley is a flat minimum.`,
      el(
        "div",
        { class: "minis" },
        maps.map(({ row, grid, steps }) =>
          el(
            "figure",
            {},
            el("figcaption", {}, row),
            landscape(
              row,
              steps,
              grid.map((line) =>
                line.map((v) =>
                  typeof v === "number" ? 0.02 + (0.97 * (Math.log(Math.max(v, 1e-12)) - low)) / (high - low || 1) : 0,
                ),
              ),
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
          ["class", ...(new Set(list(it.client)).size > 1 ? ["client"] : [])].map((by) =>
            scatter(row, it, by, groupsOf(by, clouds)),
          ),
        ),
      ),
    );
  }
  return cards;
}
// Shades of a grid [first direction][second direction]: the first to the right, the second upwards, as in figures.
function landscape(row, steps, grid) {
  const across = grid[0].map((_, n) => grid.map((line) => line[line.length - 1 - n])),
    small = { fontSize: "5.5px" },
    ends = [steps[0], steps[steps.length - 1]].map((v) => (typeof v === "number" ? short(v) : ""));
  return svg(
    "svg",
    { viewBox: "0 0 112 114", role: "img", "aria-label": `loss around the model of ${row}` },
    picture(across, 10, 1, 100, 100),
    svg("path", { d: "M57 51H63M60 48V54", "stroke-width": 0.8, style: { stroke: "#b00020" } }),
    svg("text", { x: 10, y: 107, style: small }, ends[0]),
    svg("text", { x: 110, y: 107, "text-anchor": "end", style: small }, ends[1]),
    svg("text", { x: 60, y: 107, "text-anchor": "middle", style: small }, "along the first direction"),
    svg("text", { x: 8, y: 101, "text-anchor": "end", style: small }, ends[0]),
    svg("text", { x: 8, y: 5.5, "text-anchor": "end", style: small }, ends[1]),
    svg("text", { "text-anchor": "middle", transform: "translate(7 51) rotate(-90)", style: small }, "along the second"),
  );
}
// Pairs of a row and its number, with the error of that, if there is one; a number that is not known has no bar.
function bars(title, pairs) {
  const known = pairs.filter(([, v]) => typeof v === "number");
  if (!known.length) return null;
  const most = Math.max(...known.map(([, v]) => Math.abs(v))) || 1,
    texts = aligned([...pairs.map(([, v]) => v), ...pairs.map(([, , e]) => e)]), // as exact as each other
    errors = texts.slice(pairs.length);
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
        pairs.map(([row, v], n) =>
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
                typeof v === "number"
                  ? svg("rect", {
                      width: `${(100 * Math.abs(v)) / most}%`,
                      height: 10,
                      rx: 2,
                      style: { fill: colour(place(row)) },
                    })
                  : null,
              ),
            ),
            el("td", {}, texts[n] + (errors[n] === "–" ? "" : ` ± ${errors[n]}`)),
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
const groupsOf = (by, clouds) => ordered(clouds.flatMap(({ it }) => list(it[by]))); // one colour each, in all pictures
function legend(by, clouds) {
  const names = groupsOf(by, clouds);
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
function scatter(row, it, by, names) {
  const points = it.points.filter((p) => Array.isArray(p) && Number.isFinite(p[0]) && Number.isFinite(p[1]));
  const groups = list(it[by]);
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
