// Draws the curves of a page from the numbers in it. Text goes into the page as text, never as HTML.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const view = { log: false, time: false, smooth: "auto", hidden: new Set() };
  const redraws = [];
  const HEIGHT = 230, SMALL = 84;

  const el = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const svg = (tag, attributes = {}, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text) node.textContent = text;
    return node;
  };
  const colour = (run) => (run < 8 ? `var(--c${run})` : `hsl(${(run * 137.5) % 360} 60% 48%)`);

  // A number as people read it: four digits, or a power of ten.
  const told = (x) => {
    if (x === null) return "not finite";
    if (x === 0) return "0";
    const size = Math.abs(x);
    if (size >= 1e6 || size < 1e-3) return x.toExponential(2);
    return size >= 1e4 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(4)));
  };
  const brief = (x) => (x !== 0 && (Math.abs(x) < 1e-2 || Math.abs(x) >= 1e4) ? x.toExponential(0) : told(x));
  const seconds = (s) => (s < 120 ? `${told(s)} s` : s < 7200 ? `${told(s / 60)} min` : `${told(s / 3600)} h`);

  // The seconds that a run had trained when a step was done, between the times that are known.
  const clock = (points, step) => {
    const known = points.filter((p) => p[1] !== null);
    if (!known.length) return null;
    const after = known.findIndex((p) => p[0] >= step);
    if (after < 0) return known[known.length - 1][1];
    const [x1, y1] = known[after];
    const [x0, y0] = after > 0 ? known[after - 1] : [0, 0];
    return x1 > x0 ? y0 + ((step - x0) / (x1 - x0)) * (y1 - y0) : y1;
  };

  // Each value averaged with those before it, without bias towards the first.
  const smoothed = (points, keep) => {
    let total = 0, weight = 0;
    return points.map((p) => {
      if (p.y === null) return p;
      total = keep * total + p.y;
      weight = keep * weight + 1;
      return { ...p, y: total / weight };
    });
  };

  const ticks = (low, high, log, count) => {
    if (log) {
      const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
      if (last - first >= 1) {
        const gap = Math.ceil((last - first + 1) / count);
        return Array.from({ length: last - first + 1 }, (_, i) => first + i)
          .filter((e) => e % gap === 0).map((e) => 10 ** e);
      }
    }
    const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
    const gap = power * (rough / power >= 5 ? 10 : rough / power >= 2 ? 5 : 2);
    const found = [];
    for (let i = Math.ceil(low / gap); i * gap <= high + gap * 1e-9; i++) found.push(i * gap);
    return found;
  };

  const placed = (run, points) => points
    .map(([step, y]) => ({ step, y, x: view.time ? clock(data.clocks[run], step) : step }))
    .filter((p) => p.x !== null);

  // Lines, one a run and name: those of training plain, the others with dots.
  const seen = (chart) => chart.lines.flatMap((line) => line.runs.map((points, run) => {
    const raw = placed(run, points), beside = line.name.includes("/");
    // A curve of a value a step is too rough to be compared as it is.
    const keep = view.smooth !== "auto" ? Number(view.smooth) : raw.length > 100 ? 0.95 : 0;
    const shown = keep && !beside ? smoothed(raw, keep) : raw;
    return { name: line.name, run, beside, raw, shown };
  })).filter((line) => line.raw.length && !view.hidden.has(line.run));

  // Lines that lie on one another are drawn in turns: each has a dash of its own, and its rings
  // are of another size. `path` gives the way of a line over the picture.
  const apart = (lines, path) => {
    const together = new Map();
    for (const line of lines) {
      const way = `${line.beside} ${path(line.shown, 0)}`;
      together.set(way, [...(together.get(way) || []), line]);
    }
    for (const group of together.values()) group.forEach((line, place) => {
      line.of = group.length;
      line.place = place;
    });
  };
  const dashes = (line) => {
    const [on, off] = line.beside ? [5, 3] : [9, 0];
    if (line.of === 1) return line.beside ? { "stroke-dasharray": `${on} ${off}` } : {};
    const turn = on + off;
    return {
      "stroke-dasharray": `${on} ${turn * line.of - on}`,
      "stroke-dashoffset": -turn * line.place,
    };
  };
  // Runs that have the same numbers in all lines of a chart, by name.
  const same = (chart) => {
    const equal = new Map();
    data.runs.forEach((name, run) => {
      if (view.hidden.has(run) || !chart.lines.some((line) => line.runs[run].length)) return;
      const numbers = JSON.stringify(chart.lines.map((line) => line.runs[run]));
      equal.set(numbers, [...(equal.get(numbers) || []), name]);
    });
    return [...equal.values()].filter((names) => names.length > 1);
  };

  const draw = (box, chart, small) => {
    const width = Math.max(box.clientWidth, 120), height = small ? SMALL : HEIGHT;
    const left = small ? 40 : 70, bottom = small ? 4 : 38, top = 8, right = 8;
    const lines = seen(chart), values = lines.flatMap((l) => [...l.raw, ...l.shown].map((p) => p.y));
    const allowed = values.filter((y) => y !== null && (!view.log || y > 0));
    const xs = lines.flatMap((l) => l.raw.map((p) => p.x));
    const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    picture.append(svg("title", {}, chart.title));
    if (!allowed.length) {
      picture.append(svg("text", { x: left, y: height / 2 }, lines.length ? "nothing finite to draw" : ""));
      return { picture, lines: [] };
    }
    let low = allowed.reduce((a, b) => Math.min(a, b)), high = allowed.reduce((a, b) => Math.max(a, b));
    if (chart.zero && !view.log) low = Math.min(low, 0);
    if (high === low) { const half = Math.abs(low) / 2 || 1; low -= view.log ? low / 2 : half; high += half; }
    const from = xs.reduce((a, b) => Math.min(a, b)), to = xs.reduce((a, b) => Math.max(a, b));
    const scale = view.log ? Math.log10 : (y) => y;
    const X = (x) => left + ((x - from) / (to - from || 1)) * (width - left - right);
    const Y = (y) => top + ((scale(high) - scale(y)) / (scale(high) - scale(low))) * (height - top - bottom);
    for (const y of ticks(low, high, view.log, small ? 2 : 5)) {
      picture.append(svg("line", { class: "gridline", x1: left, x2: width - right, y1: Y(y), y2: Y(y) }));
      picture.append(svg("text", { x: left - 6, y: Y(y) + 4, "text-anchor": "end" }, (small ? brief : told)(y)));
    }
    if (!small) for (const x of ticks(from, to, false, width > 420 ? 5 : 3)) {
      const label = view.time ? seconds(x) : Math.round(x).toLocaleString("en");
      const anchor = X(x) > width - 30 ? "end" : "middle";
      picture.append(svg("text", { x: Math.min(X(x), width - 2), y: height - 21, "text-anchor": anchor }, label));
    }
    if (!small) {
      const middle = top + (height - top - bottom) / 2, title = { class: "axis", "text-anchor": "middle" };
      const across = view.time ? "time trained" : "step";
      picture.append(svg("text", { ...title, x: (left + width - right) / 2, y: height - 5 }, across));
      const up = `${chart.title}${view.log ? ", logarithmic" : ""}`;
      picture.append(svg("text", { ...title, transform: `translate(11 ${middle}) rotate(-90)` }, up));
    }
    const path = (points, digits = 1) => {
      let pen = "M", d = "";
      for (const p of points) {
        if (p.y === null || (view.log && p.y <= 0)) { pen = "M"; continue; }
        d += `${pen}${X(p.x).toFixed(digits)} ${Y(p.y).toFixed(digits)}`;
        pen = "L";
      }
      return d;
    };
    apart(lines, path);
    for (const line of lines) {
      const stroke = { stroke: colour(line.run) };
      if (line.shown !== line.raw) picture.append(svg("path", { class: "line raw", d: path(line.raw), ...stroke }));
      picture.append(svg("path", { class: "line", d: path(line.shown), ...stroke, ...dashes(line) }));
      if (line.beside || line.shown.length === 1) for (const p of line.shown) {
        if (p.y === null || (view.log && p.y <= 0)) continue;
        const size = 2.6 + 1.8 * (line.of - 1 - line.place);
        picture.append(svg("circle", { cx: X(p.x), cy: Y(p.y), r: size, fill: colour(line.run) }));
      }
    }
    return { picture, lines, X, Y, from, to, left, right, top, bottom, width, height };
  };

  // The values nearest to the pointer, beside it.
  const follow = (box, drawn) => {
    const { picture, lines, X, left, right, top, bottom, width, height } = drawn;
    if (!lines.length) return;
    const cross = svg("line", { class: "cross", y1: top, y2: height - bottom, visibility: "hidden" });
    const tip = el("div", { class: "tip", hidden: "" });
    picture.append(cross);
    box.append(tip);
    const leave = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
    picture.addEventListener("pointerleave", leave);
    picture.addEventListener("pointermove", (event) => {
      const at = event.clientX - picture.getBoundingClientRect().left;
      if (at < left - 4 || at > width - right + 4) return leave();
      const far = (p) => Math.abs(X(p.x) - at);
      const near = lines.map((l) => ({ ...l, p: l.shown.reduce((a, b) => (far(b) < far(a) ? b : a)) }));
      const closest = near.reduce((a, b) => (far(b.p) < far(a.p) ? b : a)).p;
      const x = X(closest.x);
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      cross.setAttribute("visibility", "visible");
      const title = `step ${closest.step.toLocaleString("en")}${view.time ? `, ${seconds(closest.x)}` : ""}`;
      tip.replaceChildren(el("b", {}, title), ...near.map((l) => el("div", {},
        el("i", { class: "swatch", style: `background:${colour(l.run)}` }),
        `${data.runs[l.run]} ${l.name} ${told(l.p.y)}${l.p.step === closest.step ? "" : ` (at ${l.p.step})`}`)));
      tip.hidden = false;
      const room = box.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(4, Math.min(room, x + (x > width / 2 ? -tip.offsetWidth - 4 : 18)))}px`;
      tip.style.top = "2.2rem";
    });
  };

  const show = (place, chart, small = false) => {
    const name = el("div", { class: "name" }, chart.title);
    if (chart.lines.some((l) => l.name.includes("/")) && !small) {
      const beside = chart.lines.filter((l) => l.name.includes("/")).map((l) => l.name).join(", ");
      name.append(el("span", { class: "key" }, `dashed: ${beside}`));
    }
    const equal = el("span", { class: "key" });
    if (!small) name.append(equal);
    const box = el("div", { class: "chart" }, name), inside = el("div");
    box.append(inside);
    place.append(box);
    const redraw = () => {
      box.querySelectorAll(".tip").forEach((tip) => tip.remove());
      equal.textContent = same(chart).map((names) => `the same curve: ${names.join(", ")}`).join("; ");
      const drawn = draw(inside, chart, small);
      inside.replaceChildren(drawn.picture);
      follow(box, drawn);
    };
    redraws.push(redraw);
    redraw();
  };
  const again = () => redraws.forEach((redraw) => redraw());

  const controls = () => {
    const toggle = (name, words) => {
      const button = el("button", { "aria-pressed": "false" }, words[0]);
      button.addEventListener("click", () => {
        view[name] = !view[name];
        button.textContent = words[Number(view[name])];
        button.setAttribute("aria-pressed", String(view[name]));
        again();
      });
      return button;
    };
    const smooth = el("select", { "aria-label": "smoothing" });
    for (const [words, keep] of [["of long curves", "auto"], ["none", 0], ["light", 0.8], ["medium", 0.95], ["strong", 0.99]])
      smooth.append(el("option", { value: keep }, words));
    smooth.addEventListener("change", () => { view.smooth = smooth.value; again(); });
    return el("div", { class: "controls" },
      toggle("log", ["linear scale", "logarithmic scale"]),
      ...(data.clocks.some((c) => c.length) ? [toggle("time", ["over steps", "over time trained"])] : []),
      el("label", {}, "smoothing ", smooth));
  };

  const charts = document.getElementById("charts");
  if (charts) {
    charts.before(controls());
    data.charts.forEach((chart) => show(charts, chart));
  }
  const speeds = document.getElementById("speeds");
  if (speeds) data.speeds.forEach((chart) => show(speeds, chart));

  const leaves = document.getElementById("leaves");
  if (leaves) {
    const kinds = {
      grad_norm: "norm of the gradient", grad_max: "largest value of the gradient",
      ratio: "norm of the update / norm of the parameters",
    };
    for (const [kind, words] of Object.entries(kinds)) {
      const some = data.leaves.filter((leaf) => leaf.kind === kind);
      if (!some.length) continue;
      const grid = el("div", { class: "small grid" });
      const block = el("details", kind === "ratio" ? { open: "" } : {}, el("summary", {}, words), grid);
      leaves.append(block);
      for (const leaf of some) show(grid, { title: leaf.title, lines: [{ name: kind, runs: leaf.runs }] }, true);
      block.addEventListener("toggle", again);
    }
  }

  document.querySelectorAll("button.run").forEach((button) => button.addEventListener("click", () => {
    const run = Number(button.dataset.run), hide = !view.hidden.has(run);
    hide ? view.hidden.add(run) : view.hidden.delete(run);
    button.setAttribute("aria-pressed", String(!hide));
    again();
  }));
  let wait = 0;
  window.addEventListener("resize", () => { clearTimeout(wait); wait = setTimeout(again, 120); });
})();
