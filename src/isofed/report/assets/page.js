// Runs and settings, drawing it all, colours, and following runs that go on.

// --- runs, settings, versions, how to repeat

function drawRuns() {
  const going = page.runs.some((run) => !run.finished),
    open = going || ($("runs").querySelector("details") || {}).open;
  const now = Date.now() / 1000,
    sent = aligned(page.runs.map((run) => run.megabytes));
  const line = (run, n) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, run.row),
      el("td", {}, String(run.seed)),
      el(
        "td",
        {},
        el("progress", { max: run.rounds, value: run.done, "aria-label": `rounds of ${run.row}, seed ${run.seed}` }),
        ` ${run.done}/${run.rounds}`,
      ),
      el(
        "td",
        {},
        run.finished
          ? "finished"
          : page.live
            ? `last round ${duration(Math.max(0, now - run.updated))} ago`
            : "not finished",
      ),
      el("td", {}, percent(run.accuracy)),
      el("td", {}, percent(run.best)),
      el("td", {}, duration(run.seconds)),
      el("td", {}, sent[n]),
      el("td", {}, String(run.events)),
      el(
        "td",
        { class: "words" },
        el("code", {}, run.folder),
        run.notes.map((note) => el("div", { class: "soft" }, note)),
      ),
    );
  $("runs").replaceChildren(
    el("h2", {}, "Runs"),
    el(
      "details",
      { open: Boolean(open) },
      el(
        "summary",
        {},
        `${page.runs.length} ${page.runs.length === 1 ? "run" : "runs"}, ${page.runs.filter((run) => run.finished).length} finished`,
      ),
      scrolled(
        ["method", "seed", "rounds", "state", "accuracy %", "best %", "time", "MB", "events", "folder"],
        page.runs.map(line),
      ),
    ),
  );
}
function repeating(command) {
  return [
    el("p", {}, "The same settings give the same bits, on the same kind of processor and with the same versions:"),
    el("pre", {}, command),
    el(
      "div",
      { class: "controls buttons" },
      el("button", { type: "button", onclick: () => copy(`${command}\n`, "the command") }, "Copy the command"),
    ),
  ];
}
function drawRepeat() {
  const s = page.settings,
    command = page.repeat.join("\n"),
    opened = [...$("repeat").querySelectorAll("details")].map((d) => d.open);
  const pairs = (values) =>
    el(
      "div",
      { class: "pairs" },
      values.map(([key, value]) => el("div", {}, el("code", {}, `${key}=${value}`))),
    );
  const own = (row) =>
    Object.entries(row.own)
      .map(([key, value]) => `${key}=${value}`)
      .join(" ");
  $("repeat").replaceChildren(
    el("h2", {}, "Settings, versions, and how to repeat it"),
    ...(command ? repeating(command) : [el("p", {}, "Runs at real sites can be repeated there alone.")]),
    el(
      "details",
      { open: opened[0] ?? true },
      el("summary", {}, "Settings that were chosen"),
      pairs([...s.chosen, ["seeds", s.seeds.join(",")]]),
    ),
    el("details", { open: opened[1] ?? false }, el("summary", {}, "Settings at their defaults"), pairs(s.defaults)),
    el(
      "details",
      { open: opened[2] ?? false },
      el("summary", {}, "Methods with every option"),
      scrolled(
        [],
        s.rows.map((row) =>
          el(
            "tr",
            {},
            el("th", { scope: "row" }, row.row),
            el("td", { class: "words" }, el("code", {}, [row.method, own(row)].filter(Boolean).join("  "))),
          ),
        ),
      ),
    ),
    el(
      "details",
      { open: opened[3] ?? true },
      el("summary", {}, "Versions and machine"),
      el(
        "dl",
        { class: "facts" },
        page.versions.map(([key, value]) => [el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, value)]),
      ),
    ),
    el("p", { class: "note" }, `Made by isofed ${page.version}. This page is one file; it fetches nothing.`),
  );
}

