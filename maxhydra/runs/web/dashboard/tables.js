// Tables of the chosen runs: comparison, evaluations, and the machine.
import { act, request } from "./api.js";
import { chosenQuery, showCurves } from "./curves.js";
import { view } from "./view.js";

const short = (path) => path.slice(path.lastIndexOf("/") + 1);
const colour = (path) => `f${view.run.indexOf(path) % 8}`;
const runHead = (path) => page.html("th", { scope: "col", title: path }, page.html("i", { class: colour(path) }), short(path));
const grid = (head, rows) => page.html("div", { class: "scroll", tabindex: 0 }, page.html("table", { class: "compare" }, page.html("thead", {}, page.html("tr", {}, page.html("th"), ...head)), page.html("tbody", {}, ...rows)));
const line = (name, cells) => page.html("tr", {}, page.html("th", { scope: "row" }, name), ...cells);
const empty = (text) => page.html("p", { class: "empty" }, text);

function differences(title, runs, entries, isMeasured) {
  const show = (value) => (isMeasured && typeof value === "number" && !Number.isInteger(value) ? page.number(value) : page.cell(value));
  if (!entries.length) return [page.html("h2", {}, title), empty("No difference.")];
  const rows = entries.map(({ name, values }) => {
    const numbers = values.filter((value) => typeof value === "number"), best = isMeasured && numbers.length > 1 && /loss|perplexity/.test(name) ? Math.min(...numbers) : null;
    return line(name, values.map((value) => page.html("td", { class: value === best ? "best" : "" }, show(value))));
  });
  return [page.html("h2", {}, title), grid(runs.map(runHead), rows)];
}

export async function showCompare(content) {
  const comparison = await request("compare", chosenQuery());
  if (view.tab !== "compare") return;
  const commands = comparison.facts.map((facts) => {
    const code = page.html("code", {}, facts.again), button = page.html("button", { type: "button" }, "Copy");
    button.addEventListener("click", () => page.copy(button, facts.again, code));
    return page.html("div", { class: "command" }, code, button);
  });
  const isSeveral = comparison.runs.length > 1, of = (title, name) => (isSeveral ? differences(title, comparison.runs, comparison[name], false) : []);
  page.update(content, comparison, () => [...of("Differences in config", "config"), ...differences("Metrics, last values", comparison.runs, comparison.metrics, true),
    ...of("Differences in code and machine", "surroundings"), page.html("h2", {}, "Rerun"), ...commands]);
}

// A metric and its standard error are one cell.
const ERROR = "_stderr";
function withError(metrics, name, at) {
  const value = metrics[name]?.[at], error = metrics[`${name}${ERROR}`]?.[at];
  return value === null || value === undefined ? "" : `${page.number(value)}${typeof error === "number" ? ` ± ${page.number(error, { trim: true })}` : ""}`;
}

// Of one run, its evaluations over steps; of several, the last one of each.
export async function showEvaluations(content) {
  const response = await request("evaluations", chosenQuery());
  if (view.tab !== "evaluations") return;
  page.update(content, response, () => {
    const { runs } = response, names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].filter((name) => !name.endsWith(ERROR)).sort();
    if (!names.length) return [empty("No evaluations yet: train.eval_every, or task=eval.")];
    const head = runs.length === 1 ? runs[0].steps.map((step) => page.html("th", { scope: "col" }, `step ${step.toLocaleString("en")}`)) : runs.map((run) => runHead(run.path));
    const cells = (name) => (runs.length === 1 ? runs[0].steps.map((_, at) => withError(runs[0].metrics, name, at)) : runs.map((run) => lastValue(run, name)));
    const table = grid(head, names.map((name) => line(name, cells(name).map((text) => page.html("td", {}, text)))));
    const maps = runs.flatMap((run) => run.grids.map((each) => heatMap(each, runs.length > 1 ? `${short(run.path)}: ${each.title}` : each.title)));
    return [page.html("h2", {}, runs.length === 1 ? `Evaluations of ${runs[0].path}` : "Last evaluation of each run"), table, ...maps];
  });
}

