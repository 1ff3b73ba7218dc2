// Spectra with their slider, alignment and drift by round.

// --- diagnostics

const SPECTRA = {
  classifier_spectrum: [
    "Singular values of the classifier",
    "Values that shrink from round to round mean that the classes of the last layer collapse into fewer directions; a frozen classifier keeps its line.",
  ],
  representation_spectrum: [
    "Singular values of the features’ covariance",
    "A line that falls early means that features use few of their dimensions; stronger heterogeneity makes it fall earlier. Solid is the global model, dashed the local ones before averaging, where they were looked at.",
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
  gap: [
    "R: local models beside the global one",
    "Mean of log(local / global) over all singular values of the features: below 0, local models have collapsed further than the global one.",
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
  const points = spectrumPoints(row, name, round),
    beside = name === "representation_spectrum" && state.local ? spectrumPoints(row, "local_spectrum", round) : [];
  return { name: row, index: place(row), points, ...(beside.length ? { beside } : {}) };
}
function spectrumPoints(row, name, round) {
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
  if (!lists.length) return [];
  return lists[0].map(([at], n) => {
    const values = lists.map((list) => list[n] && list[n][1]).filter((v) => v > 0); // on a log scale, so a geometric mean
    return { x: at, y: values.length ? Math.exp(mean(values.map(Math.log))) : 0 };
  });
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
      has("local_spectrum") ? tick("local", "local models too") : null,
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
          whole: true,
          pair: "global / local",
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
          whole: true,
          series: shown().map((row) => series(row, "round", name, "diagnostics")),
        })),
      ),
      after,
    ),
  );
}
