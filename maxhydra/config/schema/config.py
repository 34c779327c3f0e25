"""Root of the config schema: all sections, the checks across them, and the estimated size of a model.

The number of weights is estimated from the sizes alone: nothing is built to count them.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch

from maxhydra.config.declare import MAX_PARAMETERS, Schema, option, schema, section
from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.schema.audio import Audio, AudioEncoder
from maxhydra.config.schema.checkpoint import Checkpoint
from maxhydra.config.schema.data import AUDIO_TYPES, CHAT_TYPES, IMAGE_TYPES, Data
from maxhydra.config.schema.encoders import packing_methods
from maxhydra.config.schema.hardware import Hardware, Mesh
from maxhydra.config.schema.health import Alerts, Profile, Statistics, Watchdog
from maxhydra.config.schema.metrics import BENCHMARKS, EVAL_BPB, EVAL_LOSS, LOGGED, SET_METRICS
from maxhydra.config.schema.model import Dtype, FeedForward, Head, Kind, Mixer, MlpKind, Model, Norms, Positions
from maxhydra.config.schema.objective import diffusion_problems
from maxhydra.config.schema.optimizer import Optimizer, OptimizerKind
from maxhydra.config.schema.quantization import Adapter, AdapterKind, Quantization
from maxhydra.config.schema.reward import Environment, Reward
from maxhydra.config.schema.run import Run, Task, Tracker, Train
from maxhydra.config.schema.vision import Vision
from maxhydra.record.storage import is_remote

# Tasks whose batches do not depend on the weights, so that each replica can train on its own rows of them.
DILOCO_TASKS = ("pretrain", "sft", "plan")

TRAINING_TASKS = ("pretrain", "sft", "dpo", "reward_model", "grpo", "distill")
# Tasks that read the rows of their data in epochs, or describe one that does.
EPOCH_TASKS = ("pretrain", "sft", "dpo", "reward_model", "distill", "plan", "inspect", "inspect_data")
# Tasks with the next-token loss, which train.loss replaces.
NEXT_TOKEN_TASKS = ("pretrain", "sft")
# Tasks of models with a score head.
SCORE_TASKS = ("reward_model", "convert", "inspect", "serve")
# Tasks whose engine can be profiled.
ENGINE_TASKS = ("decode", "serve")
# Tasks with weights whose sequences have no fixed length, train.seq_len.
ANY_LENGTH_TASKS = (*ENGINE_TASKS, "convert", "eval", "score")
# Tasks that describe a training run without running it.
DESCRIBING_TASKS = ("plan", "compile", "inspect", "inspect_data")


def parameter_estimate(model: Model) -> int:
    """Number of weights of the large matrices, within a few percent of all; nothing is built to count them."""
    return (
        (1 + (model.head is Head.separate)) * model.vocab_size * model.emb_dim
        + (model.embedding.positions is Positions.learned) * model.context_length * model.emb_dim
        + (model.per_layer.dim or 0) * model.num_layers * model.vocab_size
        + _encoder_estimate(model.vision, model.emb_dim)
        + _encoder_estimate(model.audio, model.emb_dim)
        + sum(count * _kind_estimate(model, model.kinds[name]) for name, count in Counter(model.layer_kinds()).items())
    )


def _encoder_estimate(encoder: Vision | Audio, width: int) -> int:
    """Estimated weights of an image or audio encoder."""
    if encoder.num_layers is None:
        return 0
    if isinstance(encoder, Vision):
        squares, matrices, positions = 4, 2 + encoder.layers.gated, 2 * (encoder.axis_positions or 0)
    else:
        squares, matrices, positions = (8, 4, 0) if encoder.encoder is AudioEncoder.conformer else (4, 2, 0)
    layer = encoder.emb_dim * (squares * encoder.emb_dim + matrices * encoder.mlp_dim)
    return encoder.num_layers * layer + encoder.emb_dim * (width + positions)


def _kind_estimate(model: Model, kind: Kind) -> int:
    """Estimated weights of one layer."""
    attention, delta, mla, width = kind.attention, kind.delta, kind.mla, model.emb_dim
    heads, kv_heads = attention.num_heads or model.num_heads, attention.num_kv_heads or model.num_kv_heads
    head_dim = attention.head_dim or model.head_dim
    if kind.mixer is Mixer.delta:
        keys = (delta.num_key_heads or heads) * (delta.key_dim or head_dim)
        values = (delta.num_value_heads or heads) * (delta.value_dim or head_dim)
        gate = width * values if delta.gate_rank is None else delta.gate_rank * (width + values)
        mixer = width * 2 * (keys + values) + gate + (delta.decay_rank or 0) * (width + keys)
    elif kind.mixer is Mixer.compressed:
        section = kind.compressed
        rate_widths = 0 if section.rate is None else 2 * head_dim * (1 + section.overlap)
        mixer = section.q_lora_rank * (width + heads * head_dim) + width * (head_dim + rate_widths)
        mixer += section.out_rank * (heads * head_dim + section.out_groups * width)
    elif kind.mixer is Mixer.none:
        mixer = 0
    elif kind.mixer is Mixer.convolution:
        mixer = 4 * width * width
    elif kind.mixer is Mixer.ssm:
        ssm = kind.ssm
        values = (ssm.num_heads or model.num_heads) * (ssm.head_dim or model.head_dim)
        mixer = width * (3 * values + 2 * ssm.num_groups * ssm.state_dim)
    elif kind.mixer is Mixer.mla:
        nope, value = mla.qk_nope_head_dim or head_dim, mla.v_head_dim or head_dim
        query = heads * (nope + mla.qk_rope_head_dim)
        rank = mla.q_lora_rank
        mixer = width * query if rank is None else rank * (width + query)
        mixer += mla.kv_lora_rank * (width + heads * (nope + value)) + width * (mla.qk_rope_head_dim + heads * value)
    else:
        mixer = head_dim * (width * (heads + 2 * kv_heads) + (kind.latent_dim or width) * heads)
    inner, orders = kind.latent_dim or width, kind.engram.vocab_sizes
    memory = kind.engram.num_heads * kind.engram.head_dim
    memory *= sum(orders) + len(orders) * width * (1 + model.hyper_connections.streams)
    return mixer + _feed_forward_weights(model, kind, inner) + (width * inner if kind.latent_dim else 0) + memory


def _feed_forward_weights(model: Model, kind: Kind, width: int) -> int:
    """Weights of a layer's feed-forward, with all experts, on inputs of this width."""
    moe, has_mlp = kind.moe, kind.feed_forward is FeedForward.mlp
    dense = (2 + (kind.mlp.kind is MlpKind.gated)) * (kind.mlp.dim or model.mlp_dim) * has_mlp * width
    hidden = (moe.experts or 0) * (moe.dim or model.mlp_dim) * (moe.latent_dim or width) + (moe.shared.dim or 0) * width
    return dense + (2 + (moe.kind is MlpKind.gated)) * hidden + 2 * width * (moe.latent_dim or 0)