function lastValue(run, name) {
  const values = run.metrics[name] ?? [];
  for (let at = values.length - 1; at >= 0; at--) if (values[at] !== null) return withError(run.metrics, name, at);
  return "";
}

// Accuracy by context length (columns) and depth (rows).
function heatMap({ cells }, title) {
  const lengths = [...new Set(cells.map(([length]) => length))].sort((a, b) => a - b), depths = [...new Set(cells.map(([, depth]) => depth))].sort((a, b) => a - b);
  const value = (length, depth) => cells.find(([l, d]) => l === length && d === depth)?.[2];
  const rows = depths.map((depth) => line(`depth ${page.cell(depth)}`, lengths.map((length) => {
    const found = value(length, depth), cell = page.html("td", {}, found === undefined ? "" : page.number(found, { percent: true, trim: true }));
    if (found !== undefined) cell.style.background = `color-mix(in oklab, var(--accent) ${Math.round(found * 60)}%, transparent)`;
    return cell;
  })));
  return page.html("section", { class: "panel" }, page.html("h2", {}, title), grid(lengths.map((length) => page.html("th", { scope: "col" }, `${length.toLocaleString("en")} tokens`)), rows));
}

const share = ([used, total]) => `${page.number(used / 2 ** 30, { trim: true })} of ${page.number(total / 2 ** 30, { trim: true })} GiB`;
const percent = ([used, total]) => `${Math.round((100 * used) / total)}%`;
const tile = (label, value, note) => page.html("div", {}, page.html("dt", { title: label }, label), page.html("dd", {}, value, note ? page.html("small", {}, note) : null));
const tiles = { machine: page.html("dl", { class: "tiles", id: "machine" }), devices: page.html("dl", { class: "tiles", id: "devices" }), profiles: page.html("div", { id: "profiles" }) };
const requested = {};

export async function showSystem(content) {
  const [, machine, compared] = await Promise.all([showCurves(content, { isSystem: true, before: Object.values(tiles) }), request("machine"), request("compare", chosenQuery())]);
  if (view.tab !== "system") return;
  tiles.machine.replaceChildren(
    tile("Load", String(machine.load), `${machine.processors} processors, this machine`),
    machine.memory ? tile("Memory", percent(machine.memory), share(machine.memory)) : "",
    tile("Disk", percent(machine.disk), share(machine.disk)),
    ...machine.gpus.map((gpu, i) => tile(`GPU ${i} ${gpu.name}`, `${Math.round(gpu.busy * 100)}%`, share(gpu.memory))));
  page.update(tiles.devices, compared.facts, () => compared.facts.map((facts) => tile(short(facts.path), facts.devices ?? "?", `${facts.host}, jax ${facts.jax ?? "?"}, commit ${facts.commit || "none"}`)));
  tiles.profiles.replaceChildren(...await Promise.all(compared.facts.slice(0, 8).map(profileOf)));
}

// A button that asks a live run for a profile, and the summary of its newest profile.
async function profileOf(facts) {
  const { profiles } = await request("profiles", [["run", facts.path]]);
  const note = page.html("small", {}, requested[facts.path] ?? ""), button = page.html("button", { type: "button", class: "quiet" }, "Profile");
  button.addEventListener("click", async () => {
    const answer = await act("profile", { run: facts.path });
    note.textContent = requested[facts.path] = answer.problem ?? answer.done;
  });
  if (!profiles.length && facts.status !== "running") return "";
  const parts = [page.html("h3", {}, short(facts.path), " ", ...(facts.status === "running" ? [button, note] : []))];
  if (profiles.length) {
    const [{ name, text, parts: shares, columns, rows }] = profiles;
    const cells = (kind, values) => page.html("tr", {}, ...values.map((value) => page.html(kind, {}, value)));
    parts.push(page.html("p", {}, `${name}: ${text}`), page.html("p", {}, shares), page.html("table", {}, page.html("thead", {}, cells("th", columns)), page.html("tbody", {}, ...rows.map((row) => cells("td", row)))));
  }
  return page.html("section", { class: "profile" }, ...parts);
}
