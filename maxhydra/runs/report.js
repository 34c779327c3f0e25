"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = document.querySelector("#theme svg").namespaceURI;
  const MARGIN = { left: 52, right: 14, top: 8, bottom: 22 };
  const view = { log: false, smoothing: 0, step: null };

  // Lines: steps were sent as differences.
  const charts = data.charts.map((chart, index) => ({
    ...chart,
    figure: document.querySelector(`[data-chart="${index}"]`),
    lines: chart.lines.map((line) => {
      let step = 0;
      return { ...line, steps: line.steps.map((d) => (step += d)) };
    }),
  }));
  const allSteps = charts.flatMap((chart) => chart.lines.flatMap((line) => [line.steps[0], line.steps[line.steps.length - 1]]));
  const span = [Math.min(...allSteps), Math.max(...allSteps)];

  function make(parent, name, attributes, text) {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  }

  // Four significant digits; an axis drops trailing zeros, a readout keeps them so that it stands still.
  function write(value, { percent = false, trim = false } = {}) {
    if (value === null) return "NaN";
    const size = Math.abs(value), digits = (v) => (trim ? String(+v.toPrecision(4)) : v.toPrecision(4));
    if (size === 0) return percent ? "0%" : "0";
    if (percent) return digits(value * 100) + "%";
    if (size >= 1e9 || size < 1e-3) return value.toExponential(2).replace(trim ? /\.?0+e/ : /$^/, "e").replace("e+", "e");
    return size >= 1e6 ? digits(value / 1e6) + "M" : size >= 1e4 ? digits(value / 1e3) + "K" : digits(value);
  }

  // Mean with weights that fall off on both sides, so that the curve does not lag behind; gaps stay gaps.
  function smooth(values, weight) {
    const sums = values.map(() => 0), masses = values.map(() => 0);
    for (const order of [values.keys(), [...values.keys()].reverse()]) {
      let sum = 0, mass = 0;
      for (const i of order) {
        sums[i] += weight * sum;
        masses[i] += weight * mass;
        sum = weight * sum + (values[i] ?? 0);
        mass = weight * mass + (values[i] === null ? 0 : 1);
      }
    }
    return values.map((value, i) => (value === null ? null : (sums[i] + value) / (masses[i] + 1)));
  }

  function linearTicks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const ticks = [];
    for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) ticks.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
    return ticks;
  }

  function logTicks(low, high, count) {
    const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
    for (const digits of [[1], [1, 3], [1, 2, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]) {
      const ticks = [];
      for (let e = first; e <= last; e++) for (const d of digits) if (d * 10 ** e >= low && d * 10 ** e <= high) ticks.push(d * 10 ** e);
      if (ticks.length >= 3) return ticks.length > count + 2 ? ticks.filter((_, i) => i % Math.ceil(ticks.length / count) === 0) : ticks;
    }
    return linearTicks(low, high, count);
  }

  function draw(chart) {
    const plot = chart.figure.querySelector(".plot"), width = plot.clientWidth, height = plot.clientHeight;
    plot.replaceChildren();
    if (!width) return;
    const svg = make(plot, "svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const shown = chart.lines.map((line) => line.values.map((v) => (v !== null && view.log && v <= 0 ? null : v)));
    const finite = shown.flat().filter((v) => v !== null);
    let low = Math.min(...finite), high = Math.max(...finite);
    const isLog = view.log && finite.length > 0;
    if (!finite.length) [low, high] = [0, 1];
    if (chart.zero && !isLog) low = Math.min(0, low);
    if (low === high) [low, high] = isLog ? [low / 2, high * 2] : low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(low) * 0.1];
    const warp = isLog ? Math.log10 : (v) => v;
    const pad = (warp(high) - warp(low)) * 0.05;
    const [bottom, top] = [low === 0 ? 0 : warp(low) - pad, warp(high) + pad];
    const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    const x = (step) => MARGIN.left + (span[1] === span[0] ? 0.5 : (step - span[0]) / (span[1] - span[0])) * inner.width;
    const y = (value) => MARGIN.top + (1 - (warp(value) - bottom) / (top - bottom)) * inner.height;
    chart.x = x; chart.y = y; chart.inner = inner;

    const rows = Math.max(3, Math.round(inner.height / 42));
    const unwarped = isLog ? [10 ** bottom, 10 ** top] : [bottom, top];
    for (const tick of (isLog ? logTicks : linearTicks)(unwarped[0], unwarped[1], rows)) {
      make(svg, "line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) });
      make(svg, "text", { x: MARGIN.left - 10, y: y(tick) + 4, "text-anchor": "end" }, write(tick, { percent: chart.percent, trim: true }));
    }
    const floor = MARGIN.top + inner.height;
    make(svg, "line", { class: "base", x1: MARGIN.left, x2: width - MARGIN.right, y1: floor, y2: floor });
    const columns = span[1] > span[0] ? linearTicks(span[0], span[1], Math.max(2, Math.round(inner.width / 110))) : [span[0]];
    for (const tick of columns) {
      if (!Number.isInteger(tick)) continue;
      const anchor = x(tick) > width - MARGIN.right - 24 ? "end" : "middle";
      make(svg, "text", { x: x(tick), y: height - 4, "text-anchor": anchor }, tick.toLocaleString("en"));
    }
    for (const step of data.resumes) {
      const mark = make(svg, "line", { class: "resume", x1: x(step), x2: x(step), y1: MARGIN.top, y2: floor });
      make(mark, "title", {}, `resumed at step ${step}`);
    }
    chart.shown = shown;
    chart.lines.forEach((line, index) => {
      const weight = line.exact ? 0 : view.smoothing;
      if (weight) curve(svg, line, shown[index], x, y, `curve raw c${index}`);
      curve(svg, line, weight ? smooth(shown[index], weight) : shown[index], x, y, `curve c${index}`);
      if (line.steps.length <= 40) line.steps.forEach((step, i) => {
        if (shown[index][i] !== null) make(svg, "circle", { class: `f${index}`, cx: x(step), cy: y(shown[index][i]), r: 2.5 });
      });
      line.values.forEach((value, i) => {
        if (value !== null) return;
        const tick = make(svg, "line", { class: "lost-point", x1: x(line.steps[i]), x2: x(line.steps[i]), y1: floor - 7, y2: floor });
        make(tick, "title", {}, `${line.name} is not finite at step ${line.steps[i]}`);
      });
    });
    chart.cursor = make(svg, "g", { class: "cursor", visibility: "hidden" });
  }

  function curve(svg, line, values, x, y, className) {
    let path = "", open = false;
    values.forEach((value, i) => {
      if (value !== null) path += `${open ? "L" : "M"}${x(line.steps[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      open = value !== null;
    });
    make(svg, "path", { class: className, d: path });
  }

  function nearest(steps, step) {
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  }

  // One cursor for all charts: the numbers of the same step side by side.
  function point(chart) {
    const readout = chart.figure.querySelector(".readout");
    readout.replaceChildren();
    if (!chart.cursor) return;
    chart.cursor.replaceChildren();
    chart.cursor.setAttribute("visibility", view.step === null ? "hidden" : "visible");
    const picked = chart.lines.map((line) => (view.step === null ? line.steps.length - 1 : nearest(line.steps, view.step)));
    if (view.step !== null) {
      const at = chart.x(chart.lines[0].steps[picked[0]]);
      make(chart.cursor, "line", { x1: at, x2: at, y1: MARGIN.top, y2: MARGIN.top + chart.inner.height });
      item(readout, null, "step", chart.lines[0].steps[picked[0]].toLocaleString("en"));
    }
    chart.lines.forEach((line, index) => {
      const at = picked[index], value = chart.shown[index][at];
      item(readout, index, chart.lines.length > 1 ? line.name : "", write(line.values[at], { percent: chart.percent }));
      if (view.step !== null && value !== null) make(chart.cursor, "circle", { class: `f${index}`, cx: chart.x(line.steps[at]), cy: chart.y(value), r: 4 });
    });
  }

  function item(readout, index, label, value) {
    const node = document.createElement("span");
    if (index !== null) { const swatch = document.createElement("i"); swatch.className = `f${index}`; node.append(swatch); }
    const strong = document.createElement("b");
    strong.textContent = value;
    node.append(label ? `${label} ` : "", strong);
    readout.append(node);
  }

  const redraw = () => charts.forEach((chart) => { draw(chart); point(chart); });
  const moveTo = (step) => { view.step = step; charts.forEach(point); };

  for (const chart of charts) {
    const plot = chart.figure.querySelector(".plot");
    plot.addEventListener("pointermove", (event) => {
      const share = (event.clientX - plot.getBoundingClientRect().left - MARGIN.left) / chart.inner.width;
      moveTo(span[0] + Math.min(1, Math.max(0, share)) * (span[1] - span[0]));
    });
    plot.addEventListener("pointerleave", () => moveTo(null));
    plot.addEventListener("blur", () => moveTo(null));
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
      if (event.key === "Escape") return moveTo(null);
      if (!move) return;
      event.preventDefault();
      const steps = chart.lines[0].steps;
      const here = view.step === null ? (move > 0 ? -1 : steps.length) : nearest(steps, view.step);
      moveTo(steps[Math.min(steps.length - 1, Math.max(0, here + move))]);
    });
  }

  const slider = document.getElementById("smoothing"), smoothed = document.getElementById("smoothed");
  const smoothBy = () => { view.smoothing = +slider.value; smoothed.textContent = slider.value; };
  slider.value = charts.some((chart) => chart.lines.some((line) => line.steps.length > 200)) ? 0.7 : 0;
  slider.addEventListener("input", () => { smoothBy(); redraw(); });
  smoothBy();
  document.getElementById("log").addEventListener("change", (event) => { view.log = event.target.checked; redraw(); });

  const table = document.getElementById("config");
  if (table) {
    const search = document.getElementById("search"), only = document.getElementById("changed-only"), nothing = document.getElementById("nothing");
    const filter = () => {
      const wanted = search.value.trim().toLowerCase();
      let left = 0;
      for (const row of table.rows) {
        row.hidden = (only.checked && !row.classList.contains("changed")) || !row.textContent.toLowerCase().includes(wanted);
        left += !row.hidden;
      }
      nothing.hidden = left > 0;
      table.parentElement.hidden = left === 0;
    };
    search.addEventListener("input", filter);
    only.addEventListener("change", filter);
    filter();
  }

  const command = document.getElementById("command"), copy = document.getElementById("copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command.textContent);
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    } catch {
      getSelection().selectAllChildren(command);
    }
  });

  const root = document.documentElement;
  const remembered = (() => { try { return localStorage.getItem("theme"); } catch { return null; } })();
  if (remembered === "light" || remembered === "dark") root.dataset.theme = remembered;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("theme", root.dataset.theme); } catch { /* A file that may store nothing. */ }
  });

  new ResizeObserver(redraw).observe(document.querySelector(".charts"));
})();
