"use strict";
// The table of runs: filtering, sorting, and virtual scrolling (only visible rows are rendered).
const table = (() => {
  const HEIGHT = 33, OVERSCAN = 10;
  const age = (created) => {
    const seconds = Math.max(0, (Date.now() - Date.parse(created)) / 1000);
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "m"]]) if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
    return `${Math.floor(seconds)} s`;
  };
  const steps = (run) => {
    const share = run.steps ? Math.min(1, (run.step ?? 0) / run.steps) : 1;
    const bar = run.status === "running" || share < 1 ? page.html("progress", { max: 1, value: share }) : null;
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
  // A running run shows the current value of its objective.
  const objective = (run) => run.value ?? run.metrics[run.objective ?? "eval/loss"];
  // Columns marked wide are hidden if the table is narrower than this.
  const WIDE_MIN_WIDTH = 740;
  const columns = [
    { key: "path", title: "Run", of: (run) => run.path, show: name, class: "run", width: "auto" },
    { key: "status", title: "Status", of: (run) => run.status, show: (run) => [page.html("span", { class: `status ${run.status}`, title: run.reason ?? "" }, run.status)], width: 96 },
    { key: "value", title: "Objective", of: objective, show: (run) => figure(objective(run)), right: true, width: 98 },
    { key: "loss", title: "Loss", of: (run) => run.metrics.loss, show: (run) => figure(run.metrics.loss), right: true, width: 70, wide: true },
    { key: "step", title: "Step", of: (run) => run.step, show: steps, class: "steps", right: true, width: 76 },
    { key: "speed", title: "Tok/s", of: (run) => run.metrics.tokens_per_second, show: (run) => figure(run.metrics.tokens_per_second), right: true, width: 76, wide: true },
    { key: "seconds", title: "Time", of: (run) => run.seconds, show: (run) => [page.duration(run.seconds)], right: true, width: 88, wide: true },
    { key: "created", title: "Age", of: (run) => run.created, show: (run) => [age(run.created)], right: true, width: 58 },
  ];
  const state = { words: [], allowed: null, status: null, sort: "created", down: true, shown: [], here: 0, extra: [] };
  const scroller = document.getElementById("rows"), head = document.getElementById("head"), body = document.getElementById("body");
  let runs = new Map(), events = {};

  // Columns added by the user follow the result.
  const all = () => [...columns.slice(0, 3), ...state.extra, ...columns.slice(3).filter((column) => !column.wide || scroller.clientWidth >= WIDE_MIN_WIDTH)];

  function compare(a, b) {
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), "en", { numeric: true });
  }

  function arrange() {
    const column = all().find((each) => each.key === state.sort) ?? columns[0];
    const text = (run) => `${run.path} ${run.status} ${run.model} ${run.task} ${run.tags.join(" ")} ${run.notes}`.toLowerCase();
    const found = [...runs.values()].filter((run) =>
      (!state.status || run.status === state.status) && (!state.allowed || state.allowed.has(run.path)) && state.words.every((word) => text(run).includes(word)));
    const has = (run) => { const value = column.of(run); return value !== null && value !== undefined; };
    const sign = state.down ? -1 : 1;
    state.shown = [...found.filter(has).sort((a, b) => sign * compare(column.of(a), column.of(b))), ...found.filter((run) => !has(run))];
    document.getElementById("count").textContent = found.length === runs.size ? `${runs.size.toLocaleString("en")} runs` : `${found.length.toLocaleString("en")} of ${runs.size.toLocaleString("en")} runs`;
    header();
    render();
  }

  let drawnHead = "";
  function header() {
    // Unchanged elements are kept, so that clicks are not lost.
    const now = JSON.stringify([state.sort, state.down, scroller.clientWidth, all().map((column) => column.key)]);
    if (now === drawnHead) return;
    drawnHead = now;
    const cells = all().map((column) => {
      const sort = state.sort === column.key ? (state.down ? "descending" : "ascending") : null;
      const toggleSort = () => { state.down = state.sort === column.key ? !state.down : column.key === "created"; state.sort = column.key; arrange(); };
      const button = page.html("button", { type: "button", title: column.title, onclick: toggleSort, "data-sort": column.key }, column.title);
      const drop = column.extra ? page.html("button", { type: "button", class: "drop", "aria-label": `Remove ${column.title}`, onclick: () => { state.extra = state.extra.filter((each) => each !== column); arrange(); } }, "×") : null;
      const cell = page.html("th", { scope: "col", "aria-sort": sort, class: `${column.right ? "right" : ""} ${column.extra ? "extra" : ""}` }, drop ? page.html("div", {}, button, drop) : button);
      cell.style.width = column.width === "auto" ? "" : `${column.width}px`;
      return cell;
    });
    const pick = page.html("th", { "aria-label": "Chosen" });
    pick.style.width = "30px";
    head.replaceChildren(pick, ...cells);
    // The name column takes the remaining width, with a minimum that keeps names distinguishable.
    const rest = all().reduce((sum, column) => sum + (column.width === "auto" ? 0 : column.width), 30);
    const width = Math.max(200, scroller.clientWidth - rest);
    cells[0].style.width = `${width}px`;
    head.closest("table").style.width = `${width + rest}px`;
  }

  let drawnRows = new Map();
  function row(run, index, chosen) {
    const place = chosen.indexOf(run.path), isHere = index === state.here;
    const now = JSON.stringify([run, place, isHere, index, age(run.created), drawnHead]), before = drawnRows.get(run.path);
    return before && before.now === now ? before : { now, node: makeRow(run, index, place, isHere) };
  }

  function makeRow(run, index, place, isHere) {
    const toggle = (event) => { event.stopPropagation(); events.toggle(run.path); };
    const swatch = page.html("button", { type: "button", class: `swatch ${place < 0 ? "" : `f${place % 8}`}`, role: "checkbox", "aria-checked": String(place >= 0), "aria-label": `Choose ${run.path}`, tabindex: -1, onclick: toggle });
    const cells = all().map((column) => {
      const content = column.show ? column.show(run) : [page.cell(column.of(run))];
      return page.html("td", { class: `${column.class ?? ""} ${column.right ? "right" : ""}`, title: column.key === "path" ? `${run.path}${run.notes ? ` — ${run.notes}` : ""}` : null }, ...content);
    });
    const choose = (event) => { state.here = index; if (event.ctrlKey || event.metaKey || event.shiftKey) events.toggle(run.path); else events.only(run.path); };
    return page.html("tr", { class: `${place < 0 ? "" : "chosen"} ${isHere ? "here" : ""}`, "data-run": run.path, onclick: choose }, page.html("td", { class: "pick" }, swatch), ...cells);
  }

  function spacer(height) {
    const cell = page.html("td", { colspan: all().length + 1 });
    cell.style.height = `${height}px`;
    return page.html("tr", { class: "space", "aria-hidden": "true" }, cell);
  }

  function render() {
    const first = Math.max(0, Math.floor(scroller.scrollTop / HEIGHT) - OVERSCAN);
    const last = Math.min(state.shown.length, first + Math.ceil(scroller.clientHeight / HEIGHT) + 2 * OVERSCAN);
    const chosen = events.chosen ? events.chosen() : [];
    const seen = state.shown.slice(first, last);
    drawnRows = new Map(seen.map((run, i) => [run.path, row(run, first + i, chosen)]));
    const nodes = [...drawnRows.values()].map((each) => each.node), same = body.querySelectorAll("[data-run]");
    const spaces = [first * HEIGHT, (state.shown.length - last) * HEIGHT], at = String(spaces);
    if (body.dataset.at === at && same.length === nodes.length && nodes.every((node, i) => node === same[i])) return;
    body.dataset.at = at;
    body.replaceChildren(...(spaces[0] ? [spacer(spaces[0])] : []), ...nodes, ...(spaces[1] > 0 ? [spacer(spaces[1])] : []));
  }

  scroller.addEventListener("scroll", render, { passive: true });
  scroller.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15 }[event.key];
    const run = state.shown[state.here];
    if (move) {
      event.preventDefault();
      state.here = Math.min(state.shown.length - 1, Math.max(0, state.here + move));
      const top = state.here * HEIGHT;
      if (top < scroller.scrollTop) scroller.scrollTop = top;
      else if (top + 2 * HEIGHT > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + 2 * HEIGHT - scroller.clientHeight;
      render();
    } else if (event.key === " " && run) { event.preventDefault(); events.toggle(run.path); } else if (event.key === "Enter" && run) events.only(run.path);
  });
  new ResizeObserver(() => { header(); render(); }).observe(scroller);

  function addColumn(key, values) {
    if (all().some((column) => column.key === key)) return;
    const right = Object.values(values).every((value) => typeof value === "number");
    state.extra.push({ key, title: key.includes(".") ? key.slice(key.lastIndexOf(".") + 1) : key, of: (run) => values[run.path], right, width: 104, extra: true });
    arrange();
  }

  return { state, arrange, render, addColumn, show: (next) => { runs = next; arrange(); }, listen: (handlers) => { events = handlers; } };
})();
