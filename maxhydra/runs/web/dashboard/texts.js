// Texts of a run: rollouts with filters, the final sample, and the log with a search.
import { request } from "./api.js";
import { change, view } from "./view.js";

const PAGE = 20;
// Name of a filter of the server, and of its field in the address.
const FILTERS = { kind: "kind", steps: "steps", reward: "reward", prompt: "prompt", text: "text", order: "sampling" };

// The run whose texts are shown: one of the chosen ones.
const shownRun = () => (view.run.includes(view.of) ? view.of : view.run[view.run.length - 1]);
const runChoice = (label) => {
  const path = shownRun();
  return page.html("select", { name: "run", "aria-label": label, onchange: (event) => change({ of: event.target.value, start: 0 }) }, ...view.run.map((each) => page.html("option", { value: each, selected: each === path }, each)));
};

// The fields are kept while the list below them changes, so that typing is not interrupted.
let form = null, formOf = "";
function filterForm(kinds) {
  const now = JSON.stringify([view.run, shownRun(), kinds]);
  if (!form || now !== formOf) {
    formOf = now;
    const set = (name) => (event) => change({ [name]: event.target.value, start: 0 });
    const choice = (name, label, values) => page.html("select", { name, "aria-label": label, onchange: set(name) }, ...values.map((value) => page.html("option", { value }, value)));
    const field = (name, placeholder) => page.html("input", { name, placeholder, "aria-label": placeholder, autocomplete: "off", spellcheck: false, onchange: set(name) });
    form = page.html("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
      runChoice("Samples of"), choice("kind", "Kind", kinds), choice("sampling", "Order", ["newest", "oldest", "best", "worst"]),
      field("steps", "Steps, 10:20"), field("reward", "Reward, 0.5:1"), field("prompt", "Prompt number"), field("text", "Text"));
  }
  for (const name of Object.values(FILTERS)) {
    const input = form.elements[name], value = view[name] || (name === "kind" ? kinds[kinds.length - 1] : "");
    if (input !== document.activeElement && input.value !== value) input.value = value;
  }
  return form;
}

function rollout(record) {
  const follow = () => { change({ prompt: String(record.prompt_number), sampling: "oldest", start: 0 }); };
  return page.html("article", { class: "rollout" },
    page.html("p", { class: "about" }, record.about, page.html("button", { type: "button", class: "quiet", onclick: follow }, "This prompt over steps")),
    page.html("pre", { class: "prompt" }, record.prompt ?? ""), page.html("pre", {}, record.completion),
    record.expected == null ? null : page.html("p", { class: "about" }, `expected: ${record.expected}`));
}

export async function showSamples(content) {
  const path = shownRun();
  const query = Object.entries(FILTERS).map(([name, field]) => [name, view[field] || (name === "kind" ? "eval" : "")]).filter(([, value]) => value !== "");
  const [response, { runs: [facts] }] = await Promise.all([
    request("rollouts", [["run", path], ["start", view.start], ["limit", PAGE], ...query]), request("evaluations", [["run", path]])]);
  if (view.tab !== "rollouts" || shownRun() !== path) return;
  const kinds = response.kinds ?? ["eval", "train"];
  if (kinds.length && !kinds.includes(view.kind || "eval")) { change({ kind: kinds[0] }); return; }
  const filters = kinds.length ? filterForm(kinds) : runChoice("Samples of");
  const sample = facts.sample ? page.html("article", { class: "rollout" }, page.html("h2", {}, "Final sample"), page.html("pre", { class: "sample" }, facts.sample)) : null;
  let list = content.querySelector("#rollouts");
  if (!list || !filters.isConnected) {
    list = page.html("div", { id: "rollouts" });
    content.replaceChildren(filters, list);
  }
  // One prompt over steps: its completions side by side.
  list.classList.toggle("columns", Boolean(view.prompt));
  page.update(list, [response, facts.sample], () => {
    if (response.problem) return [page.html("p", { role: "alert" }, response.problem)];
    if (!kinds.length) return sample ? [sample] : [page.html("p", { class: "empty" }, "This run has neither a sample (train.sample.tokens) nor rollouts (task=grpo).")];
    const last = view.start + response.records.length, move = (start, label, isOn) => page.html("button", { type: "button", class: "quiet", disabled: !isOn, onclick: () => change({ start }) }, label);
    const pager = page.html("p", { class: "pager" }, move(view.start - PAGE, "Previous", view.start > 0), `${response.records.length ? view.start + 1 : 0} to ${last} of ${response.total ?? "more"}`, move(last, "Next", response.total === null || last < response.total));
    return [...(sample && !view.start ? [sample] : []), pager, ...response.records.map(rollout)];
  });
}

let choice = null, search = null;
export async function showLog(content) {
  const path = shownRun(), wanted = view.find;
  const { text, count } = await request("log", [["run", path], ...(wanted ? [["text", wanted]] : [])]);
  if (view.tab !== "log" || shownRun() !== path || view.find !== wanted) return;
  const key = JSON.stringify([view.run, path]);
  if (!search?.isConnected || choice !== key) {
    choice = key;
    search = page.html("input", { type: "search", placeholder: "Search this log", "aria-label": "Search this log", value: wanted, autocomplete: "off", spellcheck: false, oninput: (event) => change({ find: event.target.value }) });
    content.replaceChildren(page.html("div", { class: "filters" }, runChoice("Log of"), search, page.html("span", { id: "log-count", role: "status" })), page.html("pre", { class: "log" }));
  }
  const log = content.querySelector(".log"), isAtEnd = !log.textContent || content.scrollTop + content.clientHeight > content.scrollHeight - 40;
  content.querySelector("#log-count").textContent = wanted ? `${(count ?? 0).toLocaleString("en")} lines` : "";
  page.update(log, [text, wanted], () => highlight(text || (wanted ? "No line contains this text." : "Nothing was logged."), wanted));
  if (isAtEnd) content.scrollTop = content.scrollHeight;
}

function highlight(text, wanted) {
  if (!wanted) return [text];
  const parts = [], lower = text.toLowerCase(), needle = wanted.toLowerCase();
  let at = 0;
  for (let found = lower.indexOf(needle); found >= 0; found = lower.indexOf(needle, at)) {
    parts.push(text.slice(at, found), page.html("mark", {}, text.slice(found, found + needle.length)));
    at = found + needle.length;
  }
  return [...parts, text.slice(at)];
}
