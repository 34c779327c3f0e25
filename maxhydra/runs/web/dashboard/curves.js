// Curves of the chosen runs: controls, groups of runs, and a free layout of the charts.
import { request } from "./api.js";
import { chartGroup } from "./charts.js";
import { AXES, BANDS, aggregate, prepare } from "./lines.js";
import { change, view } from "./view.js";

const SIZES = ["small", "wide", "large"];
const short = (path) => path.slice(path.lastIndexOf("/") + 1);
const host = page.html("div", { class: "charts" });
const groupLegend = page.html("ul", { class: "groups", "aria-label": "Groups" });
const group = chartGroup({ onZoom: (zoom) => change({ zoom }) });
let valuesOfKey = { key: "", values: {} };
let drawnCharts = "";

export const chosenQuery = () => view.run.map((path) => ["run", path]);
const sizeOf = (metric, index) => view.size[metric] ?? (index === 0 && view.tab === "curves" ? "wide" : "small");

// Charts in the order of the user, then the others; those that match the filter and are not hidden.
function arrange(charts) {
  const place = (chart) => { const i = view.order.indexOf(chart.metric); return i < 0 ? Infinity : i; };
  const words = view.metrics.toLowerCase().split(/\s+/).filter(Boolean);
  const ordered = charts.map((chart, i) => [chart, i]).sort(([a, i], [b, j]) => (place(a) - place(b) || 0) || i - j).map(([chart]) => chart);
  const isMatch = ({ metric, title }) => !words.length || words.some((word) => `${metric} ${title}`.toLowerCase().includes(word));
  return ordered.filter((chart) => !view.hide.includes(chart.metric) && isMatch(chart));
}

function moveBefore(metric, target, charts) {
  const names = charts.map((chart) => chart.metric).filter((name) => name !== metric);
  names.splice(target === null ? names.length : names.indexOf(target), 0, metric);
  change({ order: names });
}

