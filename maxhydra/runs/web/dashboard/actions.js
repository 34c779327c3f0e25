// Buttons that change runs: stop, resume, tag, note; and the dialog that confirms.
import { act } from "./api.js";
import { view } from "./view.js";

const byId = (id) => document.getElementById(id);
const dialog = byId("dialog");
let current = null, timer = 0;

export function toast(text, isProblem = false) {
  const node = byId("toast");
  node.textContent = text;
  node.className = isProblem ? "bad" : "";
  node.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => { node.hidden = true; }, 6000);
}

// A dialog with a text and fields. `run()` performs the action and returns { done } or { problem }.
export function ask({ title, text = "", fields = [], go, run }) {
  current = run;
  byId("dialog-title").textContent = title;
  byId("dialog-body").replaceChildren(...(text ? [page.html("p", {}, text)] : []), ...fields);
  byId("dialog-problem").textContent = "";
  byId("dialog-go").textContent = go;
  dialog.showModal();
}
async function go() {
  byId("dialog-go").disabled = true;
  try {
    const { done, problem } = await current();
    if (problem) byId("dialog-problem").textContent = problem;
    else { dialog.close(); toast(done); document.dispatchEvent(new Event("runs-changed")); }
  } finally {
    byId("dialog-go").disabled = false;
  }
}
byId("dialog-go").addEventListener("click", go);
dialog.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.tagName === "INPUT") { event.preventDefault(); go(); }
});

// Perform an action on several runs, one after the other.
async function each(paths, action, body = {}) {
  const answers = [];
  for (const run of paths) answers.push(await act(action, { run, ...body }));
  const problems = answers.filter((answer) => answer.problem).map((answer) => answer.problem);
  return problems.length ? { problem: problems.join("\n") } : { done: answers.map((answer) => answer.done).join("\n") };
}

const field = (label, input) => page.html("label", { class: "field" }, label, input);
const many = (paths) => (paths.length === 1 ? paths[0] : `${paths.length} runs`);

function stop(paths) {
  ask({ title: `Stop ${many(paths)}?`, text: "A run saves a checkpoint and exits. Resume continues from it.", go: "Stop", run: () => each(paths, "stop") });
}
function resume(paths) {
  ask({ title: `Resume ${many(paths)}?`, text: "Starts the run on this machine from its last checkpoint.", go: "Resume", run: () => each(paths, "resume") });
}
function tag(paths, runs) {
  const input = page.html("input", { placeholder: "keep, paper", autocomplete: "off" });
  const tags = [...new Set(paths.flatMap((path) => runs.get(path)?.tags ?? []))];
  const boxes = tags.map((name) => page.html("label", { class: "check" }, page.html("input", { type: "checkbox", checked: true, value: name }), name));
  const split = () => input.value.split(",").map((name) => name.trim()).filter(Boolean);
  const run = async () => {
    const removed = boxes.map((box) => box.firstChild).filter((box) => !box.checked).map((box) => box.value);
    const answers = await Promise.all(paths.map((path) => act("tag", { run: path, add: split(), remove: removed.filter((name) => runs.get(path)?.tags.includes(name)) })));
    const problem = answers.find((answer) => answer.problem);
    return problem ?? { done: answers.map((answer) => answer.done).join("\n") };
  };
  ask({ title: `Tags of ${many(paths)}`, fields: [...boxes, field("Add tags, separated by commas", input)], go: "Save", run });
}
function note(paths, runs) {
  const input = page.html("textarea", { rows: 5 });
  input.value = runs.get(paths[0])?.notes ?? "";
  ask({ title: `Note of ${paths[0]}`, fields: [field("Note", input)], go: "Save", run: () => act("note", { run: paths[0], text: input.value }) });
}

// The buttons that apply to the chosen runs.
export function showActions(runs) {
  const chosen = view.run.map((path) => runs.get(path)).filter(Boolean);
  const paths = (isWanted) => chosen.filter(isWanted).map((run) => run.path);
  const running = paths((run) => run.status === "running"), ended = paths((run) => ["preempted", "failed", "lost", "finished"].includes(run.status));
  const button = (name, label, targets, onclick) => (targets.length ? page.html("button", { type: "button", class: "quiet", "data-action": name, onclick: () => onclick(targets, runs) }, targets.length > 1 ? `${label} ${targets.length}` : label) : null);
  page.update(byId("actions"), [running, ended, view.run, chosen.map((run) => [run.tags, run.notes])], () => [
    button("stop", "Stop", running, stop),
    button("resume", "Resume", ended.length === 1 ? ended : [], resume),
    button("tag", "Tag", paths(() => true), tag),
    button("note", "Note", chosen.length === 1 ? paths(() => true) : [], note),
    chosen.length === 1 ? page.html("a", { class: "quiet", href: `report?${new URLSearchParams({ run: chosen[0].path })}`, target: "_blank", rel: "noopener" }, "Report") : null,
  ].filter(Boolean));
}
