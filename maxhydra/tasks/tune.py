"""Search for the fastest settings of a config on this machine, and write them as an experiment.

With several processes, process 0 searches, and all run its trials, on the devices of all.
"""

import dataclasses
import datetime
from pathlib import Path

from maxhydra import runtime
from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.tasks.analysis import TuneTask
from maxhydra.config.yaml_files import display_path
from maxhydra.record.atomic_io import replace_file
from maxhydra.runtime.channel import is_main
from maxhydra.runtime.progress import open_step_progress
from maxhydra.tasks import Job, Outcome
from maxhydra.tune.space import apply_candidate, axes
from maxhydra.tune.trial import Trial, end_trials, experiment, follow_trials, given_keys
from maxhydra.tune.tuner import Tuner, describe, expected_trials, table

# The trials run in separate processes, which need the devices.
NEEDS_DEVICES = False
KEEPS_RUN = True
FILE = "experiment.yaml"


def run(job: Job) -> Outcome:
    task = job.config.task
    assert isinstance(task, TuneTask)
    if not is_main():
        return Outcome(*follow_trials(runtime.original_environment()))
    outcome = _search(job, task)
    end_trials(outcome.status, outcome.reason)
    return outcome


def _search(job: Job, task: TuneTask) -> Outcome:
    config, target = job.config, _target_path(task)
    given_keys(job.overrides)
    space = axes(config, task, runtime.predict_hardware(config.hardware))
    total = expected_trials(space, task)
    with open_step_progress(config.train.progress, total=total, start=0, shown=True) as progress:
        tuner = Tuner(
            config, task, space, job.choices, job.overrides, job.run.path, runtime.original_environment(), progress
        )
        reason = tuner.run()
    print(table(tuner.journal.trials), flush=True)

    best = tuner.best()
    if best is None:
        cause = tuner.journal.trials[-1].reason or tuner.journal.trials[-1].status
        return Outcome("failed", f"all {len(tuner.journal.trials)} candidates failed; the last one: {cause}")
    tuned = apply_candidate(config, best.candidate, task.batch)
    text = experiment(
        config, tuned, choices=job.choices, overrides=job.overrides, comments=_comments(best, tuner.baseline(), task)
    )
    path = job.run.path / FILE
    replace_file(path, text)
    report = [f"experiment: {display_path(path)}"]
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "x", encoding="utf-8") as file:
            file.write(text)
        report.append(f"use:        maxhydra --config-dir {task.config_dir} experiment={task.save_as}")
    print("\n".join(report), flush=True)
    facts = {"best": dataclasses.asdict(best), "trials": len(tuner.journal.trials), "experiment": str(path)}
    speed = {"tokens_per_second": float(best.line["tokens_per_second"])}
    return Outcome("finished", f"{reason}; {describe(best.candidate)}", speed, facts)


def _target_path(task: TuneTask) -> Path | None:
    """The path of the experiment for task.save_as, or None without it; ConfigError if it already exists."""
    if task.save_as is None:
        return None
    target = Path(task.config_dir).expanduser() / "experiment" / f"{task.save_as}.yaml"
    if target.exists():
        reason, hint = f"{display_path(target)} already exists", "choose another name, or move the file"
        raise ConfigError(Problem("task.save_as", reason, value=task.save_as, hint=hint))
    return target


def _comments(best: Trial, baseline: Trial | None, task: TuneTask) -> list[str]:
    line = best.line
    environment = f"{line['devices']} x {line['device']}, jax {line['jax']}, {datetime.date.today().isoformat()}"
    speed = f"{line['tokens_per_second']:,} tokens/s, {line['step_ms']:g} ms a step"
    comparison = ""
    if baseline is not None and best.candidate:
        gain = line["tokens_per_second"] / baseline.line["tokens_per_second"]
        comparison = f", {gain:.2f} times the {baseline.line['tokens_per_second']:,} before"
    memory = "" if best.memory_gib is None else f", {best.memory_gib:g} GiB"
    return [
        f"Tuned on {environment}.",
        f"{speed}{memory}{comparison}.",
        "",
        f"  maxhydra experiment={task.save_as or 'NAME'}",
    ]
