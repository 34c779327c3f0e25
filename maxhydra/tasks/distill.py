"""Distillation: train a student on a teacher's next-token distributions in addition to the tokens themselves."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import jax
import jax.numpy as jnp

from maxhydra import data
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.data import LossOn, Overlong, PackingMethod, Thinking
from maxhydra.config.schema.tasks.distill import DistillTask, WeightMap
from maxhydra.data import BatchSpec
from maxhydra.decode.open import reject_stages
from maxhydra.decode.open_draft import open_draft_model
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.distill.learn_to_init import learn_init
from maxhydra.distill.loss import (
    TEACHER,
    ScheduledBatches,
    StudentTeacher,
    distillation_loss,
    held_out_divergence,
    values_at,
)
from maxhydra.distill.on_policy import OnPolicyBatches, Sampled
from maxhydra.distill.separate_teacher import (
    Outputs,
    SeparateTeacher,
    TeacherBatches,
    check_batches,
    logit_outputs,
    logprob_outputs,
)
from maxhydra.distill.teacher import OnlineTeacher, check_layers, init_from_teacher, open_tokenizer, plan_teacher
from maxhydra.distill.text_alignment import TextAligner, aligned_loss, student_likelihood
from maxhydra.evals.training import find_benchmarks
from maxhydra.model import ModelDef, flops_per_token
from maxhydra.record.rollout_store import RolloutWriter
from maxhydra.record.rollouts import FOLDER, TRAIN
from maxhydra.rl.rollout import PolicyEngine, unfiltered_sampling
from maxhydra.rl.setup import prompt_loader
from maxhydra.sharding import Sharder, build_mesh, split_devices
from maxhydra.tasks import Job, Outcome
from maxhydra.train import (
    BatchSource,
    LoaderBatches,
    Scorer,
    StateFactory,
    TrainingSetup,
    final_sample,
    held_out_likelihood,
    plan_batches,
    plan_states,
    train,
    with_samples,
)
from maxhydra.train.evaluate import split_microbatches
from maxhydra.train.loss import Batch, LossFn, Sums, Tree
from maxhydra.train.step import sequences_in

NEEDS_DEVICES = KEEPS_RUN = TRAINS = True


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, DistillTask)
    if problems := [*_problems(config, task), *_process_problems(task, job.machine.process_count)]:
        raise ConfigError(problems)
    benchmarks = find_benchmarks(config)
    path, share = task.separate_devices
    training_devices, teacher_devices = split_devices(jax.devices(), share, path=path)
    sharder = Sharder.from_config(config.mesh, build_mesh(config.mesh, training_devices))
    spec = plan_batches(config, sharder)
    states = plan_states(config, sharder)

    teacher = initial = weights = None
    if task.teacher.weights is not None:
        teacher = plan_teacher(config, task.teacher, sharder, devices=teacher_devices)
        _check_features(config, task, states.model, teacher)
        if teacher_devices:
            check_batches(spec, config.train, teacher.sharder)
        weights = teacher.load(task.teacher.weights)
        if task.init_layers is not None and task.learn_to_init.map is WeightMap.none:
            initial = partial(
                init_from_teacher, states.model.base, teacher.model, weights, task.init_layers, sharder=sharder
            )
        elif task.init_layers is not None:
            initial = partial(_learn_init, config, task, states.model.base, teacher, weights, spec, sharder)
        if not teacher_devices:
            states = plan_states(config, sharder, extra_weights={TEACHER: weights})

    loss, evaluation_loss = _losses(config, task, states, None if teacher_devices else teacher)
    add_outputs = None
    if teacher is not None and teacher_devices:
        outputs, parts = _teacher_outputs(config, task, teacher), config.train.grad_accum
        add_outputs = SeparateTeacher(outputs, weights, teacher.sharder, sharder, spec, parts)
    # With alignment, the held-out loss is that of the student alone.
    add_columns = None if task.teacher.align else add_outputs
    evaluate = held_out_likelihood(evaluation_loss, config.data, spec, config.train, add_columns=add_columns)
    with _batches(job, task, states, spec) as batches:
        if add_outputs is not None:
            batches = TeacherBatches(batches, add_outputs)
        training = TrainingSetup(
            states=states,
            loss=loss,
            spec=spec,
            batches=ScheduledBatches(batches, task, spec, steps=config.train.steps),
            evaluate=with_samples(benchmarks.join(evaluate, states), config, states, job.run),
            initial=initial,
            passes=_passes(config, None if teacher_devices else teacher),
        )
        result = train(training, config, run=job.run, machine=job.machine)
    facts = {"end_step": result.step, **final_sample(config, states, result)}
    return Outcome(result.status, result.reason, result.metrics, facts)


def _losses(
    config: Config, task: DistillTask, states: StateFactory, teacher: OnlineTeacher | None
) -> tuple[LossFn, LossFn]:
    """The losses of training and of evaluation; without a teacher, they read its outputs from the batch."""
    chunk, sharder = config.train.chunk, states.sharder
    if task.teacher.align:
        student = Scorer(states.model, sharder, chunk)
        scorer = None if teacher is None else Scorer(teacher.model, teacher.sharder, chunk)
        return aligned_loss(student, scorer), student_likelihood(student)
    comparison = StudentTeacher(states.model, sharder, teacher, task.features, chunk)
    return distillation_loss(comparison, task), held_out_divergence(comparison)


def _teacher_outputs(config: Config, task: DistillTask, teacher: OnlineTeacher) -> Outputs:
    """The outputs of a teacher on its own devices that the loss reads."""
    if task.teacher.align:
        return logprob_outputs(Scorer(teacher.model, teacher.sharder, config.train.chunk))
    return logit_outputs(teacher, task.features.teacher_layers, task.teacher.top_k)


def _learn_init(
    config: Config,
    task: DistillTask,
    student: ModelDef,
    teacher: OnlineTeacher,
    weights: Tree,
    spec: BatchSpec,
    sharder: Sharder,
) -> Tree:
    """Initial weights by maps that are trained on the first batches of the data."""
    assert task.init_layers is not None
    comparison = StudentTeacher(student, sharder, teacher, task.features, config.train.chunk)
    loss, values = distillation_loss(comparison, task), values_at(task, jnp.int32(0), config.train.steps)

    def first_microbatch_loss(params: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        batch = jax.tree.map(lambda x: x[0], split_microbatches(batch, config.train.grad_accum))
        columns = {name: jnp.full(sequences_in(batch), value, jnp.float32) for name, value in values.items()}
        return loss(params, {**batch, **columns}, key)

    with closing(data.train_loader(config.data, spec)) as loader:
        return learn_init(
            student,
            teacher.model,
            weights,
            task.init_layers,
            task.learn_to_init,
            loss=first_microbatch_loss,
            batches=(next(loader) for _ in range(task.learn_to_init.steps)),
            sharder=sharder,
        )


@contextmanager
def _batches(job: Job, task: DistillTask, states: StateFactory, spec: BatchSpec) -> Iterator[BatchSource]:
    """Batches of the data, some of them with completions of the student as task.on_policy says."""
    config, on_policy, sharder = job.config, task.on_policy, states.sharder
    if not on_policy.fraction:
        yield LoaderBatches(data.train_loader(config.data, spec))
        return
    reject_stages(sharder, "mesh.stage")
    aligner = None
    if task.teacher.align:
        aligner = TextAligner(data.load_tokenizer(config.data), open_tokenizer(config.data, task.teacher))
        aligner.check(task.teacher.weights)
    prompts = PromptEncoder(config.data, vocab_size=config.model.vocab_size)
    sampling = unfiltered_sampling(on_policy.max_tokens, on_policy.temperature)
    engine = PolicyEngine(
        states.model,
        prompts.tokenizer,
        on_policy.engine,
        sharder=sharder,
        eos=prompts.eos_ids,
        seed=config.run.seed,
        draft_model=open_draft_model(config, on_policy.engine, sharder, key="task.on_policy.engine"),
    )

    def sample(weights: Tree, ids: Sequence[Sequence[int]], number: int) -> Sequence[Sampled]:
        return engine.generate(weights, ids, sampling, samples=1, number=number)

    writer = None
    if job.run.writes and on_policy.keep_rollouts:
        writer = RolloutWriter(job.run.path / FOLDER, TRAIN, keep=on_policy.keep_rollouts)
    loader = prompt_loader(config, dataclasses.replace(spec, sharding=sharder.sharding((None, None))))
    with closing(engine):
        yield OnPolicyBatches(
            loader, spec, on_policy, sample, tokenizer=prompts.tokenizer, writer=writer, add_columns=aligner
        )


def _passes(config: Config, teacher: OnlineTeacher | None) -> float:
    """Student-sized passes per row: one, plus the teacher's forward pass (a third of a pass over the teacher)."""
    if teacher is None:
        return 1.0
    length = config.train.seq_len
    return 1 + flops_per_token(teacher.model.config, length) / flops_per_token(config.model, length) / 3


