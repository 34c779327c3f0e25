// The dashboard: the list of runs on the left, views of the chosen runs on the right, both up to date.
import { showActions } from "./actions.js";
import { Unreachable, request } from "./api.js";
import { showControls, showCurves } from "./curves.js";
import { showSweep, shownSweep } from "./sweep.js";
import * as table from "./table.js";
import { showCompare, showEvaluations, showSystem } from "./tables.js";
import { showLog, showSamples } from "./texts.js";
import { MAX_CHOSEN, change, listen, view } from "./view.js";

const POLL_MS = 2000;
const byId = (id) => document.getElementById(id);
const short = (path) => path.slice(path.lastIndexOf("/") + 1);
const runs = new Map(), content = byId("content");
let token = "", shownTab = "";
// Runs of the first request, which is fast, however many there are.
const FIRST_RUNS = 200;

// Choosing runs.
const choose = (paths, tab = view.tab) => change({ run: paths.slice(-MAX_CHOSEN), tab, ...(tab === "sweep" ? {} : { sweep: "" }) });
table.listenToTable({
  only: (path) => choose([path], view.tab === "sweep" ? "curves" : view.tab),
  toggle: (paths) => {
    const isAll = paths.every((path) => view.run.includes(path));
    choose([...view.run.filter((path) => !paths.includes(path)), ...(isAll ? [] : paths)]);
  },
  sweep: (sweep) => change({ sweep, tab: "sweep", brush: {}, objective: "", largest: "", slice: [] }),
});
byId("choose-shown").addEventListener("click", () => choose(table.shownRuns().slice(0, MAX_CHOSEN).map((run) => run.path)));
byId("fold").addEventListener("change", (event) => change({ flat: !event.target.checked }));

function legend() {
  const remove = (path) => choose(view.run.filter((each) => each !== path));
  const item = (path, i) => page.html("li", { title: path }, page.html("i", { class: `f${i % 8}` }), page.html("span", {}, short(path)),
    page.html("button", { type: "button", "aria-label": `Remove ${path}`, onclick: () => remove(path) }, "×"));
  const nothing = () => [page.html("li", { class: "empty" }, "Choose a run, or several with the boxes on the left.")];
  page.update(byId("legend"), view.run, () => (view.run.length ? view.run.map(item) : nothing()));
}

// Tabs. Elements are kept while the content is unchanged, so that the page does not jump while runs train.
const VIEWS = {
  curves: () => showCurves(content), sweep: () => showSweep(content, choose), compare: () => showCompare(content), evaluations: () => showEvaluations(content),
  rollouts: () => showSamples(content), system: () => showSystem(content), log: () => showLog(content),
};
if (!(view.tab in VIEWS)) view.tab = "curves";
const tabs = [...byId("tabs").querySelectorAll("[role=tab]")];
for (const button of tabs) button.addEventListener("click", () => change({ tab: button.dataset.tab }));
byId("tabs").addEventListener("keydown", (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], next = tabs[(tabs.indexOf(document.activeElement) + move + tabs.length) % tabs.length];
  if (move) { next.focus(); change({ tab: next.dataset.tab }); }
});

// Without a server, the last view stays; `poll` reports it.
const refreshLater = () => refresh().catch((error) => { if (!(error instanceof Unreachable)) throw error; });
async function refresh() {
  for (const button of tabs) {
    const isShown = button.dataset.tab === view.tab;
    button.setAttribute("aria-selected", String(isShown));
    button.tabIndex = isShown ? 0 : -1;
  }
  byId("controls").hidden = view.tab !== "curves" && view.tab !== "system";
  showControls();
  legend();
  showActions(runs);
  if (shownTab !== view.tab) content.replaceChildren();
  shownTab = view.tab;
  if (view.run.length || (view.tab === "sweep" && view.sweep)) await VIEWS[view.tab]();
  else content.replaceChildren();
}

// Search: plain words are matched in the browser; conditions use the command-line syntax and go to the server.
const search = byId("search");
let latest = 0, searched = "";
async function find() {
  searched = view.search;
  const parts = view.search.trim().split(/\s+/).filter(Boolean), conditions = parts.filter((part) => /[=<>~]/.test(part));
  const words = parts.filter((part) => !conditions.includes(part)).map((part) => part.toLowerCase());
  const current = ++latest, response = conditions.length ? await request("select", conditions.map((each) => ["condition", each])) : {};
  if (current !== latest) return;
  byId("problem").textContent = response.problem ?? "";
  table.filter(words, response.paths ? new Set(response.paths) : null);
}
search.addEventListener("input", () => change({ search: search.value }));
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); search.focus(); search.select(); }
  if (document.activeElement !== search) return;
  if (event.key === "Escape") { change({ search: "" }); search.value = ""; search.blur(); }
  if (event.key === "ArrowDown" || event.key === "Enter") { event.preventDefault(); byId("rows").focus(); }
});

