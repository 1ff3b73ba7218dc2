// Who holds what: marks for few clients and classes, a picture for many.

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
