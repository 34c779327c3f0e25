// A sweep, live: parallel coordinates, importance, best so far, slices, contour, and the trials with their states.
import { act, request } from "./api.js";
import { ask } from "./actions.js";
import { chartGroup } from "./charts.js";
import { contour, slice } from "./scatter.js";
import { sweepOf } from "./table.js";
import { change, view } from "./view.js";

const short = (path) => path.slice(path.lastIndexOf("/") + 1);
const parts = { name: "", plot: null, best: null };
const progress = chartGroup({ onZoom: () => {} });

// The sweep of the address, or that of the chosen run.
export const shownSweep = () => view.sweep || sweepOf(view.run[view.run.length - 1] ?? "");

export async function showSweep(content, choose) {
  const name = shownSweep();
  if (!name) {
    content.replaceChildren(page.html("p", { class: "empty" }, "Choose a run of a sweep, or open a sweep in the list."));
    parts.name = "";
    return;
  }
  const query = [["name", name], ["metric", view.objective], ["largest", view.largest]].filter(([, value]) => value);
  const sweep = await request("sweep", query);
  if (view.tab !== "sweep" || shownSweep() !== name) return;
  if (sweep.problem) { content.replaceChildren(page.html("p", { role: "alert" }, sweep.problem)); parts.name = ""; return; }
  if (parts.name !== name || !parts.plot?.isConnected) build(content, name, choose);
  draw(sweep, choose);
}

const section = (title, ...children) => page.html("section", { class: "panel" }, page.html("h2", {}, title), ...children);
const byId = (id) => document.getElementById(id);

function build(content, name, choose) {
  progress.clear();
  parts.name = name;
  parts.plot = page.html("div", { class: "parallel", id: "parallel", role: "img", tabindex: 0 });
  const readout = page.html("p", { class: "under" });
  parts.parallel = parallel(parts.plot, readout, { onBrush: (brush) => change({ brush: structuredClone(brush) }), onPick: (line) => choose([line.path], "curves") });
  const figure = page.html("figure", { class: "chart", id: "best-so-far" }, page.html("figcaption", {}, page.html("h3", {}, "Best so far"), page.html("output", { class: "readout" })),
    page.html("div", { class: "plot", tabindex: 0, role: "img", "aria-label": "Best result so far over the trials" }));
  content.replaceChildren(
    page.html("div", { class: "sweep-head", id: "sweep-head" }),
    section("Settings and results", parts.plot, readout),
    page.html("div", { class: "pair" }, figure, page.html("figure", { class: "chart" }, page.html("figcaption", {}, page.html("h3", {}, "Importance")), page.html("div", { id: "importance" }))),
    section("Slices", page.html("div", { class: "slices", id: "slices" })),
    section("Contour", page.html("div", { id: "contour" })),
    section("Trials", page.html("div", { class: "scroll" }, page.html("table", { class: "trials", id: "trials" }))));
}

function draw(sweep, choose) {
  header(sweep, choose);
  parts.plot.setAttribute("aria-label", `Parallel coordinates of ${sweep.varied.join(", ")} and ${sweep.compared}, one line per run`);
  page.update(parts.plot, [sweep.axes, sweep.lines, view.brush], () => {
    queueMicrotask(() => parts.parallel.show({ axes: sweep.axes, lines: sweep.lines, brushes: structuredClone(view.brush) }));
    return [page.html("span")];
  });
  bestSoFar(sweep);
  importance(sweep);
  const points = sweep.lines.map((line) => ({ ...line, result: line.values[line.values.length - 1] }));
  page.update(byId("slices"), [sweep.axes, sweep.lines], () => sweep.varied.map((key, i) => slice(sweep.axes[i], points, i, sweep.compared, (path) => choose([path], "curves"))));
  drawContour(sweep, points);
  trials(sweep, choose);
}

function header(sweep, choose) {
  const counts = {};
  for (const trial of sweep.trials) counts[trial.status] = (counts[trial.status] ?? 0) + 1;
  const best = sweep.lines[0], value = sweep.trials.find((trial) => trial.path === best?.path)?.value;
  page.update(byId("sweep-head"), [sweep.name, counts, best, value, sweep.metric, sweep.largest, sweep.is_live, sweep.metrics], () => {
    const metric = page.html("input", { list: "sweep-metrics", value: sweep.metric, "aria-label": "Objective", autocomplete: "off", onchange: (event) => change({ objective: event.target.value.trim() }) });
    const largest = page.html("input", { type: "checkbox", onchange: (event) => change({ largest: event.target.checked ? "1" : "0" }) });
    largest.checked = sweep.largest;
    const cancel = page.html("button", { type: "button", class: "quiet bad", onclick: () => ask({ title: `Cancel ${sweep.name}?`, text: "Running jobs save a checkpoint and stop; no more jobs start. `maxhydra sweep resume` continues.", go: "Cancel sweep", run: () => act("cancel", { sweep: sweep.name }) }) }, "Cancel sweep");
    return [
      page.html("h2", {}, sweep.name), ...Object.entries(counts).map(([status, count]) => page.html("span", { class: `status ${status}` }, `${count} ${status}`)),
      best ? page.html("span", {}, "best ", page.html("b", { id: "best-value" }, page.number(value)), " ", page.html("button", { type: "button", class: "link", onclick: () => choose([best.path], "curves") }, best.run)) : null,
      page.html("span", { class: "grow" }), page.html("label", {}, "Objective", metric), page.html("datalist", { id: "sweep-metrics" }, ...sweep.metrics.map((each) => page.html("option", { value: each }))),
      page.html("label", { class: "check" }, largest, "Larger is better"),
      page.html("button", { type: "button", class: "quiet", onclick: () => choose(sweep.trials.map((trial) => trial.path), "curves") }, "Curves"),
      page.html("a", { class: "quiet", href: `report?${new URLSearchParams({ sweep: sweep.name })}`, target: "_blank", rel: "noopener" }, "Report"),
      sweep.is_live ? cancel : null];
  });
}

