// What each method cost, and what accuracy that bought.

const amount = (v) =>
  typeof v !== "number" ? "–" : v < 1e5 ? Math.round(v).toLocaleString("en") : v < 1e9 ? `${short(v / 1e6)} M` : `${short(v / 1e9)} G`;
function drawCost() {
  const box = $("cost"),
    list = page.rows.filter((row) => row.accuracy !== null),
    counted = new Map(found("cost").map(({ row, it }) => [row, it]));
  if (!list.length) return box.replaceChildren();
  const of = (row) => counted.get(row.method) || {},
    per = (row, name) => (of(row).points_per || {})[name] ?? null;
  const columns = [
    ["parameters", (row) => amount(of(row).parameters)],
    ["held", (row) => amount(of(row).held)],
    ["MACs / sample", (row) => amount(of(row).macs_per_sample)],
    ...[
      ["s / round", "seconds_per_round"],
      ["MB / round", "megabytes_per_round"],
      ["peak memory, MB", "peak_memory_megabytes"],
    ].map(([name, key]) => [name, numbers(list, key)]),
  ];
  const filled = columns.filter(([, text]) => list.some((row) => text(row) !== "–"));
  const bought = [
    ["points per megabyte", (row) => row.points_per_megabyte],
    ["points per second", (row) => row.points_per_second],
    ["points per GFLOP", (row) => per(row, "gflop")],
  ];
  box.replaceChildren(
    el("h2", {}, "Cost"),
    el(
      "p",
      { class: "note" },
      "What a megabyte, a second and a GFLOP bought: points of accuracy above chance, over the whole run; a longer bar is cheaper.",
    ),
    el(
      "div",
      { class: "minis wide" },
      bought.map(([title, value]) =>
        bars(
          title,
          list.map((row) => [row.method, value(row)]),
        ),
      ),
    ),
    scrolled(
      ["method", ...filled.map(([name]) => name)],
      list.map((row) =>
        el(
          "tr",
          { class: state.off.has(row.method) ? "off" : "" },
          el("th", { scope: "row" }, row.method),
          filled.map(([, text]) => el("td", {}, text(row))),
        ),
      ),
    ),
    el(
      "p",
      { class: "note" },
      [
        counted.size
          ? "“Held” is what a client holds during a step: the network, copies of it and vectors of its size. MACs are the multiply-accumulates of all that a step forwards; GFLOP are those of local steps, forward and backward."
          : "isofed diagnose RUN only=cost adds multiply-accumulates, parameters held and GFLOP.",
        "Evaluating the model is not counted in any of them.",
        list.some((row) => row.peak_memory_megabytes)
          ? "Peak memory is what was held of the GPU."
          : "",
      ]
        .filter(Boolean)
        .join(" "),
    ),
  );
}