def _process_problems(task: DistillTask, processes: int) -> Iterator[Problem]:
    if task.teacher.devices and processes > 1:
        reason = f"is not supported with several processes; {processes} were started"
        yield Problem("task.teacher.devices", reason, value=task.teacher.devices, accepted="0, or a single process")


def _problems(config: Config, task: DistillTask) -> Iterator[Problem]:
    is_online = task.teacher.weights is not None
    for name, corpus in config.data.corpora().items():
        path = f"data.sources.{name}" if name else "data"
        if corpus.record_type in ("preference", "labeled", "prompts") or (corpus.record_type == "teacher") == is_online:
            accepted = "text, tokens, chat" if is_online else "teacher"
            reason = "does not match task.teacher.weights"
            yield Problem(f"{path}.record_type", reason, value=corpus.record_type, accepted=accepted)
        elif task.on_policy.fraction and corpus.record_type != "chat":
            reason = "has no prompts to complete, which task.on_policy.fraction needs"
            yield Problem(f"{path}.record_type", reason, value=corpus.record_type, accepted="chat")
    packing = config.data.packing
    if task.on_policy.fraction and packing.method is not PackingMethod.none:
        reason = (
            "packs conversations, but task.on_policy.fraction needs a sequence for each, with space for a completion"
        )
        yield Problem("data.packing.method", reason, value=packing.method, accepted="none")
    if task.on_policy.fraction and packing.overlong is Overlong.split:
        reason = "splits conversations from their prompts, which task.on_policy.fraction needs"
        yield Problem("data.packing.overlong", reason, value=packing.overlong, accepted="truncate, drop")
    masks = {"loss_on": (config.data.loss_on, LossOn.all), "thinking": (config.data.thinking, Thinking.mask)}
    for name, (value, unsupported) in masks.items():
        if task.on_policy.fraction and value is unsupported:
            reason = "hides where the last assistant turn starts, which task.on_policy.fraction samples anew"
            yield Problem(f"data.{name}", reason, value=value, accepted=f"any but {unsupported.value}")
    yield from config.train.no_z_loss(task="distill")
    metrics = {"objective": config.objective}
    if config.checkpoint.keep_best:
        metrics["checkpoint.best_metric"] = config.checkpoint.best_metric
    for path, metric in metrics.items():
        if task.teacher.align and metric == "eval/kl":
            reason = "is not logged with task.teacher.align=true, because the distributions are over other tokens"
            yield Problem(path, reason, value=metric, accepted="eval/loss, divergence")
    if task.init_layers is not None and config.checkpoint.load_parameters is not None:
        reason = "cannot be combined with checkpoint.load_parameters"
        yield Problem("task.init_layers", reason, value=task.init_layers, hint="set only one of the two")
    if task.init_layers is not None and config.adapter.is_enabled:
        reason = "initializes weights for training, but an adapter freezes them"
        yield Problem("task.init_layers", reason, value=task.init_layers, hint="set adapter=none")


def _check_features(config: Config, task: DistillTask, student: ModelDef, teacher: OnlineTeacher) -> None:
    check_layers("task.features.student_layers", task.features.student_layers, student, of="student")
    check_layers("task.features.teacher_layers", task.features.teacher_layers, teacher.model, of="teacher")
    width = teacher.model.config.emb_dim
    if task.features.student_layers and width != config.model.emb_dim:
        reason = f"needs equal widths, but the teacher's is {width} and model.emb_dim={config.model.emb_dim}"
        raise ConfigError(Problem("task.features.loss", reason, value=task.features.loss, accepted="none"))
