"""Distillation: train a student on a teacher's next-token distributions in addition to the tokens themselves."""

from collections.abc import Iterator
from functools import partial

from maxhydra import data
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.quantization import AdapterKind
from maxhydra.config.schema.tasks.training import DistillTask
from maxhydra.distill.loss import TEACHER, ScheduledBatches, StudentTeacher, distillation_loss, held_out_divergence
from maxhydra.distill.teacher import OnlineTeacher, check_layers, init_from_teacher, plan_teacher
from maxhydra.model import ModelDef, flops_per_token
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, Outcome
from maxhydra.train import (
    TrainingSetup,
    final_sample,
    held_out_loss,
    plan_batches,
    plan_states,
    train,
)

NEEDS_DEVICES = KEEPS_RUN = TRAINS = True


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, DistillTask)
    if problems := list(_problems(config, task)):
        raise ConfigError(problems)
    sharder = Sharder.from_config(config.mesh)
    spec = plan_batches(config, sharder)
    states = plan_states(config, sharder)

    teacher = initial = None
    if task.teacher.weights is not None:
        teacher = plan_teacher(config, task.teacher, sharder)
        _check_features(config, task, states.model, teacher)
        weights = teacher.load(task.teacher.weights)
        if task.init_layers is not None:
            initial = partial(
                init_from_teacher, states.model.base, teacher.model, weights, task.init_layers, sharder=sharder
            )
        states = plan_states(config, sharder, extra_weights={TEACHER: weights})

    comparison = StudentTeacher(states.model, sharder, teacher, task.features, config.train.loss_chunk)
    training = TrainingSetup(
        states=states,
        loss=distillation_loss(comparison, task),
        spec=spec,
        batches=ScheduledBatches(data.train_loader(config.data, spec), task, spec, steps=config.train.steps),
        evaluate=held_out_loss(
            held_out_divergence(comparison),
            lambda: data.eval_batches(config.data, spec),
            limit=config.train.eval_batches,
            parts=config.train.grad_accum,
        ),
        initial=initial,
        passes=_passes(config, teacher),
    )
    result = train(training, config, run=job.run, machine=job.machine)
    facts = {"end_step": result.step, **final_sample(config, states, result)}
    return Outcome(result.status, result.reason, result.metrics, facts)


def _passes(config: Config, teacher: OnlineTeacher | None) -> float:
    """Student-sized passes per row: one, plus the teacher's forward pass (a third of a pass over the teacher)."""
    if teacher is None:
        return 1.0
    length = config.train.seq_len
    return 1 + flops_per_token(teacher.model.config, length) / flops_per_token(config.model, length) / 3


def _problems(config: Config, task: DistillTask) -> Iterator[Problem]:
    is_online = task.teacher.weights is not None
    for name, corpus in config.data.corpora().items():
        path = f"data.sources.{name}" if name else "data"
        if corpus.record_type in ("preference", "prompts") or (corpus.record_type == "teacher") == is_online:
            accepted = "text, tokens, chat" if is_online else "teacher"
            reason = "does not match task.teacher.weights"
            yield Problem(f"{path}.record_type", reason, value=corpus.record_type, accepted=accepted)
    yield from config.train.no_z_loss(task="distill")
    if task.init_layers is not None and config.checkpoint.load_parameters is not None:
        reason = "cannot be combined with checkpoint.load_parameters"
        yield Problem("task.init_layers", reason, value=task.init_layers, hint="set only one of the two")
    if task.init_layers is not None and config.adapter.kind is not AdapterKind.none:
        reason = "initializes weights for training, but an adapter freezes them"
        yield Problem("task.init_layers", reason, value=task.init_layers, hint="set adapter=none")


def _check_features(config: Config, task: DistillTask, student: ModelDef, teacher: OnlineTeacher) -> None:
    check_layers("task.features.student_layers", task.features.student_layers, student, of="student")
    check_layers("task.features.teacher_layers", task.features.teacher_layers, teacher.model, of="teacher")
    width = teacher.model.config.emb_dim
    if task.features.student_layers and width != config.model.emb_dim:
        reason = f"needs equal widths, but the teacher's is {width} and model.emb_dim={config.model.emb_dim}"
        raise ConfigError(Problem("task.features.loss", reason, value=task.features.loss, accepted="none"))