// Results in order of creation, and the best of them up to each trial.
function bestSoFar(sweep) {
  const known = sweep.trials.map((trial, i) => [i + 1, trial.value]).filter(([, value]) => typeof value === "number" && Number.isFinite(value));
  let best = null;
  const bests = known.map(([, value]) => (best = best === null ? value : sweep.largest ? Math.max(best, value) : Math.min(best, value)));
  const xs = known.map(([i]) => i), line = (name, look, style, values) => ({ name, run: name, look, style, xs, values, raw: values });
  const chart = { metric: sweep.metric, title: "Best so far", figure: byId("best-so-far"), lines: [line("trial", "7", "points", known.map(([, value]) => value)), line("best so far", "0", "steps", bests)] };
  progress.show([chart], { x: "trial", log: false, zoom: null });
}

function importance(sweep) {
  page.update(byId("importance"), sweep.importance, () => (sweep.importance.length
    ? [page.html("table", { class: "importance" }, page.html("tbody", {}, ...sweep.importance.map(([key, share]) => page.html("tr", {},
      page.html("th", { scope: "row" }, page.html("code", {}, key)), page.html("td", {}, page.html("meter", { min: 0, max: 1, value: share, "aria-label": key })), page.html("td", { class: "figure" }, `${Math.round(share * 100)}%`))))),
    page.html("p", { class: "under" }, `Share of the variance of ${sweep.compared} that each setting explains, corrected for chance.`)]
    : [page.html("p", { class: "empty" }, "Needs at least 4 results and a setting that varies.")]));
}

// Two settings, chosen by the user or the most important ones.
function drawContour(sweep, points) {
  const numeric = sweep.varied.filter((_, i) => new Set(points.map((point) => point.values[i])).size > 1 && points.every((point) => typeof point.values[i] === "number"));
  const ranked = [...sweep.importance.map(([key]) => key), ...numeric].filter((key, i, keys) => numeric.includes(key) && keys.indexOf(key) === i);
  const [first, second] = view.slice.length === 2 && view.slice.every((key) => numeric.includes(key)) ? view.slice : ranked;
  page.update(byId("contour"), [sweep.lines, first, second], () => {
    if (!second) return [page.html("p", { class: "empty" }, "Needs two numeric settings that vary.")];
    const choice = (label, value, pick) => page.html("label", {}, label, page.html("select", { onchange: (event) => change({ slice: pick(event.target.value) }) }, ...numeric.map((key) => page.html("option", { value: key, selected: key === value }, key))));
    const indices = [first, second].map((key) => sweep.varied.indexOf(key));
    return [page.html("div", { class: "controls" }, choice("x", first, (key) => [key, key === second ? first : second]), choice("y", second, (key) => [key === first ? second : first, key])),
      contour(indices.map((i) => sweep.axes[i]), points, indices, sweep)];
  });
}

function trials(sweep, choose) {
  const inside = Object.keys(view.brush).length ? new Set(parts.parallel.inside().map((line) => line.path)) : null;
  const rank = new Map(sweep.lines.map((line, i) => [line.path, i]));
  const shown = sweep.trials.filter((trial) => !inside || inside.has(trial.path)).sort((a, b) => (rank.get(a.path) ?? Infinity) - (rank.get(b.path) ?? Infinity));
  page.update(byId("trials"), [shown, sweep.varied, sweep.metric, view.run], () => {
    const head = ["", "Run", "State", sweep.metric, ...sweep.axes.slice(0, -1).map((axis) => axis.name), "Step", "Time"].map((title) => page.html("th", { scope: "col" }, title));
    const rows = shown.map((trial) => page.html("tr", { "data-run": trial.path },
      page.html("td", { class: "figure" }, rank.has(trial.path) ? rank.get(trial.path) + 1 : ""),
      page.html("td", {}, page.html("button", { type: "button", class: "link", onclick: () => choose([trial.path], "curves") }, short(trial.path))),
      page.html("td", {}, page.html("span", { class: `status ${trial.status}`, title: trial.reason ?? "" }, trial.status)),
      page.html("td", { class: "figure" }, trial.value === null || trial.value === undefined ? "" : page.cell(trial.value)),
      ...trial.settings.map((value) => page.html("td", { class: "figure" }, page.cell(value))),
      page.html("td", { class: "figure" }, trial.step === null ? "" : `${trial.step.toLocaleString("en")}${trial.steps ? ` / ${trial.steps.toLocaleString("en")}` : ""}`),
      page.html("td", { class: "figure" }, page.duration(trial.seconds))));
    return [page.html("thead", {}, page.html("tr", {}, ...head)), page.html("tbody", {}, ...rows)];
  });
}
