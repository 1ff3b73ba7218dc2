// Spectra, alignment, drift, and what was measured after the runs.

// --- diagnostics

const SPECTRA = {
  classifier_spectrum: [
    "Singular values of the classifier",
    "Values that shrink from round to round mean that the classes of the last layer collapse into fewer directions; a frozen classifier keeps its line.",
  ],
  representation_spectrum: [
    "Singular values of the features’ covariance",
    "A line that falls early means that features use few of their dimensions; stronger heterogeneity makes it fall earlier.",
  ],
};
const BY_ROUND = {
  classifier_effective_rank: [
    "Effective rank of the classifier",
    "How many directions the last layer really uses: the higher, the better spread.",
  ],
  significant: [
    "Significant singular values",
    "How many dimensions of the features carry more than a trace of variance; a fall is dimensional collapse.",
  ],
  cosine: [
    "Agreement of the clients’ classifiers",
    "Mean cosine of the same class’s weights at two clients before averaging: 1 means that they point the same way, 0 that they have nothing in common.",
  ],
  norm_difference: [
    "Difference of the classifiers’ lengths",
    "Mean difference in length of the same class’s weights at two clients: 0 means that no client shouts louder than another.",
  ],
  distance: [
    "Drift of the clients",
    "Mean distance of a client’s update to the mean update: the larger, the more clients pull apart.",
  ],
  angle: [
    "Angle of the clients’ updates",
    "Mean angle of a client’s update to the mean update, in degrees: 90 means that they have nothing in common.",
  ],
};
function spectrum(row, name, round) {
  const lists = runsOf(row)
    .map((run) => {
      const found = run.diagnostics,
        all = found[name];
      if (!all) return null;
      let at = -1;
      found.spectrum_round.forEach((r, n) => {
        if (r <= round && all[n].length) at = n;
      });
      return at < 0 ? null : all[at];
    })
    .filter(Boolean);
  if (!lists.length) return { name: row, index: place(row), points: [] };
  const points = lists[0].map(([at], n) => {
    const values = lists.map((list) => list[n] && list[n][1]).filter((v) => v > 0); // on a log scale, so a geometric mean
    return { x: at, y: values.length ? Math.exp(mean(values.map(Math.log))) : 0 };
  });
  return { name: row, index: place(row), points };
}
function drawDiagnostics() {
  const box = $("diagnostics"),
    has = (key) => page.runs.some((run) => run.diagnostics[key]);
  const spectra = Object.keys(SPECTRA).filter(has),
    numbers = Object.keys(BY_ROUND).filter(has),
    after = drawAfter();
  if (!spectra.length && !numbers.length && !after.length) {
    return box.replaceChildren(
      el("h2", {}, "Diagnostics"),
      el(
        "p",
        { class: "note" },
        "None were recorded. With diagnose=every:10 a run records spectra, alignment and drift as it goes; isofed diagnose looks at a finished one.",
      ),
    );
  }
  const rounds = [...new Set(page.runs.flatMap((run) => run.diagnostics.spectrum_round || []))].sort((a, b) => a - b);
  let slider = null;
  if (spectra.length) {
    const at = () => rounds[state.round === null ? rounds.length - 1 : Math.min(state.round, rounds.length - 1)];
    const shownRound = el("output", {}, String(at()));
    slider = el(
      "div",
      { class: "controls" },
      el(
        "label",
        {},
        "spectra of round ",
        shownRound,
        " ",
        el("input", {
          type: "range",
          id: "round",
          min: 0,
          max: rounds.length - 1,
          value: state.round === null ? rounds.length - 1 : state.round,
          "aria-label": "round of the spectra",
          oninput: (event) => {
            state.round = Number(event.target.value);
            shownRound.textContent = String(at());
            event.target.setAttribute("aria-valuetext", `round ${at()}`);
            spectra.forEach((name) => charts.get(name)());
          },
        }),
      ),
    );
  }
  box.replaceChildren(
    el("h2", {}, "Diagnostics"),
    ...[slider].filter(Boolean),
    el(
      "div",
      { class: "grid" },
      spectra.map((name) =>
        chart(name, SPECTRA[name][0], SPECTRA[name][1], () => ({
          x: "place",
          y: "singular value",
          log: true,
          series: shown().map((row) =>
            spectrum(
              row,
              name,
              rounds[state.round === null ? rounds.length - 1 : Math.min(state.round, rounds.length - 1)],
            ),
          ),
        })),
      ),
      numbers.map((name) =>
        chart(name, BY_ROUND[name][0], BY_ROUND[name][1], () => ({
          x: "round",
          y: BY_ROUND[name][0],
          series: shown().map((row) => series(row, "round", name, "diagnostics")),
        })),
      ),
      after,
    ),
  );
}
// What was measured after the run; of several seeds the first that has it.
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
  const curved = found("curvature");
  if (curved.length) {
    const top = (it) => list(it.top_eigenvalues || it.eigenvalues)[0] ?? null;
    card(
      "Curvature",
      "Large values mean a sharp minimum, which tends to carry over less well to new data; H_N and H_D say how differently curved the clients’ losses are (low) and how alike in direction (towards 1).",
      bars(
        "largest eigenvalue",
        curved.map(({ row, it }) => [row, top(it)]),
      ),
      bars(
        "trace of the Hessian",
        curved.map(({ row, it }) => [row, it.trace]),
      ),
      bars(
        "H_N between clients",
        curved.map(({ row, it }) => [row, (it.clients || {}).H_N]),
      ),
      bars(
        "H_D between clients",
        curved.map(({ row, it }) => [row, (it.clients || {}).H_D]),
      ),
    );
  }
  const bought = found("cost").map(({ row, it }) => ({ row, it: it.points_per || {} }));
  if (bought.some(({ it }) => Object.keys(it).length)) {
    card(
      "What it bought",
      "Points of accuracy above chance for one megabyte, one second of training and one GFLOP, over the whole run: more is cheaper.",
      ["megabyte", "second", "gflop"].map((name) =>
        bars(
          `points per ${name === "gflop" ? "GFLOP" : name}`,
          bought.map(({ row, it }) => [row, it[name]]),
        ),
      ),
    );
  }
  const sure = found("calibration").filter(({ it }) => list(it.confidence).length && list(it.accuracy).length);
  if (sure.length) {
    cards.push(
      chart(
        "calibration",
        "Calibration",
        `Below the dashed line a model is surer than it is right. Expected error: ${sure.map(({ row, it }) => `${row} ${percent(it.error)} %`).join(", ")}.`,
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
                .map((x, n) => ({ x, y: it.accuracy[n] }))
                .filter((p) => typeof p.x === "number" && typeof p.y === "number"),
            })),
        }),
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
      el(
        "div",
        { class: "minis" },
        clouds.map(({ row, it }) => scatter(row, it)),
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
function scatter(row, it) {
  const points = it.points.filter((p) => Array.isArray(p) && Number.isFinite(p[0]) && Number.isFinite(p[1]));
  const by = new Set(list(it.client)).size > 1 ? "client" : "class",
    groups = list(it[by]),
    names = [...new Set(groups)].sort((a, b) => (a > b ? 1 : -1));
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
            style: { fill: colour(names.indexOf(groups[n])) },
            "fill-opacity": 0.8,
          },
          svg("title", {}, `${by} ${groups[n]}`),
        ),
      ),
    ),
  );
}
