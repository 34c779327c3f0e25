"use strict";
// Charts with a shared step axis and cursor, and the controls for smoothing and scale.
const curves = (() => {
  const MARGIN = { left: 52, right: 14, top: 8, bottom: 22 };
  const { smooth, linearTicks, logTicks, nearest, MAX_NAMED } = series;

  // `host` contains the figures, one per chart. `resumes` are steps to mark.
  function group(host, { resumes = [] } = {}) {
    const view = { log: false, smoothing: 0, step: null, y: null };
    let charts = [], span = [0, 1];

    function scale(chart, shown, height) {
      const finite = shown.flat().filter((v) => v !== null);
      let low = Infinity, high = -Infinity;
      for (const v of finite) { if (v < low) low = v; if (v > high) high = v; }
      const isLog = view.log && finite.length > 0;
      if (!finite.length) [low, high] = [0, 1];
      if (chart.zero && !isLog) low = Math.min(0, low);
      if (low === high) [low, high] = isLog ? [low / 2, high * 2] : low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(low) * 0.1];
      const warp = isLog ? Math.log10 : (v) => v, pad = (warp(high) - warp(low)) * 0.05;
      const [bottom, top] = [low === 0 ? 0 : warp(low) - pad, warp(high) + pad];
      const ticks = isLog ? logTicks(10 ** bottom, 10 ** top, Math.max(3, Math.round(height / 42))) : linearTicks(bottom, top, Math.max(3, Math.round(height / 42)));
      return { y: (value) => MARGIN.top + (1 - (warp(value) - bottom) / (top - bottom)) * height, ticks };
    }

    function axes(node, chart, ticks, width, height) {
      const floor = MARGIN.top + chart.inner.height;
      for (const tick of ticks) {
        node.append(page.svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: chart.y(tick), y2: chart.y(tick) }));
        node.append(page.svg("text", { x: MARGIN.left - 10, y: chart.y(tick) + 4, "text-anchor": "end" }, page.number(tick, { percent: chart.percent, trim: true })));
      }
      node.append(page.svg("line", { class: "base", x1: MARGIN.left, x2: width - MARGIN.right, y1: floor, y2: floor }));
      const columns = span[1] > span[0] ? linearTicks(span[0], span[1], Math.max(2, Math.round(chart.inner.width / 110))) : [span[0]];
      for (const tick of columns) {
        if (!Number.isInteger(tick)) continue;
        const anchor = chart.x(tick) > width - MARGIN.right - 24 ? "end" : "middle";
        node.append(page.svg("text", { x: chart.x(tick), y: height - 4, "text-anchor": anchor }, tick.toLocaleString("en")));
      }
      for (const step of resumes) {
        const mark = page.svg("line", { class: "resume", x1: chart.x(step), x2: chart.x(step), y1: MARGIN.top, y2: floor });
        mark.append(page.svg("title", {}, `resumed at step ${step}`));
        node.append(mark);
      }
    }

    function path(chart, line, values, className) {
      let text = "", open = false;
      values.forEach((value, i) => {
        if (value !== null) text += `${open ? "L" : "M"}${chart.x(line.steps[i]).toFixed(1)} ${chart.y(value).toFixed(1)}`;
        open = value !== null;
      });
      return page.svg("path", { class: className, d: text });
    }

    function draw(chart) {
      const plot = chart.figure.querySelector(".plot"), width = plot.clientWidth, height = plot.clientHeight;
      plot.replaceChildren();
      chart.cursor = null;
      if (!width) return;
      const node = page.svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      chart.shown = chart.lines.map((line) => line.values.map((v) => (v !== null && view.log && v <= 0 ? null : v)));
      chart.inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
      chart.x = (step) => MARGIN.left + (span[1] === span[0] ? 0.5 : (step - span[0]) / (span[1] - span[0])) * chart.inner.width;
      const { y, ticks } = scale(chart, chart.shown, chart.inner.height);
      chart.y = y;
      axes(node, chart, ticks, width, height);
      const floor = MARGIN.top + chart.inner.height, isSparse = chart.lines.length <= MAX_NAMED && chart.lines.every((line) => line.steps.length <= 40);
      chart.paths = chart.lines.map((line, index) => {
        const weight = line.exact ? 0 : view.smoothing, values = chart.shown[index];
        if (weight && chart.lines.length <= MAX_NAMED) node.append(path(chart, line, values, `curve raw c${line.look}`));
        const curve = path(chart, line, weight ? smooth(values, weight) : values, `curve c${line.look}`);
        node.append(curve);
        if (isSparse && !weight) line.steps.forEach((step, i) => {
          if (values[i] !== null) node.append(page.svg("circle", { class: `f${line.look}`, cx: chart.x(step), cy: y(values[i]), r: 2.5 }));
        });
        line.values.forEach((value, i) => {
          if (value !== null) return;
          const tick = page.svg("line", { class: "lost-point", x1: chart.x(line.steps[i]), x2: chart.x(line.steps[i]), y1: floor - 7, y2: floor });
          tick.append(page.svg("title", {}, `${line.name} is not finite at step ${line.steps[i]}`));
          node.append(tick);
        });
        return curve;
      });
      chart.cursor = page.svg("g", { class: "cursor", visibility: "hidden" });
      node.append(chart.cursor);
      plot.append(node);
    }

    // Lines that the readout names: all if they are few, else the one nearest to the pointer.
    function namedLines(chart, picked) {
      const all = [...chart.lines.keys()];
      if (all.length <= MAX_NAMED) return all;
      if (view.step === null || view.y === null || view.over !== chart) return [];
      const distance = (i) => { const value = chart.shown[i][picked[i]]; return value === null ? Infinity : Math.abs(chart.y(value) - view.y); };
      return [all.reduce((best, i) => (distance(i) < distance(best) ? i : best))];
    }

    // One cursor for all charts, which shows the values at the same step.
    function point(chart) {
      const readout = chart.figure.querySelector(".readout");
      readout.replaceChildren();
      if (!chart.cursor || !chart.lines.length) return;
      chart.cursor.replaceChildren();
      chart.cursor.setAttribute("visibility", view.step === null ? "hidden" : "visible");
      const picked = chart.lines.map((line) => (view.step === null ? line.steps.length - 1 : nearest(line.steps, view.step)));
      const shown = namedLines(chart, picked), lead = shown.length ? shown[0] : 0;
      if (view.step !== null) {
        const step = chart.lines[lead].steps[picked[lead]], at = chart.x(step);
        chart.cursor.append(page.svg("line", { x1: at, x2: at, y1: MARGIN.top, y2: MARGIN.top + chart.inner.height }));
        readout.append(page.html("span", {}, "step ", page.html("b", {}, step.toLocaleString("en"))));
      }
      chart.paths.forEach((node, i) => node.classList.toggle("chosen", chart.lines.length > MAX_NAMED && shown.includes(i)));
      for (const i of shown) {
        const line = chart.lines[i], value = chart.shown[i][picked[i]];
        // Below a legend, values need no names.
        const label = chart.lines.length > 1 && !(chart.brief && shown.length > 1) ? `${line.name} ` : "";
        readout.append(page.html("span", {}, page.html("i", { class: `f${line.look}` }), label, page.html("b", {}, page.number(line.values[picked[i]], { percent: chart.percent }))));
        if (view.step !== null && value !== null) chart.cursor.append(page.svg("circle", { class: `f${line.look}`, cx: chart.x(line.steps[picked[i]]), cy: chart.y(value), r: 4 }));
      }
    }

    const redraw = () => charts.forEach((chart) => { draw(chart); point(chart); });
    const moveTo = (step, y = null, over = null) => { Object.assign(view, { step, y, over }); charts.forEach(point); };

    function listen(chart) {
      const plot = chart.figure.querySelector(".plot");
      plot.onpointermove = (event) => {
        const box = plot.getBoundingClientRect(), share = (event.clientX - box.left - MARGIN.left) / chart.inner.width;
        moveTo(span[0] + Math.min(1, Math.max(0, share)) * (span[1] - span[0]), event.clientY - box.top, chart);
      };
      plot.onpointerleave = plot.onblur = () => moveTo(null);
      plot.onkeydown = (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
        if (event.key === "Escape") return moveTo(null);
        if (!move) return;
        event.preventDefault();
        const steps = chart.lines[0].steps;
        const here = view.step === null ? (move > 0 ? -1 : steps.length) : nearest(steps, view.step);
        moveTo(steps[Math.min(steps.length - 1, Math.max(0, here + move))]);
      };
    }

    // Replace the current charts; each has its `figure`.
    function show(next) {
      charts = next;
      const ends = charts.flatMap((chart) => chart.lines.flatMap((line) => (line.steps.length ? [line.steps[0], line.steps[line.steps.length - 1]] : [])));
      span = ends.length ? [Math.min(...ends), Math.max(...ends)] : [0, 1];
      charts.forEach(listen);
      redraw();
    }

    new ResizeObserver(redraw).observe(host);
    return { view, show, redraw };
  }

  // Connect the two controls above a group of charts.
  function control(charts, smoothing) {
    const slider = document.getElementById("smoothing"), smoothed = document.getElementById("smoothed");
    const smoothBy = () => { charts.view.smoothing = +slider.value; smoothed.textContent = slider.value; };
    slider.value = smoothing;
    slider.addEventListener("input", () => { smoothBy(); charts.redraw(); });
    smoothBy();
    document.getElementById("log").addEventListener("change", (event) => { charts.view.log = event.target.checked; charts.redraw(); });
  }

  return { group, control };
})();
