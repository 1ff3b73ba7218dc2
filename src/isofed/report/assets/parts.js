// The answer and the curves.

// --- the parts of the page

function drawAnswer() {
  const said = page.answer;
  $("answer").replaceChildren(
    el("h1", {}, said.question),
    el("p", { class: "headline" }, said.headline),
    el(
      "dl",
      { class: "facts" },
      said.details.map(([what, text]) => [el("dt", {}, what), el("dd", {}, text)]),
    ),
    ...page.problems.map((text) => el("p", { class: "note warn" }, text)),
  );
  document.title = said.question;
}

const AXES = {
  round: "round",
  megabytes: "megabytes sent",
  seconds: "seconds of training",
  gflop: "GFLOP of local steps",
};
const COSTS = { round: "rounds", megabytes: "megabytes", seconds: "seconds", gflop: "GFLOP" };
const LOSSES = { loss: "test loss", train_loss: "training loss", local_loss: "local loss" };
function radios(legend, name, choices) {
  return el(
    "fieldset",
    {},
    el("legend", {}, legend),
    Object.entries(choices).map(([value, text]) =>
      el(
        "label",
        {},
        el("input", {
          type: "radio",
          name,
          value,
          checked: state[name] === value,
          onchange: () => {
            state[name] = value;
            state.zoom = {};
            redrawCharts();
          },
        }),
        ` ${text}`,
      ),
    ),
  );
}
const tick = (name, text) =>
  el(
    "label",
    {},
    el("input", {
      type: "checkbox",
      name,
      checked: state[name],
      onchange: (event) => {
        state[name] = event.target.checked;
        redrawCharts();
      },
    }),
    ` ${text}`,
  );

function drawCurves() {
  const has = (key) => page.runs.some((run) => run.curves[key]);
  if (!has("accuracy"))
    return $("curves").replaceChildren(
      el("h2", {}, "Curves"),
      el("p", { class: "soft" }, "No round has been judged yet."),
    );
  const losses = Object.fromEntries(Object.entries(LOSSES).filter(([key]) => has(key)));
  const costs = Object.fromEntries(Object.entries(COSTS).filter(([key]) => has(key)));
  if (!costs[state.x]) state.x = "round";
  const several = rows().some((row) => runsOf(row).length > 1);
  $("curves").replaceChildren(
    el("h2", {}, "Curves"),
    el(
      "div",
      { class: "controls" },
      radios("against", "x", costs),
      Object.keys(losses).length > 1 ? radios("loss", "loss", losses) : null,
      tick("log", "log scale"),
      several ? tick("seeds", "each seed") : null,
    ),
    el(
      "div",
      { class: "grid" },
      chart("accuracy", "Accuracy, %", null, () => ({
        x: AXES[state.x],
        y: "accuracy in percent",
        percent: true,
        least: 0,
        most: 1,
        level: page.target,
        whole: state.x === "round",
        series: shown().map((row) => series(row, state.x, "accuracy")),
      })),
      chart("loss", "Loss", null, () => ({
        x: AXES[state.x],
        y: LOSSES[state.loss],
        log: state.log,
        whole: state.x === "round",
        series: shown().map((row) => series(row, state.x, state.loss)),
      })),
    ),
    el(
      "p",
      { class: "note" },
      [
        several ? "A line is the mean over seeds, its band one standard deviation to each side." : "",
        page.runs.some((run) => run.asked)
          ? "A diamond is the final model, after a last question to the clients; it is the one in the table."
          : "",
        page.target ? `The dashed line is the target, ${short(100 * page.target)} %.` : "",
        "Seconds and GFLOP are those of training; evaluating the model is not counted.",
      ]
        .filter(Boolean)
        .join(" "),
    ),
    el(
      "p",
      { class: "note hint" },
      "Point at a chart to read it, drag to zoom, double-click to go back; with the keyboard: arrows, +, − and 0.",
    ),
  );
}
