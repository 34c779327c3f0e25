// The list of runs: filtering, sorting, sweeps as folds, and virtual scrolling (only visible rows are rendered).
import { change, view } from "./view.js";

const HEIGHT = 33, OVERSCAN = 10;
// Columns marked wide are hidden if the table is narrower than this.
const WIDE_MIN_WIDTH = 740, NARROW = 480;
const STATUSES = ["running", "finished", "failed", "preempted", "pruned", "lost"];

const age = (created) => {
  const seconds = Math.max(0, (Date.now() - Date.parse(created)) / 1000);
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "m"]]) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  return `${Math.floor(seconds)} s`;
};
const steps = (run) => {
  const share = run.steps ? Math.min(1, (run.step ?? 0) / run.steps) : 1;
  const bar = run.status === "running" || share < 1 ? page.html("progress", { max: 1, value: share, "aria-label": "Progress" }) : null;
  return [page.html("span", {}, run.step === null ? "" : run.step.toLocaleString("en")), bar];
};
const name = (run) => {
  // Names of a sweep's runs differ at the end, so long names are truncated in the middle.
  const cut = run.path.lastIndexOf("/") + 1, tail = Math.max(cut, run.path.length - 16);
  const front = page.html("span", { class: "front" }, page.html("i", {}, run.path.slice(0, cut)), run.path.slice(cut, tail));
  const tags = run.tags.map((tag) => page.html("span", { class: "tag" }, tag));
  return [page.html("div", {}, front, page.html("span", {}, run.path.slice(tail)), ...tags)];
};
const figure = (value) => [value === null || value === undefined ? "" : page.number(value)];
const status = (run) => [page.html("span", { class: `status ${run.status}`, title: run.reason ?? "" }, run.status)];
export const sweepOf = (path) => path.slice(0, Math.max(0, path.lastIndexOf("/")));
// A running run shows the current value of its objective.
const objective = (run) => run.value ?? run.metrics[run.objective ?? "eval/loss"];

const columns = [
  { key: "path", title: "Run", of: (run) => run.path, show: name, class: "run", width: "auto" },
  { key: "status", title: "Status", of: (run) => run.status, show: status, width: 96 },
  { key: "value", title: "Objective", of: objective, show: (run) => figure(objective(run)), right: true, width: 98 },
  { key: "loss", title: "Loss", of: (run) => run.metrics.loss, show: (run) => figure(run.metrics.loss), right: true, width: 70, wide: true },
  { key: "step", title: "Step", of: (run) => run.step, show: steps, class: "steps", right: true, width: 76, narrow: true },
  { key: "speed", title: "Tok/s", of: (run) => run.metrics.tokens_per_second, show: (run) => figure(run.metrics.tokens_per_second), right: true, width: 76, wide: true },
  { key: "seconds", title: "Time", of: (run) => run.seconds, show: (run) => [page.duration(run.seconds)], right: true, width: 88, wide: true },
  { key: "created", title: "Age", of: (run) => run.created, show: (run) => [age(run.created)], right: true, width: 58, narrow: true },
];
const scroller = document.getElementById("rows"), head = document.getElementById("head"), body = document.getElementById("body");
// `items` are the rows of the list: runs, and sweeps as { sweep, runs }.
const state = { words: [], allowed: null, found: [], items: [], here: 0, extra: new Map() };
// `count` is the number of all runs, also of those that have not arrived yet.
let runs = new Map(), count = 0, events = {};

// Columns added by the user follow the result.
const isVisible = (column) => (!column.wide || scroller.clientWidth >= WIDE_MIN_WIDTH) && (!column.narrow || scroller.clientWidth >= NARROW);
const all = () => [...columns.slice(0, 3), ...state.extra.values(), ...columns.slice(3).filter(isVisible)];

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === "string" && typeof b === "string" && a.length === 20 && a.endsWith("Z")) return a < b ? -1 : a > b ? 1 : 0;
  return collator.compare(String(a), String(b));
}
const collator = new Intl.Collator("en", { numeric: true });

export function arrange() {
  const column = all().find((each) => each.key === view.sort) ?? columns[0];
  const text = (run) => `${run.path} ${run.status} ${run.model} ${run.task} ${run.tags.join(" ")} ${run.notes}`.toLowerCase();
  const isFound = (run) => (!view.status || run.status === view.status) && (!state.allowed || state.allowed.has(run.path))
    && (!state.words.length || state.words.every((word) => text(run).includes(word)));
  const keyed = [...runs.values()].filter(isFound).map((run) => [column.of(run), run]);
  const has = ([value]) => value !== null && value !== undefined, sign = view.up ? 1 : -1;
  const sorted = keyed.filter(has).sort(([a], [b]) => sign * compare(a, b));
  state.found = [...sorted, ...keyed.filter((entry) => !has(entry))].map(([, run]) => run);
  state.items = fold(state.found);
  const total = count.toLocaleString("en"), found = state.found.length.toLocaleString("en");
  document.getElementById("count").textContent = state.found.length === runs.size ? `${total} runs` : `${found} of ${total} runs`;
  document.getElementById("fold").checked = !view.flat;
  header();
  render();
}

