// The answer, the curves, the table and the split.

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

const AXES = { round: "round", megabytes: "megabytes sent", seconds: "seconds of training" };
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
  const several = rows().some((row) => runsOf(row).length > 1);
  $("curves").replaceChildren(
    el("h2", {}, "Curves"),
    el(
      "div",
      { class: "controls" },
      radios("against", "x", { round: "rounds", megabytes: "megabytes", seconds: "seconds" }),
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
        series: shown().map((row) => series(row, state.x, "accuracy")),
      })),
      chart("loss", "Loss", null, () => ({
        x: AXES[state.x],
        y: LOSSES[state.loss],
        log: state.log,
        series: shown().map((row) => series(row, state.x, state.loss)),
      })),
    ),
    el(
      "p",
      { class: "note" },
      [
        several ? "A line is the mean over seeds, its band one standard deviation to each side." : "",
        page.runs.some((run) => run.asked)
          ? "A diamond is the final model, after the questions that a method asks behind the last round."
          : "",
        page.target ? `The dashed line is the target, ${short(100 * page.target)} %.` : "",
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

// --- the table

function columns() {
  const target = page.target,
    base = rows()[0];
  return [
    { name: "method", key: "method", text: (r) => r.method, sort: (r) => r.method, words: true },
    {
      name: "accuracy %",
      text: (r) =>
        r.accuracy === null ? "–" : percent(r.accuracy) + (r.std === null ? "" : ` ± ${(100 * r.std).toFixed(1)}`),
      sort: (r) => r.accuracy,
    },
    {
      name: "differ",
      text: (r) => (r.difference === null ? "" : signed(r.difference) + (r.clear ? " *" : "")),
      sort: (r) => (r.method === base ? 0 : r.difference),
    },
    {
      name: "95 % interval",
      text: (r) => (r.low === null ? "" : `${signed(r.low)} to ${signed(r.high)}`),
      sort: (r) => r.low,
      draw: forest,
    },
    target
      ? {
          name: `rounds to ${short(100 * target)} %`,
          text: (r) =>
            !r.seeds
              ? "–"
              : r.rounds_to_target === null
                ? "never"
                : r.rounds_to_target.toFixed(1) + (r.reached < r.seeds ? ` (${r.reached}/${r.seeds})` : ""),
          sort: (r) => r.rounds_to_target ?? (r.seeds ? Infinity : null),
        }
      : null,
    {
      name: "time",
      text: (r) => (r.relative_seconds ? `${r.relative_seconds.toFixed(2)}x` : "–"),
      sort: (r) => r.relative_seconds,
    },
    { name: "s / round", text: (r) => short(r.seconds_per_round), sort: (r) => r.seconds_per_round },
    {
      name: "MB / round",
      text: (r) => (r.megabytes_per_round === null ? "–" : r.megabytes_per_round.toFixed(2)),
      sort: (r) => r.megabytes_per_round,
    },
    {
      name: "seeds",
      text: (r) => (r.seeds === r.runs ? String(r.seeds) : `${r.seeds} of ${r.runs}`),
      sort: (r) => r.seeds,
    },
  ].filter((column) => column && (rows().length > 1 || !["differ", "95 % interval", "time"].includes(column.name)));
}
function forest(r) {
  const ends = page.rows.flatMap((row) => (row.low === null ? [] : [row.low, row.high]));
  if (r.low === null || !ends.length) return null;
  const low = Math.min(0, ...ends),
    high = Math.max(0, ...ends),
    X = (v) => 3 + (94 * (v - low)) / (high - low || 1),
    n = place(r.method);
  return svg(
    "svg",
    { width: 100, height: 14, "aria-hidden": "true" },
    svg("line", { class: "grid-line", x1: X(0), x2: X(0), y1: 0, y2: 14 }),
    svg("line", { x1: X(r.low), x2: X(r.high), y1: 7, y2: 7, "stroke-width": 2, style: { stroke: colour(n) } }),
    svg("circle", { cx: X(r.difference), cy: 7, r: 3.5, style: { fill: colour(n) } }),
  );
}
function sorted() {
  const list = [...page.rows],
    by = state.sort && columns().find((column) => column.name === state.sort.name);
  if (!by) return list;
  return list.sort((a, b) => {
    const [u, v] = [by.sort(a), by.sort(b)];
    if (u === null || v === null || u === undefined || v === undefined)
      return (u === null || u === undefined) - (v === null || v === undefined);
    const order = typeof u === "string" ? u.localeCompare(v) : u - v;
    return state.sort.down ? -order : order;
  });
}
function drawTable() {
  const cols = columns(),
    federated = page.rows.filter((r) => r.megabytes_per_round); // pooled training is a bound, not a rival
  const best = Math.max(...(federated.length ? federated : page.rows).map((r) => r.accuracy ?? -1));
  const focus = document.activeElement && document.activeElement.dataset.sort;
  const head = cols.map((column) => {
    const now = state.sort && state.sort.name === column.name ? (state.sort.down ? "descending" : "ascending") : "none";
    return el(
      "th",
      { scope: "col", "aria-sort": now },
      el(
        "button",
        {
          type: "button",
          "data-sort": column.name,
          onclick: () => {
            state.sort =
              now === "none"
                ? { name: column.name, down: !column.words }
                : { name: column.name, down: !state.sort.down };
            drawTable();
          },
        },
        column.name,
      ),
    );
  });
  const body = sorted().map((r) =>
    el(
      "tr",
      {
        class: [
          state.off.has(r.method) ? "off" : "",
          r.accuracy !== null && r.accuracy === best && (r.megabytes_per_round || !federated.length) ? "best" : "",
        ]
          .join(" ")
          .trim(),
      },
      cols.map((column) =>
        el(
          column.words ? "th" : "td",
          column.words ? { scope: "row" } : {},
          column.draw ? [column.draw(r), el("span", { class: "beside" }, column.text(r))] : column.text(r),
        ),
      ),
    ),
  );
  $("table").replaceChildren(
    el("h2", {}, "Table"),
    el(
      "div",
      { class: "scroll" },
      el("table", { class: "data" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)),
    ),
    el(
      "p",
      { class: "note" },
      rows().length > 1
        ? `Accuracy is that of the final model: mean ± standard deviation over seeds. “Differ” is to ${rows()[0]}, in points, paired by seed; * marks an interval that excludes zero. Time is that of a round relative to ${rows()[0]}’s. MB is what all clients send and receive.`
        : "Accuracy is that of the final model. MB is what all clients send and receive.",
    ),
    el(
      "div",
      { class: "controls buttons" },
      ["Markdown", "LaTeX", "CSV"].map((kind) =>
        el(
          "button",
          { type: "button", "data-copy": kind, onclick: () => copy(exported(kind), `the table as ${kind}`) },
          `Copy as ${kind}`,
        ),
      ),
    ),
  );
  if (focus)
    $("table")
      .querySelectorAll("[data-sort]")
      .forEach((button) => button.dataset.sort === focus && button.focus());
}
function exported(kind) {
  const cols = columns(),
    cells = sorted().map((r) => cols.map((column) => column.text(r))),
    names = cols.map((column) => column.name);
  if (kind === "CSV") {
    const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
    return [names, ...cells].map((line) => line.map(quote).join(",")).join("\n") + "\n";
  }
  if (kind === "Markdown") {
    const line = (texts) => `| ${texts.map((text) => text.replaceAll("|", "\\|")).join(" | ")} |`;
    return (
      [line(names), `|${names.map((_, n) => (n ? "---:" : "---")).join("|")}|`, ...cells.map(line)].join("\n") + "\n"
    );
  }
  const signs = {
    "\\": "\\textbackslash{}",
    "±": "$\\pm$",
    "−": "$-$",
    "–": "--",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
  };
  const tex = (text) => text.replace(/[\\±−–~^&%$#_{}]/g, (sign) => signs[sign] || `\\${sign}`);
  const line = (texts) => `${texts.map(tex).join(" & ")} \\\\`;
  return (
    [
      `\\begin{tabular}{l${"r".repeat(names.length - 1)}}`,
      "\\hline",
      line(names),
      "\\hline",
      ...cells.map(line),
      "\\hline",
      "\\end{tabular}",
    ].join("\n") + "\n"
  );
}
function copy(text, what) {
  const said = (done) => {
    $("said").textContent = done ? `Copied ${what}.` : "The browser does not let the page copy.";
    setTimeout(() => {
      $("said").textContent = "";
    }, 2500);
  };
  const old = () => {
    const area = el("textarea", { style: { position: "fixed", opacity: 0 } });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    said(done);
  };
  if (navigator.clipboard) navigator.clipboard.writeText(text).then(() => said(true), old);
  else old();
}

// --- the split of the data

function drawSplit() {
  const box = $("split"),
    splits = page.splits;
  if (!splits.length) return box.replaceChildren();
  state.split = Math.min(state.split, splits.length - 1);
  const split = splits[state.split];
  const plot = el("div", { class: "plot" });
  const choose =
    splits.length > 1
      ? el(
          "div",
          { class: "controls" },
          el(
            "label",
            {},
            "split ",
            el(
              "select",
              {
                onchange: (event) => {
                  state.split = Number(event.target.value);
                  drawSplit();
                },
              },
              splits.map((s, n) => el("option", { value: n, selected: n === state.split }, s.name)),
            ),
          ),
        )
      : null;
  if (!split.counts) {
    return box.replaceChildren(
      el("h2", {}, "Who holds what"),
      ...[choose].filter(Boolean),
      el("p", { class: "note" }, split.problem),
    );
  }
  const sizes = split.counts.map((row) => row.reduce((a, b) => a + b, 0)),
    held = split.counts.map((row) => row.filter(Boolean).length);
  const cut =
    split.clients > split.counts.length
      ? ` The first ${split.counts.length} of ${split.clients} clients are shown.`
      : "";
  box.replaceChildren(
    el("h2", {}, "Who holds what"),
    ...[choose].filter(Boolean),
    el(
      "p",
      { class: "note" },
      `${split.name}: a client holds ${Math.min(...sizes)} to ${Math.max(...sizes)} samples of ${Math.min(...held)} to ${Math.max(...held)} of the ${split.classes.length} classes. Bars are samples of a client; the larger or darker a mark, the more of that class.${cut}`,
    ),
    el("div", { class: "card" }, plot),
  );
  charts.set("split", () => splitChart(plot, split, sizes));
  splitChart(plot, split, sizes);
}
function splitChart(plot, split, sizes) {
  const clients = split.counts.length,
    classes = split.classes.length,
    width = Math.max(260, plot.clientWidth || 700);
  const names = split.classes.map((name) => (name.length > 14 ? `${name.slice(0, 13)}…` : name));
  const left = 20 + 6.6 * Math.max(3, ...names.map((name) => name.length)),
    bars = 60,
    w = width - left - 10;
  const step = w / clients,
    tall = Math.max(classes * 3, Math.min(classes * 20, 420)),
    line = tall / classes,
    top = bars + 14,
    height = top + tall + 34;
  const most = split.counts.flat().reduce((a, b) => Math.max(a, b), 1),
    largest = Math.max(1, ...sizes),
    bubbles = clients * classes <= 2500 && step > 6 && line > 6;
  const frame = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": `samples of ${classes} classes at ${clients} clients`,
  });
  sizes.forEach((size, n) =>
    frame.append(
      svg("rect", {
        x: left + n * step + step * 0.12,
        width: step * 0.76,
        y: 6 + bars - (bars * size) / largest,
        height: (bars * size) / largest,
        style: { fill: "var(--s0)" },
        "fill-opacity": 0.55,
      }),
    ),
  );
  frame.append(
    svg("text", { x: left - 8, y: 16, "text-anchor": "end" }, String(largest)),
    svg("text", { x: left + w / 2, y: height - 3, "text-anchor": "middle" }, "client"),
  );
  const every = (count, room, size) => Math.ceil(size / (room / count));
  for (let k = 0; k < classes; k += every(classes, tall, 13)) {
    if (bubbles)
      frame.append(
        svg("line", {
          class: "grid-line",
          x1: left,
          x2: left + w,
          y1: top + (k + 0.5) * line,
          y2: top + (k + 0.5) * line,
        }),
      );
    frame.append(svg("text", { x: left - 8, y: top + (k + 0.5) * line + 4, "text-anchor": "end" }, names[k]));
  }
  for (let n = 0; n < clients; n += every(clients, w, 26))
    frame.append(svg("text", { x: left + (n + 0.5) * step, y: top + tall + 16, "text-anchor": "middle" }, String(n)));
  if (bubbles) {
    split.counts.forEach((row, n) =>
      row.forEach(
        (count, k) =>
          count &&
          frame.append(
            svg("circle", {
              cx: left + (n + 0.5) * step,
              cy: top + (k + 0.5) * line,
              r: Math.max(1, (Math.min(step, line) / 2) * Math.sqrt(count / most) * 0.98),
              style: { fill: "var(--s0)" },
            }),
          ),
      ),
    );
  } else
    frame.append(
      picture(
        split.counts[0].map((_, k) => split.counts.map((row) => Math.sqrt(row[k] / most))),
        left,
        top,
        w,
        tall,
      ),
    );
  const tip = el("div", { class: "tip", hidden: true });
  fill(
    frame,
    {
      onpointermove: (event) => {
        const r = frame.getBoundingClientRect(),
          px = ((event.clientX - r.left) * width) / r.width,
          py = ((event.clientY - r.top) * height) / r.height;
        const n = Math.floor((px - left) / step),
          k = Math.floor((py - top) / line);
        tip.hidden = n < 0 || n >= clients;
        if (tip.hidden) return;
        const where = split.domains ? ` (${split.domains[n]})` : "";
        tip.textContent = `client ${n}${where}: ${sizes[n]} samples${k >= 0 && k < classes ? `, ${split.counts[n][k]} of ${/^class/.test(split.classes[k]) ? "" : "class "}${split.classes[k]}` : ""}`;
        tip.style.left = `${Math.min(event.clientX - r.left + 12, r.width - tip.offsetWidth)}px`;
        tip.style.top = `${event.clientY - r.top + 14}px`;
      },
      onpointerleave: () => {
        tip.hidden = true;
      },
    },
    [],
  );
  plot.replaceChildren(frame, tip);
}
// A picture of numbers from 0 to 1, [rows][columns], dark where they are large.
function picture(values, x, y, width, height) {
  const canvas = el("canvas", { width: values[0].length, height: values.length }),
    pen = canvas.getContext("2d");
  const made = pen.createImageData(values[0].length, values.length);
  values.flat().forEach((v, n) => made.data.set(shade(v), 4 * n));
  pen.putImageData(made, 0, 0);
  return svg("image", {
    href: canvas.toDataURL(),
    x,
    y,
    width,
    height,
    preserveAspectRatio: "none",
    style: { imageRendering: "pixelated" },
  });
}
function shade(v) {
  // from yellow over green to blue, falling in lightness, so that it reads in grey
  const stops = [
      [253, 246, 200],
      [160, 200, 120],
      [40, 140, 140],
      [38, 70, 120],
      [25, 20, 60],
    ],
    t = Math.max(0, Math.min(0.9999, v || 0)) * 4,
    n = Math.floor(t);
  return [0, 1, 2].map((c) => Math.round(stops[n][c] + (stops[n + 1][c] - stops[n][c]) * (t - n))).concat(v ? 255 : 0);
}