def size_problems(model: Model) -> Iterator[Problem]:
    """Yield the problem of sizes that are accepted one by one and give a model that no machine holds."""
    is_known = all(name in model.kinds for name in (*model.prefix, *model.pattern)) and model.pattern
    if is_known and (count := parameter_estimate(model)) > MAX_PARAMETERS:
        reason = f"gives a model of about {count:.2g} parameters with the other sizes"
        yield Problem("model.num_layers", reason, model.num_layers, f"sizes of at most {MAX_PARAMETERS:.0e} parameters")


@schema
class Config(Schema):
    """The config of one run."""

    task: Task = section(Task)
    model: Model = section(Model)
    mesh: Mesh = section(Mesh)
    data: Data = section(Data)
    optimizer: Optimizer = section(Optimizer)
    quantization: Quantization = section(Quantization)
    hardware: Hardware = section(Hardware)
    checkpoint: Checkpoint = section(Checkpoint)
    tracker: Tracker = section(Tracker)
    adapter: Adapter = section(Adapter)
    reward: Reward = section(Reward)
    environment: Environment = section(Environment)
    run: Run = section(Run)
    train: Train = section(Train)
    watchdog: Watchdog = section(Watchdog)
    statistics: Statistics = section(Statistics)
    alerts: Alerts = section(Alerts)
    profile: Profile = section(Profile)
    objective: str = option("eval/loss")
    """Metric that a run returns and a sweeper minimizes."""

    def check(self) -> Iterator[Problem]:
        yield from size_problems(self.model)
        if self.task.name not in ANY_LENGTH_TASKS and self.train.seq_len > self.model.context_length:
            yield Problem(
                "train.seq_len",
                f"exceeds model.context_length={self.model.context_length}",
                value=self.train.seq_len,
                accepted=f"1 to {self.model.context_length}",
                hint=f"set train.seq_len={self.model.context_length}; for longer sequences raise both",
            )
        yield from self._diloco_problems()
        yield from self._profile_problems()
        yield from self._evaluation_problems()
        yield from self._benchmark_problems()
        yield from self._storage_problems()
        yield from self._statistics_problems()
        yield from self._media_problems()
        yield from diffusion_problems(self.model, task=self.task, train=self.train, mesh=self.mesh)
        is_score, name = self.model.head is Head.score, self.task.name
        if is_score and name not in SCORE_TASKS:
            reason = f"is the head of a reward model, and task={name} needs a language model"
            yield Problem("model.head", reason, value=self.model.head, accepted="tied, separate")
        if not is_score and name == "reward_model":
            reason = "is not the head of a reward model"
            yield Problem("model.head", reason, value=self.model.head, accepted="score")
        for problem in self.task.check_model(self.model):
            yield dataclasses.replace(problem, path=f"task.{problem.path}")
        if self.train.loss.function is not None and name in TRAINING_TASKS and name not in NEXT_TOKEN_TASKS:
            reason, accepted = f"is not used by task={name}, which has its own loss", "null, or task=pretrain, sft"
            yield Problem("train.loss.function", reason, self.train.loss.function, accepted=accepted)
        yield from self._optimizer_problems()

    def _optimizer_problems(self) -> Iterator[Problem]:
        """Dtypes that optimizer and model do not support together, and schedules that do not fit the run."""
        # Adapter weights are float32 whatever the dtype of the frozen weights.
        trained = self.model.dtypes.weights if self.adapter.kind is AdapterKind.none else Dtype.float32
        for problem in self.optimizer.check_moments(trained):
            yield dataclasses.replace(problem, path=f"optimizer.{problem.path}")
        has_updates = any(kind.moe.router.bias_rate for kind in self.model.kinds.values())
        has_updates = has_updates or self.model.qk_clip is not None
        if self.optimizer.kind is OptimizerKind.schedule_free and has_updates:
            reason = "is not supported with router biases and qk_clip, which change weights outside of the optimizer"
            yield Problem("optimizer.kind", reason, value="schedule_free", accepted="another kind, with ema_decay")
        if self.adapter.kind is not AdapterKind.none and self.model.qk_clip is not None:
            reason = "rescales weights that an adapter freezes"
            yield Problem("model.qk_clip", reason, value=self.model.qk_clip, accepted="null, or adapter=none")
        yield from self._sparsity_problems()
        yield from self._transfer_problems()
        compute, grad_accum = self.model.dtypes.compute, self.train.grad_accum
        for problem in self.optimizer.check_grad_dtype(compute, grad_accum=grad_accum):
            yield dataclasses.replace(problem, path=f"optimizer.{problem.path}")
        if self.train.epochs is None:
            yield from self.optimizer.schedule.check_length(self.train.steps)
        elif self.task.name not in EPOCH_TASKS:
            reason, accepted = f"is not supported by task={self.task.name}", f"null, or task={', '.join(EPOCH_TASKS)}"
            yield Problem("train.epochs", reason, value=self.train.epochs, accepted=accepted)

    def _sparsity_problems(self) -> Iterator[Problem]:
        """Masks are chosen from weights that only the optimizer changes."""
        conflicts = {
            "adapter=none": self.adapter.kind is not AdapterKind.none,
            "model.qk_clip=null": self.model.qk_clip is not None,
            "train.diloco.period=null": self.train.diloco.period is not None,
        }
        for accepted, is_conflict in conflicts.items():
            if self.optimizer.sparsity.n is not None and is_conflict:
                reason, accepted = f"is only supported with {accepted}", f"null, or {accepted}"
                yield Problem("optimizer.sparsity.n", reason, value=self.optimizer.sparsity.n, accepted=accepted)

    def _transfer_problems(self) -> Iterator[Problem]:
        """Models and optimizers for which the scaling rules of model.transfer are not known here."""
        if not self.model.transfer.is_used:
            return
        kinds, per_layer = self.model.kinds.values(), self.model.per_layer.dim
        plain = all(
            (kind.mixer, kind.feed_forward, kind.norms, kind.latent_dim)
            == (Mixer.attention, FeedForward.mlp, Norms.pre, None)
            for kind in kinds
        )
        required = {
            "optimizer.kind": (self.optimizer.kind is OptimizerKind.adamw, "adamw"),
            "adapter.kind": (self.adapter.kind is AdapterKind.none, "none"),
            "model.head": (self.model.head is Head.separate, "separate"),
            "model.mtp.depth": (not self.model.mtp.depth, "0"),
            "model.kinds": (plain and per_layer is None, "attention and mlp with norms=pre, without per_layer"),
        }
        for path, (is_supported, accepted) in required.items():
            if not is_supported:
                yield Problem(path, "is not supported with model.transfer", accepted=accepted)

    def _evaluation_problems(self) -> Iterator[Problem]:
        """Keys that depend on a metric which the evaluations of a training task do not report."""
        if self.task.name not in LOGGED:
            return
        reported, train = self._evaluation_metrics(), self.train
        if self.data.eval_sets and EVAL_BPB not in LOGGED[self.task.name]:
            supported = [task for task, names in LOGGED.items() if EVAL_BPB in names]
            reason, accepted = f"is not evaluated by task={self.task.name}", f"task={', '.join(supported)}"
            yield Problem("data.eval_sets", reason, value=sorted(self.data.eval_sets), accepted=accepted)
        used = {
            "checkpoint.best_metric": (self.checkpoint.best_metric, bool(self.checkpoint.keep_best)),
            "train.early_stop.metric": (train.early_stop.metric, train.early_stop.patience is not None),
        }
        for key, (metric, is_used) in used.items():
            if is_used and not any(fnmatch(metric, name) for name in reported):
                reason, accepted = f"is not reported by evaluations of task={self.task.name}", ", ".join(reported)
                hint = "bits per byte need data with text" if metric.endswith("bpb") else did_you_mean(metric, reported)
                yield Problem(key, reason, value=metric, accepted=accepted or "no metric", hint=hint)
        if train.target_eval_loss is not None and EVAL_LOSS not in reported:
            reason = f"needs {EVAL_LOSS}, which evaluations of task={self.task.name} do not report"
            yield Problem("train.target_eval_loss", reason, value=train.target_eval_loss, accepted="null")

    def _evaluation_metrics(self) -> list[str]:
        """Metrics that evaluations of this config report; some are patterns."""
        logged = LOGGED[self.task.name]
        names = [name for name in logged if name.startswith("eval/") and name not in BENCHMARKS]
        names += self.train.evals.metrics()
        if EVAL_BPB not in names:
            return names
        names = [name for name in names if name not in (EVAL_BPB, *SET_METRICS)]
        names += [EVAL_BPB] if self.data.counts_bytes else []
        for name, data in self.data.held_out_sets().items():
            names += [f"eval/{name}/loss", *([f"eval/{name}/bpb"] if data.counts_bytes else [])] if name else []
        return names

    def _benchmark_problems(self) -> Iterator[Problem]:
        """Benchmarks need a language model, on a mesh on which the engine decodes."""
        evals, longest = self.train.evals, self.model.context_length
        if not evals.tasks:
            return
        supported = [task for task, names in LOGGED.items() if BENCHMARKS[0] in names]
        if self.task.name not in (*supported, *DESCRIBING_TASKS):
            reason, accepted = f"is not supported by task={self.task.name}", f"[], or task={', '.join(supported)}"
            yield Problem("train.evals.tasks", reason, value=evals.tasks, accepted=accepted)
        if shared := sorted({*self.data.held_out_sets()} & {*evals.names()}):
            reason = f"has the name of the held-out set {shared[0]}, whose metrics are eval/{shared[0]}/* too"
            yield Problem(
                "train.evals.tasks", reason, evals.tasks, hint="rename the source or the set of data.eval_sets"
            )
        if (evals.max_context or 0) > longest:
            reason = f"exceeds model.context_length={longest}"
            yield Problem("train.evals.max_context", reason, value=evals.max_context, accepted=f"2 to {longest}")
        for path in ("mesh.stage", "mesh.replica", "mesh.dcn.stage", "mesh.dcn.replica"):
            section = self.mesh.dcn if "dcn" in path else self.mesh
            if (size := getattr(section, path.rpartition(".")[2])) != 1:
                reason = "is not supported with train.evals, which decodes on the mesh"
                yield Problem(path, reason, value=size, accepted="1, or train.evals.tasks=[]")

    def _media_problems(self) -> Iterator[Problem]:
        """Data with images or audio needs a model, a task and a mesh that take them."""
        types = {corpus.record_type for corpus in self.data.corpora().values()} & {*IMAGE_TYPES, *AUDIO_TYPES}
        if not types or self.task.name not in (*TRAINING_TASKS, *DESCRIBING_TASKS):
            return
        name = min(types)
        media, encoder = ("images", "vision") if name in IMAGE_TYPES else ("audio", "audio")
        if getattr(self.model, encoder).num_layers is None:
            hint = f"choose one with model.{encoder}, such as model=micro-{encoder}"
            yield Problem("data.record_type", f"needs a model that takes {media}", value=name, hint=hint)
        tasks = NEXT_TOKEN_TASKS if name in CHAT_TYPES else ("dpo",)
        if self.task.name not in (*tasks, *DESCRIBING_TASKS):
            reason = f"is not supported by task={self.task.name}"
            yield Problem("data.record_type", reason, value=name, accepted=f"task={', '.join(tasks)}")
        methods = packing_methods(name, self.model.vision)
        if (method := self.data.packing.method) not in methods:
            reason, accepted = f"is not supported by data.record_type={name}", ", ".join(each.value for each in methods)
            yield Problem("data.packing.method", reason, value=method.value, accepted=accepted)
        for path in ("mesh.stage", "mesh.sequence", "mesh.dcn.stage", "mesh.dcn.sequence"):
            section = self.mesh.dcn if "dcn" in path else self.mesh
            if (size := getattr(section, path.rpartition(".")[2])) != 1:
                reason = f"is not supported with {media}, which are not split along layers or sequences"
                yield Problem(path, reason, value=size, accepted=f"1, or data without {media}")

    def _profile_problems(self) -> Iterator[Problem]:
        """Training steps and engines are profiled; tasks that plan or compile a training run accept its config."""
        is_set, name = bool(self.profile.steps) or self.profile.every is not None, self.task.name
        profiled = (*TRAINING_TASKS, *ENGINE_TASKS)
        if is_set and name not in (*profiled, *DESCRIBING_TASKS):
            key = "profile.steps" if self.profile.steps else "profile.every"
            reason = f"profiles training and decoding, and task={name} does neither"
            yield Problem(key, reason, accepted=f"task={', '.join(profiled)}")
        is_train = name not in ENGINE_TASKS
        is_known = is_train and self.train.epochs is None
        if is_known and len(self.profile.steps) == 2 and self.profile.steps[1] > self.train.steps:
            reason = f"ends after the last step, train.steps={self.train.steps}"
            yield Problem("profile.steps", reason, self.profile.steps, accepted=f"steps up to {self.train.steps}")

    def _storage_problems(self) -> Iterator[Problem]:
        """Uploads need a URL, at the steps of checkpoints; tasks other than runs write to local files."""
        every, persist_every = self.checkpoint.every, self.checkpoint.persist_every
        if persist_every is not None and not is_remote(self.run.outputs):
            reason, hint = "needs a URL to upload to", "set run.outputs=s3://BUCKET/FOLDER"
            yield Problem("checkpoint.persist_every", reason, value=persist_every, accepted="null", hint=hint)
        elif persist_every is not None and persist_every % every:
            reason, accepted = (
                f"is not a multiple of checkpoint.every={every}",
                f"{every}, {2 * every}, {3 * every}, ...",
            )
            yield Problem("checkpoint.persist_every", reason, value=persist_every, accepted=accepted)
        if self.checkpoint.peer_copies and self.checkpoint.local_every is None:
            reason, hint = "copies local checkpoints, and there are none", "set checkpoint.local_every"
            yield Problem("checkpoint.peer_copies", reason, self.checkpoint.peer_copies, accepted="0", hint=hint)
        if is_remote(self.checkpoint.local_folder):
            accepted = "a folder on each host"
            yield Problem("checkpoint.local_folder", "is a URL", self.checkpoint.local_folder, accepted=accepted)
        output = getattr(self.task, "output", None)
        if output is not None and is_remote(output):
            hint = "write to a local path, then upload it"
            yield Problem("task.output", "is a URL", value=output, accepted="a local path", hint=hint)

    def _statistics_problems(self) -> Iterator[Problem]:
        """Only training tasks have statistics of layers, and replicas of DiLoCo would each have their own."""
        every, name = self.statistics.every, self.task.name
        if every is not None and name not in (*TRAINING_TASKS, *DESCRIBING_TASKS):
            reason = f"records training steps, and task={name} does not train"
            yield Problem("statistics.every", reason, every, accepted=f"null, or task={', '.join(TRAINING_TASKS)}")
        if every is not None and self.train.diloco.period is not None:
            reason, accepted = "is not supported with DiLoCo", "null, or train.diloco.period=null"
            yield Problem("statistics.every", reason, every, accepted=accepted)

    def _diloco_problems(self) -> Iterator[Problem]:
        """Replicas need a period, a period needs replicas, and both a task that trains on a data loader."""
        period, sizes = self.train.diloco.period, {"mesh": self.mesh.replica, "mesh.dcn": self.mesh.dcn.replica}
        section = next((name for name, size in sizes.items() if size != 1), None)
        if section is None and period is not None:
            hint = "set mesh.replica, or mesh.dcn.replica for one replica per slice"
            reason = "synchronizes replicas, but mesh.replica=1"
            yield Problem("train.diloco.period", reason, value=period, accepted="null", hint=hint)
        if section is not None and period is None:
            reason, hint = "needs the number of steps between synchronizations", "set train.diloco.period"
            yield Problem(f"{section}.replica", reason, value=sizes[section], accepted="1", hint=hint)
        if section is not None and self.mesh.shard_state_over_data:
            reason, accepted = "is not supported with DiLoCo", f"false, or {section}.replica=1"
            yield Problem("mesh.shard_state_over_data", reason, value=True, accepted=accepted)
        if section is not None and self.optimizer.has_average:
            key = "kind" if self.optimizer.ema_decay is None else "ema_decay"
            reason, accepted = "averages the weights, which is not supported with DiLoCo", f"{section}.replica=1"
            yield Problem(f"optimizer.{key}", reason, accepted=accepted)
        for key in ("offload", "offload_weights"):
            if section is not None and getattr(self.optimizer, key):
                reason, accepted = "is not supported with DiLoCo", f"false, or {section}.replica=1"
                yield Problem(f"optimizer.{key}", reason, value=True, accepted=accepted)
        if section is not None and self.task.name not in DILOCO_TASKS:
            reason = f"DiLoCo is not supported by task={self.task.name}"
            accepted = f"1, or task={' or '.join(DILOCO_TASKS)}"
            yield Problem(f"{section}.replica", reason, value=sizes[section], accepted=accepted)
