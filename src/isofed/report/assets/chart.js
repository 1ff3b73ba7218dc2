// A line chart: read by pointing or with the arrow keys, zoomed by dragging.

function lineChart(plot, key, title, data, redraw, before) {
  const width = printing ? 560 : Math.max(260, plot.clientWidth || 480),
    height = Math.round(Math.min(400, Math.max(230, width * 0.6)));
  const visible = data.series.filter((s) => s.points.length);
  const had = document.activeElement && plot.contains(document.activeElement);
  if (!visible.length) {
    plot.replaceChildren(el("p", { class: "soft" }, "Nothing to show yet."));
    return null;
  }
  const named = width > 520 && visible.length > 1 && visible.length <= 14;
  const longest = Math.max(...visible.map((s) => Math.min(18, s.name.length)));
  const box = { left: 46, right: named ? 18 + 6.6 * longest : 14, top: 10, bottom: 36 };
  const all = visible.flatMap((s) => [...s.points, ...(s.beside || [])]), // beside: a second, dashed line
    usable = (v) => Number.isFinite(v) && (!data.log || v > 0);
  let xs = [Math.min(...all.map((p) => p.x)), Math.max(...all.map((p) => p.x))];
  if (xs[0] === xs[1]) xs = [xs[0] - 0.5, xs[1] + 0.5];
  const full = [...xs],
    zoomed = state.zoom[key];
  if (zoomed) xs = zoomed.x;
  const within = all.filter((p) => p.x >= xs[0] && p.x <= xs[1]);
  const finals = visible.filter((s) => s.final !== null && s.final !== undefined).map((s) => s.final);
  const levels = (within.length ? within : all).flatMap((p) => [
    p.y,
    state.seeds ? p.y : (p.low ?? p.y),
    state.seeds ? p.y : (p.high ?? p.y),
  ]);
  const own = state.seeds
    ? visible
        .flatMap((s) => s.lines || [])
        .flat()
        .map((p) => p.y)
    : [];
  const heights = [...levels, ...own, ...(zoomed ? [] : finals)].filter(usable);
  if (!heights.length) {
    plot.replaceChildren(el("p", { class: "soft" }, "Nothing that this scale can show."));
    return null;
  }
  let ys = [Math.min(...heights), Math.max(...heights)];
  if (data.log) ys = [Math.max(ys[0], ys[1] * 1e-12) / 1.15, ys[1] * 1.15];
  else {
    const span = ys[1] - ys[0],
      flat = span <= 1e-9 * Math.abs(ys[1]); // equal, but for rounding
    const room = flat ? Math.abs(ys[0]) * 0.05 || 0.5 : span * 0.05;
    ys = [ys[0] - room, ys[1] + room];
  }
  if (data.least !== undefined) ys[0] = Math.max(ys[0], data.least);
  if (data.most !== undefined) ys[1] = Math.min(ys[1], data.most);
  if (zoomed && zoomed.y) ys = zoomed.y;
  views[key] = { x: xs, y: ys, full };
  const f = data.log ? Math.log10 : (v) => v,
    w = width - box.left - box.right,
    h = height - box.top - box.bottom;
  const X = (v) => box.left + (w * (v - xs[0])) / (xs[1] - xs[0]);
  const Y = (v) =>
    box.top + h - (h * (f(Math.max(v, data.log ? ys[0] / 10 : -Infinity)) - f(ys[0]))) / (f(ys[1]) - f(ys[0]));
  const unX = (px) => xs[0] + ((px - box.left) / w) * (xs[1] - xs[0]);
  const unY = (py) => {
    const t = f(ys[0]) + ((box.top + h - py) / h) * (f(ys[1]) - f(ys[0]));
    return data.log ? 10 ** t : t;
  };
  const say = data.percent ? (v) => short(100 * v) : short,
    sayX = data.percentX ? (v) => short(100 * v) : short;
  const clip = `clip-${key}`;
  const path = (points, of = (p) => p.y) =>
    points
      .filter((p) => usable(of(p)))
      .map((p, n) => `${n ? "L" : "M"}${X(p.x).toFixed(1)} ${Y(of(p)).toFixed(1)}`)
      .join("");
  const cursor = svg("g", { visibility: "hidden" }),
    selection = svg("rect", { class: "box", visibility: "hidden" });
  const tip = el("div", { class: "tip", hidden: true });
  const frame = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    tabindex: 0,
    role: "img",
    "aria-label": `${title}: ${data.y} by ${data.x}. Arrow keys read the values, plus and minus zoom, 0 shows all.`,
  });
  frame.append(
    svg("clipPath", { id: clip }, svg("rect", { x: box.left - 6, y: box.top - 6, width: w + 12, height: h + 12 })),
  );
  for (const v of data.log ? logTicks(...ys) : ticks(...ys, 5)) {
    frame.append(
      svg("line", { class: "grid-line", x1: box.left, x2: box.left + w, y1: Y(v), y2: Y(v) }),
      svg("text", { x: box.left - 6, y: Y(v) + 4, "text-anchor": "end" }, say(v)),
    );
  }
  for (const v of ticks(...xs, Math.max(2, Math.min(8, w / 70)), data.whole)) {
    frame.append(
      svg("line", { class: "grid-line", x1: X(v), x2: X(v), y1: box.top + h, y2: box.top + h + 4 }),
      svg("text", { x: X(v), y: box.top + h + 17, "text-anchor": "middle" }, sayX(v)),
    );
  }
  frame.append(svg("text", { x: box.left + w / 2, y: height - 3, "text-anchor": "middle" }, data.x));
  const marks = svg("g", { "clip-path": `url(#${clip})` });
  if (data.diagonal) marks.append(svg("line", { class: "cursor", x1: X(0), y1: Y(0), x2: X(1), y2: Y(1) }));
  if (data.level)
    marks.append(
      svg("line", { class: "cursor", x1: box.left, x2: box.left + w, y1: Y(data.level), y2: Y(data.level) }),
    );
  for (const s of visible) {
    const c = colour(s.index),
      g = svg("g", { "data-row": s.name });
    const band = s.points.filter((p) => p.n > 1 && usable(p.y));
    if (state.seeds)
      for (const line of s.lines || [])
        g.append(
          svg("path", { d: path(line), fill: "none", "stroke-width": 1, "stroke-opacity": 0.55, style: { stroke: c } }),
        );
    else if (band.length > 1) {
      const back = [...band]
        .reverse()
        .map((p) => `L${X(p.x).toFixed(1)} ${Y(p.low).toFixed(1)}`)
        .join("");
      g.append(
        svg("path", {
          class: "band",
          d: `${path(band, (p) => Math.max(p.high, data.log ? ys[0] / 10 : p.high))}${back}Z`,
          "fill-opacity": visible.length > 6 ? 0.09 : 0.16,
          style: { fill: c },
        }),
      );
    }
    g.append(
      svg("path", {
        class: "line",
        d: path(s.points),
        fill: "none",
        "stroke-width": 2.1,
        "stroke-linejoin": "round",
        "stroke-dasharray": dash(s.index),
        style: { stroke: c },
      }),
    );
    if (s.beside)
      g.append(
        svg("path", {
          class: "beside-line",
          d: path(s.beside),
          fill: "none",
          "stroke-width": 1.4,
          "stroke-dasharray": "4 3",
          style: { stroke: c },
        }),
      );
    if (s.points.length <= 25)
      for (const p of s.points)
        if (usable(p.y)) g.append(svg("circle", { cx: X(p.x), cy: Y(p.y), r: 2.3, style: { fill: c } }));
    if (s.final !== null && s.final !== undefined) {
      const last = s.points[s.points.length - 1];
      g.append(
        svg("path", {
          d: `M${X(last.x)} ${Y(last.y)}L${X(last.x)} ${Y(s.final)}`,
          "stroke-dasharray": "2 2",
          "stroke-width": 1.5,
          style: { stroke: c },
        }),
        svg("rect", {
          x: -4,
          y: -4,
          width: 8,
          height: 8,
          transform: `translate(${X(last.x)} ${Y(s.final)}) rotate(45)`,
          "stroke-width": 2,
          style: { stroke: c, fill: "var(--card)" },
        }),
      );
    }
    marks.append(g);
  }
  frame.append(marks);
  if (named) {
    const ends = visible
      .map((s) => {
        const seen = s.points.filter((p) => p.x <= xs[1] && usable(p.y)),
          last = seen[seen.length - 1];
        return { s, y: last ? Math.min(box.top + h, Math.max(box.top, Y(s.final ?? last.y))) : null };
      })
      .filter((end) => end.y !== null)
      .sort((a, b) => a.y - b.y);
    const room = Math.min(13, h / ends.length);
    for (let n = 1; n < ends.length; n++) ends[n].y = Math.max(ends[n].y, ends[n - 1].y + room);
    for (let n = ends.length - 1, limit = box.top + h - 2; n >= 0; n--, limit -= room)
      ends[n].y = Math.min(ends[n].y, limit);
    for (const { s, y } of ends) {
      const text = s.name.length > 18 ? `${s.name.slice(0, 17)}…` : s.name;
      frame.append(
        svg(
          "g",
          { "data-row": s.name },
          svg("text", { x: box.left + w + 8, y: y + 4, style: { fill: colour(s.index) } }, text),
        ),
      );
    }
  }
  frame.append(cursor, selection);

  // reading
  const stops = [...new Set(all.map((p) => p.x))].filter((v) => v >= xs[0] && v <= xs[1]).sort((a, b) => a - b);
  let stop = -1;
  const nearest = (points, v) => points.reduce((a, b) => (Math.abs(b.x - v) < Math.abs(a.x - v) ? b : a));
  function read(n) {
    if (!stops.length) return;
    stop = Math.max(0, Math.min(stops.length - 1, n));
    const v = stops[stop],
      here = visible
        .map((s) => ({ s, p: nearest(s.points, v) }))
        .filter(({ s, p }) => usable(p.y) && v >= s.points[0].x - 1e-9 && v <= s.points[s.points.length - 1].x + 1e-9)
        .sort((a, b) => b.p.y - a.p.y);
    cursor.setAttribute("visibility", "visible");
    cursor.replaceChildren(
      svg("line", { class: "cursor", x1: X(v), x2: X(v), y1: box.top, y2: box.top + h }),
      ...here.map(({ s, p }) => svg("circle", { cx: X(p.x), cy: Y(p.y), r: 4, style: { fill: colour(s.index) } })),
    );
    const digits = data.percent
      ? (p) => percent(p.y) + (p.n > 1 ? ` ± ${(100 * (p.high - p.y)).toFixed(1)}` : "")
      : (p) => short(p.y) + (p.n > 1 ? ` ± ${short(p.high - p.y)}` : "");
    tip.replaceChildren(
      el("b", {}, `${data.x.replace(/, %$/, "")} ${sayX(v)}${data.percentX ? " %" : ""}${data.pair && visible.some((s) => s.beside) ? `: ${data.pair}` : ""}`),
      el(
        "table",
        {},
        here
          .slice(0, 14)
          .map(({ s, p }) =>
            el(
              "tr",
              {},
              el("td", { style: { color: colour(s.index) } }, "■"),
              el("td", {}, s.name),
              el("td", {}, digits(p) + (s.beside && s.beside.length ? ` / ${short(nearest(s.beside, v).y)}` : "")),
            ),
          ),
      ),
    );
    tip.hidden = false;
    const scale = plot.clientWidth / width,
      left = X(v) * scale;
    tip.style.left = `${Math.max(0, left > plot.clientWidth / 2 ? left - tip.offsetWidth - 12 : left + 12)}px`;
    tip.style.top = "4px";
  }
  const hush = () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  const where = (event) => {
    const r = frame.getBoundingClientRect();
    return [((event.clientX - r.left) * width) / r.width, ((event.clientY - r.top) * height) / r.height];
  };
  let from = null;
  const inside = ([px, py]) => [
    Math.min(box.left + w, Math.max(box.left, px)),
    Math.min(box.top + h, Math.max(box.top, py)),
  ];
  const area = (event) => {
    const to = inside(where(event)),
      flat = Math.abs(to[1] - from[1]) < 14;
    return {
      x: [from[0], to[0]].sort((a, b) => a - b),
      y: flat ? [box.top, box.top + h] : [from[1], to[1]].sort((a, b) => a - b),
      flat,
    };
  };
  const moved = (event) => {
    if (from) {
      const { x, y } = area(event);
      fill(selection, { x: x[0], y: y[0], width: x[1] - x[0], height: y[1] - y[0], visibility: "visible" }, []);
      return;
    }
    if (!stops.length) return;
    const v = unX(where(event)[0]);
    read(stops.indexOf(stops.reduce((a, b) => (Math.abs(b - v) < Math.abs(a - v) ? b : a))));
  };
  fill(
    frame,
    {
      onpointermove: moved,
      onpointerdown: (event) => {
        if (event.pointerType !== "mouse" || event.button !== 0) return moved(event);
        from = inside(where(event));
        frame.setPointerCapture(event.pointerId);
      },
      onpointerup: (event) => {
        if (!from) return;
        const { x, y, flat } = area(event);
        from = null;
        selection.setAttribute("visibility", "hidden");
        if (x[1] - x[0] < 8) return;
        state.zoom[key] = { x: x.map(unX), ...(flat ? {} : { y: [unY(y[1]), unY(y[0])] }) };
        redraw();
      },
      onpointercancel: () => {
        from = null;
        selection.setAttribute("visibility", "hidden");
      },
      onpointerleave: hush,
      onblur: hush,
      ondblclick: () => {
        delete state.zoom[key];
        redraw();
      },
      onkeydown: (event) => {
        const keys = {
          ArrowRight: () => read(stop + 1),
          ArrowLeft: () => read(stop < 0 ? stops.length - 1 : stop - 1),
          Home: () => read(0),
          End: () => read(stops.length - 1),
          "+": () => {
            widen(key, 0.6);
            redraw();
          },
          "-": () => {
            widen(key, 1 / 0.6);
            redraw();
          },
          0: () => {
            delete state.zoom[key];
            redraw();
          },
          Escape: hush,
        };
        if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        keys[event.key]();
      },
    },
    [],
  );
  plot.replaceChildren(frame, tip);
  if (had) {
    frame.focus({ preventScroll: true });
    if (before && before.stop() >= 0) read(before.stop());
  }
  return { stop: () => stop };
}
