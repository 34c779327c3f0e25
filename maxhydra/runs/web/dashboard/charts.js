// Charts by uPlot with a shared x axis: zoom by dragging, crosshair with values in all charts.
import { AXES } from "./lines.js";

// Colours of the style sheet as a canvas understands them.
const probe = page.html("span", { hidden: true });
document.body.append(probe);
function colour(name) {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
const translucent = (rgb, alpha) => rgb.replace(/^rgb\(/, "rgba(").replace(/\)$/, `, ${alpha})`);

const MIN_DRAG = 5;

// `onZoom(range)` is called with the x range that the user has selected, or null for all.
export function chartGroup({ onZoom }) {
  const state = { x: "step", log: false, zoom: null, span: [0, 1] };
  const charts = new Map();
  let isMoving = false;

  const range = () => state.zoom ?? state.span;

  // Columns of uPlot: x, then for each line its band, its raw values, and its values.
  function columns(chart) {
    const tables = [], options = [{}], bands = [];
    const isFew = chart.lines.length <= series.MAX_NAMED;
    for (const line of chart.lines) {
      const stroke = colour(`c${line.look}`), own = [];
      const add = (values, option) => { own.push(values); options.push({ spanGaps: false, label: "", ...option }); return options.length - 1; };
      const hidden = { stroke: "transparent", width: 0, points: { show: false } };
      if (line.low) bands.push({ series: [add(line.high, hidden), add(line.low, hidden)], fill: translucent(stroke, 0.18) });
      if (line.isSmooth && isFew) add(line.raw, { stroke: translucent(stroke, 0.28), width: 1, points: { show: false } });
      const isSparse = isFew && line.xs.length <= 40 && !line.isSmooth && !line.low && line.style !== "steps";
      const points = { show: isSparse || line.style === "points", size: 5, fill: stroke, width: 0 };
      const paths = { points: () => null, steps: uPlot.paths.stepped({ align: 1 }) }[line.style];
      add(line.values, { stroke, width: isFew ? 1.6 : 1.1, label: line.name, points, ...(paths ? { paths } : {}) });
      tables.push([line.xs, ...own]);
    }
    return { data: tables.length ? uPlot.join(tables) : [[]], options, bands };
  }

  function yRange(chart, low, high) {
    if (low === null || high === null) return [0, 1];
    if (state.log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
    if (chart.zero) return [Math.min(0, low), high > 0 ? high * 1.08 : 1];
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return [low - pad, high + pad];
  }

  function create(entry) {
    const { chart, plot } = entry, { data, options, bands } = columns(chart);
    const ink = colour("faint"), grid = { stroke: colour("line"), width: 1 }, font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: ink, grid, ticks: { ...grid, size: 4 }, font, labelFont: font, labelSize: 16, labelGap: 0 };
    const logSplits = { splits: (u, _, low, high) => series.logTicks(low, high, Math.max(3, Math.round(u.bbox.height / devicePixelRatio / 42))), filter: (_, splits) => splits };
    const format = (value) => page.number(value, { percent: chart.percent, trim: true });
    entry.uplot = new uPlot({
      width: plot.clientWidth, height: plot.clientHeight, padding: [10, 14, 0, 0], bands, series: options, legend: { show: false },
      scales: { x: { time: false, range }, y: { distr: state.log ? 3 : 1, range: (_, low, high) => yRange(entry.chart, low, high) } },
      axes: [
        { ...axis, label: AXES[state.x].title, space: 70, size: 26, values: (_, values) => values.map((value) => (state.x === "step" && !Number.isInteger(value) ? "" : AXES[state.x].format(value))) },
        { ...axis, label: chart.metric, size: 52, values: (_, values) => values.map(format), ...(state.log ? logSplits : {}) },
      ],
      cursor: {
        drag: { x: true, y: false, setScale: false, dist: MIN_DRAG }, y: false, points: { size: 7 },
        focus: { prox: chart.lines.length > series.MAX_NAMED ? 30 : -1 },
        bind: { dblclick: () => () => onZoom(null) },
      },
      focus: { alpha: 0.25 },
      hooks: { setCursor: [() => moved(entry)], setSelect: [(u) => selected(u)], draw: [(u) => drawGaps(u, entry.chart)], setSeries: [(_, index) => { entry.focused = index; }] },
    }, data, plot);
    plot.chart = entry.uplot;
  }

  // Marks values that are not finite at the bottom of the chart.
  function drawGaps(u, chart) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.fillStyle = colour("bad");
    for (const line of chart.lines) {
      line.raw.forEach((value, i) => {
        if (value === null && !state.log && !line.low) ctx.fillRect(u.valToPos(line.xs[i], "x", true) - 1, bbox.top + bbox.height - 14, 2, 14);
      });
    }
    ctx.restore();
  }

  function selected(u) {
    const { left, width } = u.select;
    if (width < MIN_DRAG) return;
    const zoom = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    onZoom(state.x === "step" ? zoom.map(Math.round) : zoom.map((value) => +value.toPrecision(6)));
  }

  // The crosshair of one chart moves those of all others to the same x.
  function moved(entry) {
    const { left } = entry.uplot.cursor, x = left < 0 ? null : entry.uplot.posToVal(left, "x");
    readValues(entry, x);
    if (isMoving) return;
    isMoving = true;
    for (const other of charts.values()) {
      if (other === entry || !other.uplot) continue;
      const at = x === null ? -10 : other.uplot.valToPos(x, "x");
      other.uplot.setCursor({ left: at, top: -10 });
    }
    isMoving = false;
  }

  // The values below the crosshair, or the last ones. Of many lines only the one nearest to the pointer.
  function readValues(entry, x) {
    const { chart, readout, uplot } = entry, lines = chart.lines.filter((line) => line.xs.length);
    const picked = lines.map((line) => (x === null ? line.xs.length - 1 : series.nearest(line.xs, x)));
    let shown = [...lines.keys()];
    if (lines.length > series.MAX_NAMED) {
      const top = uplot.cursor.top, away = (i) => { const value = lines[i].values[picked[i]]; return value === null ? Infinity : Math.abs(uplot.valToPos(value, "y") - top); };
      shown = x === null || top < 0 ? [] : [shown.reduce((best, i) => (away(i) < away(best) ? i : best))];
    }
    const items = [];
    if (x !== null && shown.length) items.push(page.html("span", {}, `${AXES[state.x].name} `, page.html("b", {}, AXES[state.x].format(lines[shown[0]].xs[picked[shown[0]]]))));
    for (const i of shown) {
      const line = lines[i], isNamed = shown.length === 1 && lines.length > 1;
      const spread = line.low && x !== null ? ` [${page.number(line.low[picked[i]], { percent: chart.percent, trim: true })}, ${page.number(line.high[picked[i]], { percent: chart.percent, trim: true })}]` : "";
      items.push(page.html("span", { title: line.name }, page.html("i", { class: `f${line.look}` }), isNamed ? `${line.name} ` : "", page.html("b", {}, page.number(line.raw[picked[i]], { percent: chart.percent })), spread));
    }
    readout.replaceChildren(...items);
  }

  function steer(entry, event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key], u = entry.uplot;
    if (event.key === "Escape") { u.setCursor({ left: -10, top: -10 }); return; }
    if (!move || !entry.chart.lines.length) return;
    event.preventDefault();
    const { xs } = entry.chart.lines[0], { left } = u.cursor;
    const here = left < 0 ? (move > 0 ? -1 : xs.length) : series.nearest(xs, u.posToVal(left, "x"));
    u.setCursor({ left: u.valToPos(xs[Math.min(xs.length - 1, Math.max(0, here + move))], "x"), top: 0 });
  }

  const sizes = new ResizeObserver((changed) => {
    for (const { target } of changed) {
      const entry = charts.get(target);
      if (entry?.uplot && target.clientWidth) entry.uplot.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });

  function drop(entry) {
    entry.uplot?.destroy();
    sizes.unobserve(entry.plot);
    charts.delete(entry.plot);
  }

  // Draw prepared charts, each with its `figure`. A chart is made anew only if more than its data has changed.
  function show(next, { x, log, zoom }) {
    Object.assign(state, { x, log, zoom });
    let low = Infinity, high = -Infinity;
    for (const { lines } of next) for (const { xs } of lines) if (xs.length) { low = Math.min(low, xs[0]); high = Math.max(high, xs[xs.length - 1]); }
    state.span = low === Infinity ? [0, 1] : low === high ? [low - 1, high + 1] : [low, high];
    const plots = next.map((chart) => chart.figure.querySelector(".plot"));
    for (const entry of [...charts.values()]) if (!plots.includes(entry.plot)) drop(entry);
    next.forEach((chart, i) => {
      const plot = plots[i], shape = JSON.stringify([x, log, chart.metric, colour("c0"), chart.lines.map((line) => [line.name, line.look, line.isSmooth, !!line.low, line.xs.length <= 40])]);
      let entry = charts.get(plot);
      if (entry && entry.shape !== shape) { drop(entry); entry = null; }
      if (entry) {
        entry.chart = chart;
        entry.uplot.setData(columns(chart).data);
      } else {
        entry = { chart, plot, shape, readout: chart.figure.querySelector(".readout") };
        charts.set(plot, entry);
        create(entry);
        sizes.observe(plot);
        plot.onkeydown = (event) => steer(charts.get(plot), event);
        plot.onblur = () => charts.get(plot)?.uplot.setCursor({ left: -10, top: -10 });
      }
      if (entry.uplot.cursor.left < 0) readValues(entry, null);
    });
  }

  function clear() {
    for (const entry of [...charts.values()]) drop(entry);
  }
  return { show, clear };
}
