"""Estimate memory, traffic and step time on any number of devices, or search for the best mesh, without compiling."""

import dataclasses
import json
import shlex

from maxhydra import runtime
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.hardware import AXES
from maxhydra.config.schema.model import RematPolicy
from maxhydra.config.schema.tasks.analysis import Format, PlanTask
from maxhydra.plan.case import Case, Subject
from maxhydra.plan.estimate import GIB, Plan, fit_memory, make_plan
from maxhydra.plan.search import Limits, search
from maxhydra.plan.tables import memory_parts, plan_lines, search_lines, time_parts
from maxhydra.record.atomic_io import replace_file, to_json
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, Outcome
from maxhydra.train.batches import plan_batches

NEEDS_DEVICES, KEEPS_RUN = False, True
FILE = "plan.json"
# Keys that a search chooses.
SEARCHED = (
    *(f"{section}.{axis}=" for section in ("mesh", "mesh.dcn") for axis in AXES),
    *("mesh=", "mesh.slices=", "mesh.shard_state_over_data=", "model.remat.", "task=", "task.", "run."),
    *("train.per_device_batch_size=", "train.grad_accum="),
)


def run(job: Job) -> Outcome:
    task = job.config.task
    assert isinstance(task, PlanTask)
    config = dataclasses.replace(job.config, hardware=runtime.predict_hardware(job.config.hardware))
    _check(config, task)
    subject = Subject.of(config)
    plans = _search(subject, task) if task.search else [plan_case(subject, task)]
    best = plans[0]
    command = _command(job, best) if task.search else None
    facts = {
        **best.to_json(),
        "parts": time_parts(best.time) if best.time else {},
        "memory_parts": memory_parts(best.memory),
        "command": command,
    }
    if task.search:
        facts["found"] = [plan.to_json() for plan in plans]
    if job.run.writes:
        replace_file(job.run.path / FILE, to_json(facts))
    if task.format is Format.json:
        print(json.dumps(facts, indent=1))
    else:
        lines = [*search_lines(plans), ""] if task.search else []
        print("\n".join([*lines, *plan_lines(best)]))
        if command is not None:
            print(f"\nrun it: {command}")
    metrics = {} if best.time is None else {"step_time": best.time.seconds, "mfu": best.time.mfu}
    return Outcome("finished", "fits" if best.fits else "does not fit" if best.fits is False else "planned", metrics)


def _check(config: Config, task: PlanTask) -> None:
    """Reject slices larger than the hardware has."""
    links = config.hardware.links
    if links.torus_dimensions and task.devices // task.slices > links.domain_devices:
        least = -(-task.devices // links.domain_devices)
        reason = f"{task.devices // task.slices:,} devices per slice, but a slice has at most {links.domain_devices:,}"
        raise ConfigError(Problem("task.slices", reason, value=task.slices, accepted=f"{least} or more"))
    if task.search and config.hardware.memory_gib is None:
        reason, hint = "needs memory and peak rates of a chip", "choose one, such as hardware=gpu-h200"
        raise ConfigError(Problem("task.search", reason, value=True, hint=hint))


def plan_case(subject: Subject, task: PlanTask) -> Plan:
    """The plan of the config's own mesh and batch, which are checked as training would."""
    case = Case.of(subject, devices=task.devices, slices=task.slices)
    config = subject.config
    if config.model.remat.policy is RematPolicy.auto and config.hardware.memory_gib is not None:
        limit = task.memory_share * config.hardware.memory_gib * GIB
        case = fit_memory(case, limit)
    arrays = subject.weights
    sharder: Sharder = case.sharder
    sharder.check({array.path: array.axes for array in arrays}, {array.path: array for array in arrays})
    plan_batches(subject.config, sharder)
    return make_plan(case, memory_share=task.memory_share)


def _search(subject: Subject, task: PlanTask) -> list[Plan]:
    limits = Limits(
        devices=task.devices,
        slices=task.slices,
        batch_tokens=task.batch_tokens,
        memory_share=task.memory_share,
        results=task.results,
    )
    plans = search(subject, limits)
    if not plans:
        reason = f"no mesh of {task.devices} devices gives each of them a part of {task.batch_tokens:,} tokens"
        hint = "raise task.batch_tokens, or use fewer devices"
        raise ConfigError(Problem("task.batch_tokens", reason, value=task.batch_tokens, hint=hint))
    return plans


def _command(job: Job, plan: Plan) -> str:
    """The command that trains with a plan: the given choices and overrides, with what the search chose."""
    given = [part for part in job.overrides if not part.lstrip("+~").startswith(SEARCHED)]
    chosen = [*given, *plan.overrides]
    if not any(part.startswith("model=") for part in chosen) and "model" in job.choices:
        chosen = [f"model={job.choices['model']}", *chosen]
    return shlex.join(["maxhydra", *chosen])
