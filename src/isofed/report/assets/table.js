// The table of methods: sorted by a click, copied as text.

// --- the table

// How the rows' numbers of one kind are written, so that their points lie below one another.
function numbers(list, key) {
  const texts = aligned(list.map((row) => row[key]));
  return (row) => texts[list.indexOf(row)];
}
const deltasOf = () => new Set(page.rows.map((r) => r.delta).filter((v) => v !== null));
function columns() {
  const target = page.target,
    first = new Set(page.rows.filter((r, n) => n === 0 || r.data !== page.rows[n - 1].data).map((r) => r.method)),
    seconds = numbers(page.rows, "seconds_per_round"),
    epsilon = numbers(page.rows, "epsilon"),
    deltas = deltasOf();
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
      sort: (r) => (first.has(r.method) ? 0 : r.difference),
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
          text: (r) => (r.seeds ? r.to_target : "–"),
          // After those that all seeds reach come those that some do, the more the earlier, and then those that none do.
          sort: (r) =>
            !r.seeds ? null : r.reached === r.seeds ? r.rounds_to_target : 1e9 * (2 - r.reached / r.seeds),
        }
      : null,
    {
      name: "time",
      text: (r) => (r.relative_seconds ? `${r.relative_seconds.toFixed(2)}x` : "–"),
      sort: (r) => r.relative_seconds,
    },
    { name: "s / round", text: seconds, sort: (r) => r.seconds_per_round },
    {
      name: "MB / round",
      text: (r) => (r.megabytes_per_round === null ? "–" : r.megabytes_per_round.toFixed(2)),
      sort: (r) => r.megabytes_per_round,
    },
    deltas.size
      ? {
          name: "epsilon",
          text: (r) => epsilon(r) + (deltas.size > 1 && r.delta !== null ? ` at ${short(r.delta)}` : ""),
          sort: (r) => r.epsilon,
        }
      : null,
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
  const group = new Map([...new Set(list.map((r) => r.data))].map((name, n) => [name, n]));
  return list.sort((a, b) => {
    if (a.data !== b.data) return group.get(a.data) - group.get(b.data); // of other data: nothing to be compared with
    const [u, v] = [by.sort(a), by.sort(b)];
    if (u === null || v === null || u === undefined || v === undefined)
      return (u === null || u === undefined) - (v === null || v === undefined);
    const order = typeof u === "string" ? u.localeCompare(v) : u - v;
    return state.sort.down ? -order : order;
  });
}
// The row with the highest accuracy on some data; pooled training is a bound, not a rival.
function bestOf(data) {
  const all = page.rows.filter((r) => r.data === data && r.accuracy !== null),
    federated = all.filter((r) => r.megabytes_per_round),
    best = (federated.length ? federated : all).reduce((a, b) => (a && a.accuracy >= b.accuracy ? a : b), null);
  return best && best.method;
}
function drawTable() {
  const cols = columns(),
    bests = new Set([...new Set(page.rows.map((r) => r.data))].map(bestOf));
  const base = page.several ? "the first method on the same data" : rows()[0],
    deltas = deltasOf(),
    none = page.rows.some((r) => r.no_spread) ? ", and there is none where differences have no spread" : "",
    some = page.target ? page.rows.find((r) => r.reached && r.reached < r.seeds) : null;
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
  const body = sorted().flatMap((r, n, list) => [
    page.several && (n === 0 || r.data !== list[n - 1].data)
      ? el("tr", { class: "group" }, el("td", { colspan: cols.length }, r.data))
      : null,
    el(
      "tr",
      { class: [state.off.has(r.method) ? "off" : "", bests.has(r.method) ? "best" : ""].join(" ").trim() },
      cols.map((column) =>
        el(
          column.words ? "th" : "td",
          column.words ? { scope: "row" } : {},
          column.draw ? [column.draw(r), el("span", { class: "beside" }, column.text(r))] : column.text(r),
        ),
      ),
    ),
  ]);
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
      [
        rows().length > 1
          ? `Accuracy is that of the final model: mean ± standard deviation over seeds. “Differ” is to ${base}, in points, paired by seed; * marks an interval that excludes zero${none}. Time is that of a round relative to that of ${base}. MB is what all clients send and receive.`
          : "Accuracy is that of the final model. MB is what all clients send and receive.",
        page.several ? "Accuracies on different data do not compare, so each data set has its own best." : "",
        some ? `“${some.to_target}” is: ${some.reached} of ${some.seeds} seeds reached it, and for the others ${some.rounds} rounds were not enough.` : "",
        deltas.size
          ? `Epsilon is the differential privacy of a whole client${deltas.size === 1 ? ` at delta ${short([...deltas][0])}` : ""}, the largest of all seeds: the smaller, the better; “–” is no noise at all.`
          : "",
      ]
        .filter(Boolean)
        .join(" "),
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
