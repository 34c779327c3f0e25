// What the page shows, stored in its address: a reload or a shared link shows the same view.
export const MAX_CHOSEN = 64;

const text = (initial = "") => ({ initial, write: (value) => [value], read: (values) => values[0] });
const flag = () => ({ initial: false, write: () => ["1"], read: (values) => values[0] === "1" });
const number = (initial) => ({ initial, write: (value) => [String(value)], read: (values) => Number(values[0]) || initial });
const list = () => ({ initial: [], write: (values) => values, read: (values) => values });
const json = (initial) => ({
  initial,
  write: (value) => [JSON.stringify(value)],
  read: (values) => { try { return JSON.parse(values[0]); } catch { return initial; } },
});

// Names are those of the address.
const FIELDS = {
  run: { ...list(), read: (values) => values.slice(0, MAX_CHOSEN) },
  tab: text("curves"),
  // The list of runs.
  search: text(), status: text(), sort: text("created"), up: flag(), column: list(), open: list(), flat: flag(),
  // Curves.
  x: text("step"), smoothing: number(0), log: flag(), zoom: json(null), group: text(), band: text("minmax"), metrics: text(),
  order: list(), size: json({}), hide: list(),
  // Sweeps.
  sweep: text(), objective: text(), largest: text(), brush: json({}), slice: list(),
  // Samples and logs.
  of: text(), kind: text(), steps: text(), reward: text(), prompt: text(), text: text(), sampling: text("newest"), start: number(0), find: text(),
};
// Part of the layout: also remembered for views whose address does not contain it.
const LAYOUT = ["order", "size", "hide"];

export const view = {};
const listeners = [];
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

function stored() {
  try { return JSON.parse(localStorage.getItem("layout") ?? "{}"); } catch { return {}; }
}

export function address() {
  const parts = Object.entries(FIELDS).flatMap(([name, field]) =>
    (same(view[name], field.initial) ? [] : field.write(view[name]).map((value) => [name, value])));
  return `#${new URLSearchParams(parts)}`;
}

function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1)), layout = stored();
  const hasLayout = LAYOUT.some((name) => parts.has(name));
  for (const [name, field] of Object.entries(FIELDS)) {
    const initial = LAYOUT.includes(name) && !hasLayout ? layout[name] ?? field.initial : field.initial;
    view[name] = parts.has(name) ? field.read(parts.getAll(name)) : structuredClone(initial);
  }
}

// Change the view, its address, and everything that listens.
export function change(changes) {
  Object.assign(view, changes);
  history.replaceState(null, "", address());
  if (LAYOUT.some((name) => name in changes)) {
    try { localStorage.setItem("layout", JSON.stringify(Object.fromEntries(LAYOUT.map((name) => [name, view[name]])))); } catch { /* no storage */ }
  }
  for (const listener of listeners) listener(Object.keys(changes));
}

// `listener(names)` is called after a change with the names of what changed.
export const listen = (listener) => listeners.push(listener);

readAddress();
window.addEventListener("hashchange", () => {
  readAddress();
  for (const listener of listeners) listener(Object.keys(FIELDS));
});