// A sweep of several runs is one row, at the place of its first run, followed by its runs if it is open.
function fold(found) {
  const isFiltered = state.words.length || state.allowed || view.status;
  if (view.flat || isFiltered) return found;
  const sweeps = new Map();
  for (const run of found) {
    const sweep = sweepOf(run.path);
    if (sweep) sweeps.has(sweep) ? sweeps.get(sweep).push(run) : sweeps.set(sweep, [run]);
  }
  const seen = new Set();
  return found.flatMap((run) => {
    const sweep = sweepOf(run.path), members = sweeps.get(sweep) ?? [];
    if (members.length < 2) return [run];
    if (seen.has(sweep)) return [];
    seen.add(sweep);
    return [{ sweep, runs: members }, ...(view.open.includes(sweep) ? members : [])];
  });
}

let drawnHead = "";
function header() {
  // Unchanged elements are kept, so that clicks are not lost.
  const now = JSON.stringify([view.sort, view.up, scroller.clientWidth, all().map((column) => column.key)]);
  if (now === drawnHead) return;
  drawnHead = now;
  const cells = all().map((column) => {
    const sort = view.sort === column.key ? (view.up ? "ascending" : "descending") : null;
    const toggle = () => change({ up: view.sort === column.key ? !view.up : column.key !== "created", sort: column.key });
    const button = page.html("button", { type: "button", title: column.title, onclick: toggle, "data-sort": column.key }, column.title);
    const remove = () => change({ column: view.column.filter((key) => key !== column.key) });
    const drop = column.extra ? page.html("button", { type: "button", class: "drop", "aria-label": `Remove ${column.title}`, onclick: remove }, "×") : null;
    const cell = page.html("th", { scope: "col", "aria-sort": sort, class: `${column.right ? "right" : ""} ${column.extra ? "extra" : ""}` }, drop ? page.html("div", {}, button, drop) : button);
    cell.style.width = column.width === "auto" ? "" : `${column.width}px`;
    return cell;
  });
  const pick = page.html("th", { "aria-label": "Chosen" });
  pick.style.width = "30px";
  head.replaceChildren(pick, ...cells);
  // The name column takes the remaining width, with a minimum that keeps names distinguishable.
  const rest = all().reduce((sum, column) => sum + (column.width === "auto" ? 0 : column.width), 30);
  const width = Math.max(120, scroller.clientWidth - rest);
  cells[0].style.width = `${width}px`;
  head.closest("table").style.width = `${width + rest}px`;
}

let drawnRows = new Map();
function row(item, index) {
  const isHere = index === state.here, key = item.sweep ?? item.path;
  const chosen = item.sweep ? item.runs.filter((run) => view.run.includes(run.path)).length : view.run.indexOf(item.path);
  const isOpen = item.sweep && view.open.includes(item.sweep);
  const now = JSON.stringify([item, chosen, isHere, isOpen, index, item.sweep ? 0 : age(item.created), drawnHead]), before = drawnRows.get(key);
  if (before && before.now === now) return before;
  return { now, node: item.sweep ? sweepRow(item, index, chosen, isHere, isOpen) : runRow(item, index, chosen, isHere) };
}

const swatch = (look, isOn, label, onclick) => page.html("button", {
  type: "button", class: `swatch ${look}`, role: "checkbox", "aria-checked": isOn, "aria-label": label, tabindex: -1,
  onclick: (event) => { event.stopPropagation(); onclick(); },
});

function runRow(run, index, place, isHere) {
  const box = swatch(place < 0 ? "" : `f${place % 8}`, String(place >= 0), `Choose ${run.path}`, () => events.toggle([run.path]));
  const cells = all().map((column) => {
    const content = column.show ? column.show(run) : [page.cell(column.of(run))];
    return page.html("td", { class: `${column.class ?? ""} ${column.right ? "right" : ""}`, title: column.key === "path" ? `${run.path}${run.notes ? ` — ${run.notes}` : ""}` : null }, ...content);
  });
  const choose = (event) => { state.here = index; if (event.ctrlKey || event.metaKey || event.shiftKey) events.toggle([run.path]); else events.only(run.path); };
  const isInside = state.items[index - 1] && sweepOf(run.path) && view.open.includes(sweepOf(run.path));
  return page.html("tr", { class: `${place < 0 ? "" : "chosen"} ${isHere ? "here" : ""} ${isInside ? "inside" : ""}`, "data-run": run.path, onclick: choose }, page.html("td", { class: "pick" }, box), ...cells);
}