function statuses() {
  const counts = {};
  for (const run of runs.values()) counts[run.status] = (counts[run.status] ?? 0) + 1;
  const press = (status) => change({ status: view.status === status ? "" : status });
  page.update(byId("statuses"), [counts, view.status], () => ["running", "finished", "failed", "preempted", "pruned", "lost"].filter((status) => counts[status]).map((status) =>
    page.html("button", { type: "button", class: `status ${status}`, "aria-pressed": String(view.status === status), onclick: () => press(status) }, status, page.html("b", {}, counts[status].toLocaleString("en")))));
}

// Columns of the address.
const column = byId("column");
column.addEventListener("focus", async () => {
  const { keys, metrics } = await request("keys");
  byId("keys").replaceChildren(...[...metrics, ...keys].map((key) => page.html("option", { value: key })));
});
column.addEventListener("change", () => {
  const key = column.value.trim();
  if (key && !view.column.includes(key)) change({ column: [...view.column, key] });
});
async function showColumns() {
  table.keepColumns(view.column);
  for (const key of view.column.filter((each) => !table.hasColumn(each))) {
    const response = await request("values", [["key", key]]);
    byId("problem").textContent = response.problem ? `${key}: not found in any run` : "";
    if (response.values) { table.setColumn(key, response.values); column.value = ""; } else change({ column: view.column.filter((each) => each !== key) });
  }
  table.arrange();
}

function faults(lines) {
  byId("faults").hidden = !lines.length;
  byId("faults").textContent = `${lines.length} skipped`;
  page.update(byId("fault-list"), lines, () => lines.map((line) => page.html("li", {}, line)));
  if (!lines.length) byId("fault-list").hidden = true;
}
byId("faults").addEventListener("click", () => { byId("fault-list").hidden = !byId("fault-list").hidden; });
byId("share").addEventListener("click", () => page.copy(byId("share"), location.href, null));

listen((names) => {
  const has = (...each) => each.some((name) => names.includes(name));
  if (has("search") && view.search !== searched) { if (document.activeElement !== search) search.value = view.search; find(); }
  if (has("column")) showColumns();
  if (has("status")) statuses();
  if (has("status", "sort", "up", "open", "flat")) table.arrange();
  if (has("run")) table.render();
  if (!names.length || names.some((name) => !["search", "column", "status", "sort", "up", "open", "flat"].includes(name))) refreshLater();
});

// The newest runs, before all of them are there.
async function showNewest() {
  const { runs: newest, count } = await request("runs", [["newest", FIRST_RUNS]]);
  for (const run of newest) runs.set(run.path, run);
  table.show(runs, count);
  statuses();
  if (!view.run.length && !(view.tab === "sweep" && view.sweep) && newest.length) choose([table.shownRuns()[0].path]);
}

async function poll() {
  try {
    if (!runs.size) await showNewest();
    const response = await request("runs", [["since", token]]);
    if (response.whole) runs.clear();
    for (const run of response.runs) runs.set(run.path, run);
    token = response.token;
    // Deleted runs show only in the count: reload everything.
    if (runs.size !== response.count) { token = ""; runs.clear(); return poll(); }
    const isChanged = (path) => runs.get(path)?.status === "running" || response.runs.some((run) => run.path === path);
    const isFirst = response.whole && !view.run.length && !(view.tab === "sweep" && view.sweep);
    if (response.whole || response.runs.length) { table.show(runs); statuses(); }
    faults(response.faults);
    const known = view.run.filter((path) => runs.has(path));
    if (known.length !== view.run.length) change({ run: known });
    const sweep = shownSweep(), isSweepChanged = view.tab === "sweep" && response.runs.some((run) => table.sweepOf(run.path) === sweep);
    if (isFirst && runs.size) choose([table.shownRuns()[0].path]);
    else if (response.whole || view.tab === "system" || isSweepChanged || view.run.some(isChanged)) await refresh();
    byId("live").className = "live on";
    byId("live").textContent = "live";
  } catch (error) {
    if (!(error instanceof Unreachable)) throw error;
    byId("live").className = "live off";
    byId("live").textContent = "server unreachable";
  }
  return undefined;
}

search.value = view.search;
if (view.search) find();
if (view.column.length) showColumns();
refreshLater();
// An action of the user is shown at once.
let wake = () => {};
document.addEventListener("runs-changed", () => wake());
(async () => {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => { wake = done; setTimeout(done, POLL_MS); });
  }
})();
