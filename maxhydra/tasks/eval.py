"""task=eval: benchmarks of a model, or of several checkpoints of a run. An interrupted command resumes."""

from contextlib import closing
from pathlib import Path

from rich.console import Console

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.tasks.evaluation import EvalTask
from maxhydra.convert.adapter_lineage import run_folder
from maxhydra.convert.orbax_io import checkpoint_steps, find_checkpoint
from maxhydra.decode.open import open_prompts
from maxhydra.evals import report
from maxhydra.evals.model import CheckpointModel, MemoryCache, RequestCache
from maxhydra.evals.run import Result, TaskSet, evaluate, find_tasks, read_task
from maxhydra.record import MetricsWriter
from maxhydra.record.atomic_io import replace_file, to_json
from maxhydra.runtime.channel import broadcast, is_main
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES = KEEPS_RUN = True

FILE, REQUESTS = "eval.json", "requests.jsonl"
KEY = "checkpoint.load_parameters"


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, EvalTask)
    outcome = _evaluate(job, task) if is_main() else _follow(config)
    return Outcome(*broadcast([outcome.status, outcome.reason, outcome.metrics]))


def _evaluate(job: Job, task: EvalTask) -> Outcome:
    config = job.config
    tasks = find_tasks(task)
    prompts = open_prompts(config)
    checkpoints = _find_checkpoints(config, task)
    own = [read_task(found, task, prompts) for found in tasks.own]
    broadcast(list(checkpoints.values()))
    results: dict[str, dict[str, Result]] = {}
    with closing(RequestCache(job.run.path / REQUESTS)) as cache:
        for name, weights in checkpoints.items():
            with closing(CheckpointModel(config, prompts, cache, weights=weights)) as model:
                results[name] = evaluate(model, own, tasks, task)
    return _report(job, tasks, results)


def _follow(config: Config) -> Outcome:
    """Compute the requests of process 0 to each checkpoint."""
    prompts = open_prompts(config)
    for weights in broadcast():
        with closing(CheckpointModel(config, prompts, MemoryCache(), weights=weights)) as model:
            model.follow()
    return Outcome("finished", "evaluated")


def _find_checkpoints(config: Config, task: EvalTask) -> dict[str, str]:
    """Locations of the weights to evaluate, by step or, for weights of other programs, by name."""
    source = config.checkpoint.load_parameters
    assert source is not None
    folder = run_folder(source)
    if folder is None and task.steps:
        reason, hint = "needs a run", f"set {KEY} to the folder of a run"
        raise ConfigError(Problem("task.steps", reason, value=task.steps, accepted="[]", hint=hint))
    if folder is None:
        return {Path(source).name: source}
    if not task.steps:
        path = find_checkpoint(KEY, source)
        return {path.name: str(path)}
    known = checkpoint_steps(folder / "checkpoints")
    if unknown := [step for step in task.steps if step not in known]:
        reason, accepted = f"has no checkpoint of step {unknown[0]} in {folder}", ", ".join(map(str, known))
        raise ConfigError(Problem("task.steps", reason, value=task.steps, accepted=accepted))
    return {str(step): str(folder / "checkpoints" / str(step)) for step in task.steps}


def _report(job: Job, tasks: TaskSet, results: dict[str, dict[str, Result]]) -> Outcome:
    """Print the table, write the files of the run, and return the metrics of the last checkpoint."""
    replace_file(job.run.path / FILE, to_json(report.to_json(results), indent=1) + "\n")
    with closing(MetricsWriter(job.run.metrics_path)) as writer:
        writer.truncate(-1)
        for number, (name, found) in enumerate(results.items()):
            writer.write(int(name) if name.isdecimal() else number, report.metrics(found))
    console = Console()
    console.print(report.table(results))
    for name, found in results.items():
        for task, result in found.items():
            if result.grid:
                console.print(f"\n{task}, {name}: accuracy by context length\n{report.heat_map(result)}")
    count = len(tasks.own) + len(tasks.harness)
    last = list(results.values())[-1]
    return Outcome("finished", f"evaluated {len(results)} checkpoints on {count} tasks", report.metrics(last))