// --- all of it, again when something changes

const redrawCharts = () => {
  for (const draw of charts.values()) draw();
};
function refresh() {
  // another choice of methods
  const focus = document.activeElement && document.activeElement.dataset.method;
  drawMethods();
  if (focus)
    $("methods")
      .querySelectorAll("[data-method]")
      .forEach((button) => button.dataset.method === focus && button.focus({ preventScroll: true }));
  drawTable();
  drawCost();
  redrawCharts();
  hintAtMore();
}
// Tables that are wider than the page say so: a column that nobody looks for is as good as none.
function hintAtMore() {
  for (const box of document.querySelectorAll(".scroll"))
    box.classList.toggle("wide", box.scrollWidth > box.clientWidth + 1);
}
document.addEventListener("toggle", hintAtMore, true); // what has just been unfolded
function drawAll() {
  charts.clear();
  drawAnswer();
  drawMethods();
  drawCurves();
  drawTable();
  drawCost();
  drawSplit();
  drawDiagnostics();
  drawRuns();
  drawRepeat();
  redrawCharts();
  hintAtMore();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "light" : "dark";
  $("theme").setAttribute("aria-label", `switch to ${$("theme").textContent} colours`);
}
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
theme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => {
  if (!chosen) theme(dark.matches ? "dark" : "light");
});
$("theme").addEventListener("click", () => {
  chosen = $("theme").textContent;
  theme(chosen);
});
let was = null;
window.addEventListener("beforeprint", () => {
  was = document.documentElement.dataset.theme;
  theme("light");
  printing = true;
  redrawCharts();
});
window.addEventListener("afterprint", () => {
  theme(was || "light");
  printing = false;
  redrawCharts();
});
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) {
    width = window.innerWidth;
    requestAnimationFrame(() => {
      redrawCharts();
      hintAtMore();
    });
  }
});

// --- live

let tag = null;
let held = false; // drawing anew would pull what is dragged out of the hand
document.addEventListener("pointerdown", () => (held = true), true);
for (const end of ["pointerup", "pointercancel"]) document.addEventListener(end, () => (held = false), true);

async function look() {
  const began = performance.now();
  if (!document.hidden && !held) await news();
  // Long runs take longer to read: nine tenths of the time and more the server has rest, and the run the machine.
  setTimeout(look, 2000 + 10 * (performance.now() - began));
}
async function news() {
  try {
    const answer = await fetch("data", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) {
      page = await answer.json();
      tag = answer.headers.get("ETag");
      keepPlace(drawAll);
    } else if (answer.status === 304) drawRuns();
    const over = page.runs.length && page.runs.every((run) => run.finished);
    $("live").textContent = answer.status >= 400 ? "the runs cannot be read" : over ? "all runs finished" : "live";
    $("live").className = "on";
  } catch {
    $("live").textContent = "isofed watch has stopped";
    $("live").className = "";
  }
}
function keepPlace(draw) {
  // drawing anew must not move the page or take the keyboard's place away
  const focus = document.activeElement,
    top = window.scrollY;
  const same =
    focus &&
    focus !== document.body &&
    ["data-method", "data-sort", "data-copy", "name", "id"]
      .map(
        (name) =>
          focus.hasAttribute(name) &&
          `[${name}="${CSS.escape(focus.getAttribute(name))}"]${focus.value && focus.type === "radio" ? `[value="${focus.value}"]` : ""}`,
      )
      .find(Boolean);
  const card = focus && focus.closest && focus.closest("[data-chart]");
  draw();
  const again = same
    ? document.querySelector(same)
    : card
      ? document.querySelector(`[data-chart="${card.dataset.chart}"] ${focus.tagName === "svg" ? "svg" : "button"}`)
      : null;
  if (again && document.activeElement !== again) again.focus({ preventScroll: true });
  window.scrollTo({ top, behavior: "instant" });
}

drawAll();
if (page.live) look();
