"use strict";
(() => {
  const MAX_CHOSEN = 8, POLL_MS = 2000;
  const byId = (id) => document.getElementById(id);
  const runs = new Map();
  const state = { token: "", chosen: [], tab: "curves", busy: false, signature: "", asked: {} };
  const short = (path) => path.slice(path.lastIndexOf("/") + 1);
  byId("root").textContent = page.data.root;

  async function request(path, parameters = []) {
    const response = await fetch(`/api/${path}?${new URLSearchParams(parameters)}`);
    return response.json();
  }
  async function post(path, body) {
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    return (await fetch(`/api/${path}`, options)).json();
  }
  const chosenQuery = () => state.chosen.map((path) => ["run", path]);

  // The chosen runs and the tab are stored in the URL, so that a reload or a shared link shows the same view.
  function remember() {
    history.replaceState(null, "", `#${new URLSearchParams([...chosenQuery(), ["tab", state.tab]])}`);
  }
  function recall() {
    const parts = new URLSearchParams(location.hash.slice(1));
    state.chosen = parts.getAll("run").slice(0, MAX_CHOSEN);
    if (byId("tabs").querySelector(`[data-tab="${CSS.escape(parts.get("tab") ?? "")}"]`)) state.tab = parts.get("tab");
  }

  function choose(paths) {
    state.chosen = paths.slice(-MAX_CHOSEN);
    remember();
    table.render();
    legend();
    refresh();
  }
  table.listen({
    chosen: () => state.chosen,
    only: (path) => choose([path]),
    toggle: (path) => choose(state.chosen.includes(path) ? state.chosen.filter((each) => each !== path) : [...state.chosen, path]),
  });

  function legend() {
    const item = (path, i) => page.html("li", { title: path }, page.html("i", { class: `f${i % 8}` }), page.html("span", {}, short(path)),
      page.html("button", { type: "button", "aria-label": `Remove ${path}`, onclick: () => choose(state.chosen.filter((each) => each !== path)) }, "×"));
    const nothing = () => [page.html("li", { class: "empty" }, "Choose a run, or several with the boxes on the left.")];
    page.update(byId("legend"), state.chosen, () => (state.chosen.length ? state.chosen.map(item) : nothing()));
  }

  // Tabs. Elements are kept while the content is unchanged, so that the page does not jump while runs train.
  const content = byId("content"), host = page.html("div", { class: "charts" });
  const group = curves.group(host);
  curves.control(group, 0);

  async function showCurves(isSystem) {
    const response = await request("curves", chosenQuery());
    const charts = curves.decode(response.charts.filter((chart) => chart.system === isSystem));
    const signature = JSON.stringify([state.chosen, isSystem, charts.map((chart) => chart.metric)]);
    if (signature !== state.signature || !host.isConnected) {
      state.signature = signature;
      host.replaceChildren(...charts.map((chart, i) => page.html("figure", { class: i === 0 && !isSystem ? "chart wide" : "chart", "data-metric": chart.metric },
        page.html("figcaption", {}, page.html("h3", {}, chart.title), page.html("output", { class: "readout" })),
        page.html("div", { class: "plot", tabindex: 0, role: "img", "aria-label": `${chart.title} of ${chart.lines.map((line) => line.run).join(", ")}` }))));
      const tiles = isSystem ? [page.html("dl", { class: "tiles", id: "machine" }), page.html("dl", { class: "tiles", id: "devices" }), page.html("div", { id: "profiles" })] : [];
      content.replaceChildren(...tiles, charts.length ? host : page.html("p", { class: "empty" }, "No metrics yet."));
    }
    group.show(charts.map((chart, i) => ({ ...chart, brief: true, lines: chart.lines.map((line) => ({ ...line, name: short(line.run) })), figure: host.children[i] })));
  }

  const share = ([used, total]) => `${page.number(used / 2 ** 30, { trim: true })} of ${page.number(total / 2 ** 30, { trim: true })} GiB`;
  const tile = (label, value, note) => page.html("div", {}, page.html("dt", { title: label }, label), page.html("dd", {}, value, note ? page.html("small", {}, note) : null));

  async function showSystem() {
    const [, machine, compared] = await Promise.all([showCurves(true), request("machine"), request("compare", chosenQuery())]);
    if (!byId("machine")) return;
    byId("machine").replaceChildren(
      tile("Load", String(machine.load), `${machine.processors} processors, this machine`),
      machine.memory ? tile("Memory", `${Math.round((100 * machine.memory[0]) / machine.memory[1])}%`, share(machine.memory)) : "",
      tile("Disk", `${Math.round((100 * machine.disk[0]) / machine.disk[1])}%`, share(machine.disk)),
      ...machine.gpus.map((gpu, i) => tile(`GPU ${i} ${gpu.name}`, `${Math.round(gpu.busy * 100)}%`, share(gpu.memory))));
    byId("devices").replaceChildren(...compared.facts.map((facts) => tile(short(facts.path), facts.devices ?? "?", `${facts.host}, jax ${facts.jax ?? "?"}, commit ${facts.commit || "none"}`)));
    byId("profiles").replaceChildren(...await Promise.all(compared.facts.map(profileOf)));
  }

  // A button that asks a live run for a profile, and the summary of its newest profile.
  async function profileOf(facts) {
    const { profiles } = await request("profiles", [["run", facts.path]]);
    const note = page.html("small", {}, state.asked[facts.path] ?? ""), button = page.html("button", { type: "button" }, "Profile");
    button.addEventListener("click", async () => {
      const answer = await post("profile", { run: facts.path });
      note.textContent = state.asked[facts.path] = answer.problem ?? "requested: shown here after the next steps";
    });
    const parts = [page.html("h3", {}, short(facts.path), " ", ...(facts.status === "running" ? [button, note] : []))];
    if (profiles.length) {
      const [{ name, text, parts: shares, columns, rows }] = profiles;
      const cells = (kind, values) => page.html("tr", {}, ...values.map((value) => page.html(kind, {}, value)));
      const body = page.html("table", {}, page.html("thead", {}, cells("th", columns)), page.html("tbody", {}, ...rows.map((row) => cells("td", row))));
      parts.push(page.html("p", {}, `${name}: ${text}`), page.html("p", {}, shares), body);
    }
    return page.html("section", { class: "profile" }, ...parts);
  }

  function differences(title, runs, entries, isMeasured) {
    const show = (value) => (isMeasured && typeof value === "number" && !Number.isInteger(value) ? page.number(value) : page.cell(value));
    if (!entries.length) return [page.html("h2", {}, title), page.html("p", { class: "empty" }, "No difference.")];
    const head = page.html("tr", {}, page.html("th", {}), ...runs.map((run, i) => page.html("th", { scope: "col" }, page.html("i", { class: `f${i % 8}` }), short(run))));
    const rows = entries.map(({ name, values }) => {
      const numbers = values.filter((value) => typeof value === "number"), best = isMeasured && numbers.length > 1 && /loss|perplexity/.test(name) ? Math.min(...numbers) : null;
      return page.html("tr", {}, page.html("th", { scope: "row" }, name), ...values.map((value) => page.html("td", { class: value === best ? "best" : "" }, show(value))));
    });
    return [page.html("h2", {}, title), page.html("div", { class: "scroll" }, page.html("table", { class: "compare" }, page.html("thead", {}, head), page.html("tbody", {}, ...rows)))];
  }

  async function showCompare() {
    const comparison = await request("compare", chosenQuery());
    const commands = comparison.facts.map((facts) => {
      const code = page.html("code", {}, facts.again), button = page.html("button", { type: "button" }, "Copy");
      button.addEventListener("click", () => page.copy(button, facts.again, code));
      return page.html("div", { class: "command" }, code, button);
    });
    const config = comparison.runs.length > 1 ? differences("Differences in config", comparison.runs, comparison.config, false) : [];
    const code = comparison.runs.length > 1 ? differences("Differences in code and machine", comparison.runs, comparison.surroundings, false) : [];
    page.update(content, comparison, () => [...config, ...differences("Metrics, last values", comparison.runs, comparison.metrics, true), ...code, page.html("h2", {}, "Rerun"), ...commands]);
  }

  async function showLog() {
    const before = content.querySelector("select"), path = before && state.chosen.includes(before.value) ? before.value : state.chosen[state.chosen.length - 1];
    const { text } = await request("log", [["run", path]]);
    const atEnd = !content.querySelector(".log") || content.scrollTop + content.clientHeight > content.scrollHeight - 40;
    const choice = () => page.html("select", { "aria-label": "Log of", onchange: () => refresh() }, ...state.chosen.map((each) => page.html("option", { value: each, selected: each === path }, each)));
    page.update(content, [path, text, state.chosen], () => [page.html("div", { class: "log-choice" }, choice()), page.html("pre", { class: "log" }, text || "Nothing was logged.")]);
    if (atEnd) content.scrollTop = content.scrollHeight;
  }

  // Rollouts of one run: the filters are kept while the list below them is replaced.
  const filters = { kind: "eval", steps: "", reward: "", prompt: "", text: "", order: "newest" };
  const PAGE = 20;
  let filterForm = null, rolloutStart = 0;
  function makeFilters() {
    const change = (event) => { filters[event.target.name] = event.target.value; rolloutStart = 0; refresh(); };
    const choice = (name, values) => page.html("select", { name, "aria-label": name, onchange: change }, ...values.map((value) => page.html("option", { value, selected: filters[name] === value }, value)));
    const field = (name, placeholder) => page.html("input", { name, placeholder, value: filters[name], "aria-label": placeholder, autocomplete: "off", spellcheck: false, onchange: change });
    return page.html("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
      page.html("select", { name: "run", "aria-label": "Rollouts of", onchange: () => { rolloutStart = 0; refresh(); } }), choice("kind", ["eval", "train"]), choice("order", ["newest", "oldest", "best", "worst"]),
      field("steps", "Steps, 10:20"), field("reward", "Reward, 0.5:1"), field("prompt", "Prompt number"), field("text", "Text"));
  }

  function rollout(record) {
    const only = page.html("button", { type: "button", class: "quiet", onclick: () => { filters.prompt = String(record.prompt_number); filters.order = "oldest"; filterForm = null; rolloutStart = 0; refresh(); } }, "This prompt over steps");
    return page.html("article", { class: "rollout" }, page.html("p", { class: "about" }, record.about, only), page.html("pre", { class: "prompt" }, record.prompt ?? ""), page.html("pre", {}, record.completion),
      record.expected == null ? null : page.html("p", { class: "about" }, `expected: ${record.expected}`));
  }

  async function showRollouts() {
    filterForm ??= makeFilters();
    const select = filterForm.elements.run, path = state.chosen.includes(select.value) ? select.value : state.chosen[state.chosen.length - 1];
    select.replaceChildren(...state.chosen.map((each) => page.html("option", { value: each, selected: each === path }, each)));
    const query = Object.entries(filters).filter(([, value]) => value !== "");
    const response = await request("rollouts", [["run", path], ["start", rolloutStart], ["limit", PAGE], ...query]);
    if (response.kinds?.length === 1 && response.kinds[0] !== filters.kind) { filters.kind = response.kinds[0]; filterForm = null; return showRollouts(); }
    const list = content.querySelector("#rollouts") ?? page.html("div", { id: "rollouts" });
    if (!filterForm.isConnected) content.replaceChildren(filterForm, list);
    page.update(list, response, () => {
      if (response.problem) return [page.html("p", { role: "alert" }, response.problem)];
      if (!response.kinds.length) return [page.html("p", { class: "empty" }, "This run has no rollouts; task=grpo writes them.")];
      const last = rolloutStart + response.records.length, move = (start, text, on) => page.html("button", { type: "button", disabled: !on, onclick: () => { rolloutStart = start; refresh(); } }, text);
      const pager = page.html("p", { class: "pager" }, move(rolloutStart - PAGE, "Previous", rolloutStart > 0), `${response.records.length ? rolloutStart + 1 : 0} to ${last} of ${response.total ?? "more"}`, move(last, "Next", response.total === null || last < response.total));
      return [pager, ...response.records.map(rollout)];
    });
  }

  const VIEWS = { curves: () => showCurves(false), system: showSystem, compare: showCompare, rollouts: showRollouts, log: showLog };
  async function refresh() {
    for (const button of byId("tabs").querySelectorAll("[role=tab]")) button.setAttribute("aria-selected", String(button.dataset.tab === state.tab));
    byId("controls").hidden = state.tab !== "curves" && state.tab !== "system";
    if (!state.chosen.length) { state.signature = ""; content.replaceChildren(); return; }
    await VIEWS[state.tab]();
  }
  for (const button of byId("tabs").querySelectorAll("[role=tab]")) button.addEventListener("click", () => { state.tab = button.dataset.tab; state.signature = ""; content.replaceChildren(); remember(); refresh(); });

  // Search: plain words are matched in the browser; conditions use the command-line syntax and go to the server.
  const search = byId("search");
  let latest = 0;
  async function find() {
    const parts = search.value.trim().split(/\s+/).filter(Boolean), conditions = parts.filter((part) => /[=<>~]/.test(part));
    table.state.words = parts.filter((part) => !conditions.includes(part)).map((part) => part.toLowerCase());
    const current = ++latest, response = conditions.length ? await request("select", conditions.map((each) => ["condition", each])) : {};
    if (current !== latest) return;
    byId("problem").textContent = response.problem ?? "";
    table.state.allowed = response.paths ? new Set(response.paths) : null;
    table.state.here = 0;
    table.arrange();
  }
  search.addEventListener("input", find);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); search.focus(); search.select(); }
    if (document.activeElement !== search) return;
    if (event.key === "Escape") { search.value = ""; find(); search.blur(); }
    if (event.key === "ArrowDown" || event.key === "Enter") { event.preventDefault(); byId("rows").focus(); }
  });

  function statuses() {
    const counts = {};
    for (const run of runs.values()) counts[run.status] = (counts[run.status] ?? 0) + 1;
    const press = (status) => { table.state.status = table.state.status === status ? null : status; statuses(); table.arrange(); };
    page.update(byId("statuses"), [counts, table.state.status], () => ["running", "finished", "failed", "preempted", "pruned", "lost"].filter((status) => counts[status]).map((status) =>
      page.html("button", { type: "button", class: `status ${status}`, "aria-pressed": String(table.state.status === status), onclick: () => press(status) }, status, page.html("b", {}, counts[status].toLocaleString("en")))));
  }

  const column = byId("column");
  column.addEventListener("focus", async () => {
    const { keys, metrics } = await request("keys");
    byId("keys").replaceChildren(...[...metrics, ...keys].map((key) => page.html("option", { value: key })));
  });
  column.addEventListener("change", async () => {
    const key = column.value.trim(), response = key ? await request("values", [["key", key]]) : {};
    byId("problem").textContent = response.problem ? `${key}: not found in any run` : "";
    if (response.values) { table.addColumn(key, response.values); column.value = ""; }
  });

  function faults(lines) {
    byId("faults").hidden = !lines.length;
    byId("faults").textContent = `${lines.length} skipped`;
    page.update(byId("fault-list"), lines, () => lines.map((line) => page.html("li", {}, line)));
    if (!lines.length) byId("fault-list").hidden = true;
  }
  byId("faults").addEventListener("click", () => (byId("fault-list").hidden = !byId("fault-list").hidden));

  async function poll() {
    try {
      const response = await request("runs", [["since", state.token]]);
      if (response.whole) runs.clear();
      for (const run of response.runs) runs.set(run.path, run);
      state.token = response.token;
      // Deleted runs show only in the count: reload everything.
      if (runs.size !== response.count) { state.token = ""; runs.clear(); return poll(); }
      const isFirst = !table.state.shown.length && !state.chosen.length;
      state.chosen = state.chosen.filter((path) => runs.has(path));
      const unchanged = !response.whole && !response.runs.length;
      if (!unchanged) { table.show(runs); statuses(); }
      faults(response.faults);
      if (isFirst && table.state.shown.length) choose([table.state.shown[0].path]);
      else if (response.whole || state.chosen.some((path) => runs.get(path).status === "running" || response.runs.some((run) => run.path === path)) || state.tab === "system") { legend(); await refresh(); }
      byId("live").className = "live on";
      byId("live").textContent = "live";
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      byId("live").className = "live off";
      byId("live").textContent = "server unreachable";
    }
    return undefined;
  }

  recall();
  legend();
  (async () => { for (;;) { if (!document.hidden) await poll(); await new Promise((done) => setTimeout(done, POLL_MS)); } })();
})();