function figure(chart, index, charts) {
  const { metric, title } = chart;
  const tool = (label, text, onclick) => page.html("button", { type: "button", "aria-label": `${label} ${title}`, title: label, onclick }, text);
  const next = SIZES[(SIZES.indexOf(sizeOf(metric, index)) + 1) % SIZES.length];
  const tools = page.html("span", { class: "chart-tools" },
    tool("Move left", "‹", () => index > 0 && moveBefore(metric, charts[index - 1].metric, charts)),
    tool("Move right", "›", () => index < charts.length - 1 && moveBefore(metric, charts[index + 2]?.metric ?? null, charts)),
    tool(`Make ${next}`, "⤢", () => change({ size: { ...view.size, [metric]: next } })),
    tool("Hide", "×", () => change({ hide: [...view.hide, metric] })));
  const heading = page.html("h3", { draggable: "true", title: "Drag to move" }, title);
  const node = page.html("figure", { class: `chart ${sizeOf(metric, index)}`, "data-metric": metric },
    page.html("figcaption", {}, heading, page.html("output", { class: "readout" }), tools),
    page.html("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${title} of ${chart.lines.map((line) => line.name ?? line.run).join(", ")}. Arrow keys move the crosshair; dragging zooms, a double click resets.` }));
  heading.addEventListener("dragstart", (event) => { event.dataTransfer.setData("text/plain", metric); event.dataTransfer.effectAllowed = "move"; });
  node.addEventListener("dragover", (event) => { event.preventDefault(); node.classList.add("target"); });
  node.addEventListener("dragleave", () => node.classList.remove("target"));
  node.addEventListener("drop", (event) => {
    event.preventDefault();
    node.classList.remove("target");
    const moving = event.dataTransfer.getData("text/plain");
    if (moving !== metric && charts.some((each) => each.metric === moving)) moveBefore(moving, metric, charts);
  });
  return node;
}

// Runs by their value of the key to group by.
async function groupRuns() {
  if (!view.group) return null;
  if (valuesOfKey.key !== view.group) {
    const { values } = await request("values", [["key", view.group]]);
    valuesOfKey = { key: view.group, values: values ?? {} };
  }
  const groups = new Map(), key = view.group.slice(view.group.lastIndexOf(".") + 1);
  for (const run of view.run) {
    const value = valuesOfKey.values[run] ?? "none";
    groups.set(value, [...(groups.get(value) ?? []), run]);
  }
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
  return [...groups].sort(([a], [b]) => compare(a, b)).map(([value, runs]) => ({ name: `${key}=${page.cell(value)}`, runs }));
}

export async function showCurves(content, { isSystem = false, before = [] } = {}) {
  const tab = view.tab;
  const [response, groups] = await Promise.all([request("curves", chosenQuery()), groupRuns()]);
  if (view.tab !== tab) return;
  offerKeys(response.varied);
  const decoded = series.decode(response.charts.filter((chart) => chart.system === isSystem));
  const charts = arrange(decoded);
  const options = { x: view.x, log: view.log, smoothing: view.smoothing, axes: response.axes };
  const prepared = charts.map((chart) => {
    const lines = prepare(chart, options).map((line) => ({ ...line, name: short(line.run) }));
    return { ...chart, lines: groups ? aggregate(lines, groups, view.band) : lines };
  });
  const now = JSON.stringify([tab, charts.map((chart, i) => [chart.metric, sizeOf(chart.metric, i)])]);
  if (now !== drawnCharts || !host.isConnected) {
    drawnCharts = now;
    group.clear();
    host.replaceChildren(...prepared.map((chart, i) => figure(chart, i, charts)));
    const nothing = decoded.length ? "All charts are hidden, or none matches the filter." : "No metrics yet.";
    content.replaceChildren(...before, groupLegend, charts.length ? host : page.html("p", { class: "empty" }, nothing));
  }
  page.update(groupLegend, [groups], () => (groups ?? []).map(({ name, runs }, i) =>
    page.html("li", { title: runs.join("\n") }, page.html("i", { class: `f${i % 8}` }), `${name} · ${runs.length} run${runs.length > 1 ? "s" : ""}`)));
  groupLegend.hidden = !groups;
  group.show(prepared.map((chart, i) => ({ ...chart, figure: host.children[i] })), view);
  showHidden(decoded);
}

// The controls above the charts.
const byId = (id) => document.getElementById(id);
const choices = (id, names) => byId(id).replaceChildren(...Object.entries(names).map(([value, label]) => page.html("option", { value }, label)));
choices("x", Object.fromEntries(["step", "tokens", "seconds", "flops"].map((name) => [name, AXES[name].title])));
choices("band", BANDS);
byId("x").addEventListener("change", (event) => change({ x: event.target.value, zoom: null }));
byId("band").addEventListener("change", (event) => change({ band: event.target.value }));
byId("log").addEventListener("change", (event) => change({ log: event.target.checked }));
byId("smoothing").addEventListener("input", (event) => change({ smoothing: +event.target.value }));
byId("group").addEventListener("change", (event) => change({ group: event.target.value.trim() }));
byId("metrics").addEventListener("input", (event) => change({ metrics: event.target.value }));
byId("zoom-reset").addEventListener("click", () => change({ zoom: null }));
byId("layout-reset").addEventListener("click", () => change({ order: [], size: {}, hide: [] }));

export function showControls() {
  byId("x").value = view.x;
  byId("band").value = view.band;
  byId("log").checked = view.log;
  byId("smoothing").value = view.smoothing;
  byId("smoothed").textContent = view.smoothing;
  for (const name of ["group", "metrics"]) if (document.activeElement !== byId(name)) byId(name).value = view[name];
  byId("band-label").hidden = !view.group;
  byId("zoom-reset").hidden = !view.zoom;
  byId("layout-reset").hidden = !view.order.length && !view.hide.length && !Object.keys(view.size).length;
}

function offerKeys(varied) {
  page.update(byId("group-keys"), varied, () => varied.map((key) => page.html("option", { value: key })));
}

// A menu with the hidden charts, each of which can be shown again.
function showHidden(charts) {
  const hidden = charts.filter((chart) => view.hide.includes(chart.metric)), select = byId("hidden");
  select.hidden = !hidden.length;
  page.update(select, hidden.map((chart) => chart.metric), () => [
    page.html("option", { value: "" }, `${hidden.length} hidden`),
    ...hidden.map((chart) => page.html("option", { value: chart.metric }, `Show ${chart.title}`))]);
}
byId("hidden").addEventListener("change", (event) => {
  if (event.target.value) change({ hide: view.hide.filter((metric) => metric !== event.target.value) });
});
// Canvases do not follow the style sheet.
const redraw = () => change({});
byId("theme").addEventListener("click", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