function sweepRow({ sweep, runs: members }, index, chosen, isHere, isOpen) {
  const paths = members.map((run) => run.path), isAll = chosen === members.length;
  const box = swatch(chosen ? "f7" : "", isAll ? "true" : chosen ? "mixed" : "false", `Choose all runs of ${sweep}`, () => events.toggle(paths));
  const counts = STATUSES.map((each) => [each, members.filter((run) => run.status === each).length]).filter(([, count]) => count);
  const values = members.map(objective).filter((value) => typeof value === "number");
  const toggle = () => change({ open: isOpen ? view.open.filter((each) => each !== sweep) : [...view.open, sweep] });
  const dots = page.html("span", { class: "counts" }, ...counts.map(([each, count]) => page.html("span", { class: `status ${each}`, title: `${count} ${each}` }, count)));
  const show = page.html("button", { type: "button", class: "quiet", onclick: (event) => { event.stopPropagation(); events.sweep(sweep); } }, "Open sweep");
  const cells = all().map((column) => {
    const ends = [Math.min(...values), Math.max(...values)].map((value) => page.number(value));
    const range = column.key === "value" && values.length ? [page.html("span", { title: "smallest to largest" }, [...new Set(ends)].join(" – "))] : [];
    if (column.key === "path") return page.html("td", { class: "run" }, page.html("div", {}, page.html("span", { class: "twist", "aria-hidden": "true" }, isOpen ? "▾" : "▸"), page.html("span", { class: "front" }, sweep), page.html("i", {}, ` ${members.length} runs`), page.html("span", { class: "grow" }), show));
    return page.html("td", { class: column.right ? "right" : "" }, ...(column.key === "status" ? [dots] : range));
  });
  return page.html("tr", { class: `sweep ${isHere ? "here" : ""}`, "data-sweep": sweep, "aria-expanded": String(isOpen), onclick: () => { state.here = index; toggle(); } }, page.html("td", { class: "pick" }, box), ...cells);
}

function spacer(height) {
  const cell = page.html("td", { colspan: all().length + 1 });
  cell.style.height = `${height}px`;
  return page.html("tr", { class: "space", "aria-hidden": "true" }, cell);
}

export function render() {
  const first = Math.max(0, Math.floor(scroller.scrollTop / HEIGHT) - OVERSCAN);
  const last = Math.min(state.items.length, first + Math.ceil(scroller.clientHeight / HEIGHT) + 2 * OVERSCAN);
  const seen = state.items.slice(first, last);
  drawnRows = new Map(seen.map((item, i) => [item.sweep ?? item.path, row(item, first + i)]));
  const nodes = [...drawnRows.values()].map((each) => each.node), same = body.querySelectorAll("[data-run], [data-sweep]");
  const spaces = [first * HEIGHT, (state.items.length - last) * HEIGHT], at = String(spaces);
  if (body.dataset.at === at && same.length === nodes.length && nodes.every((node, i) => node === same[i])) return;
  body.dataset.at = at;
  body.replaceChildren(...(spaces[0] ? [spacer(spaces[0])] : []), ...nodes, ...(spaces[1] > 0 ? [spacer(spaces[1])] : []));
}

function moveTo(index) {
  state.here = Math.min(state.items.length - 1, Math.max(0, index));
  const top = state.here * HEIGHT;
  if (top < scroller.scrollTop) scroller.scrollTop = top;
  else if (top + 2 * HEIGHT > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + 2 * HEIGHT - scroller.clientHeight;
  render();
}

scroller.addEventListener("scroll", render, { passive: true });
scroller.addEventListener("keydown", (event) => {
  const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key], item = state.items[state.here];
  if (move) { event.preventDefault(); moveTo(state.here + move); return; }
  if (!item || !["Enter", " ", "ArrowRight", "ArrowLeft"].includes(event.key)) return;
  event.preventDefault();
  const open = view.open.filter((each) => each !== item.sweep);
  if (event.key === " ") events.toggle(item.sweep ? item.runs.map((run) => run.path) : [item.path]);
  else if (event.key === "ArrowLeft" && item.sweep) change({ open });
  else if (event.key === "ArrowRight" && item.sweep) change({ open: [...open, item.sweep] });
  else if (event.key === "Enter") { if (item.sweep) events.sweep(item.sweep); else events.only(item.path); }
});
new ResizeObserver(() => { header(); render(); }).observe(scroller);

// Values of a column by run path.
export function setColumn(key, values) {
  const right = Object.values(values).every((value) => typeof value === "number");
  const title = key.includes(".") ? key.slice(key.lastIndexOf(".") + 1) : key;
  state.extra.set(key, { key, title, of: (run) => values[run.path], right, width: 104, extra: true });
}
export function keepColumns(keys) {
  for (const key of state.extra.keys()) if (!keys.includes(key)) state.extra.delete(key);
}
export const hasColumn = (key) => state.extra.has(key);
export const filter = (words, allowed) => { Object.assign(state, { words, allowed, here: 0 }); arrange(); };
export const shownRuns = () => state.found;
export const show = (next, total = next.size) => { runs = next; count = total; arrange(); };
export const listenToTable = (handlers) => { events = handlers; };
