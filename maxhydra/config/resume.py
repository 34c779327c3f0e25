"""Which config keys may change when a run resumes, and the comparison of a run's stored config with a new one.

A run is one experiment: its later sessions continue the same model on the same data. Every key of a training config is
in one of three tables. FREE_KEYS may change: they decide how long, where and how fast a run trains and what it reports.
INPUT_KEYS name files, which are compared by content (train/run_inputs.py). FIXED_KEYS must stay equal.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from fnmatch import fnmatch
from typing import Any

import yaml

from maxhydra.config.declare import MISSING, Options, Schema
from maxhydra.config.errors import Problem, did_you_mean, show
from maxhydra.config.fields import Field, fields, walk
from maxhydra.config.migrations import migrate_config
from maxhydra.config.registry import task_schemas
from maxhydra.config.schema.config import Config
from maxhydra.config.schema.model import Model
from maxhydra.record.redact import redact_config

ACCEPT_CONFIG = "run.accept_changed_config"
# libyaml is ten times faster, if PyYAML was built with it.
_LOADER: type[yaml.CSafeLoader] | type[yaml.SafeLoader] = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader

# fnmatch patterns of dotted keys; `*` also matches dots.
FREE_KEYS = (
    # Name, place and description of the run.
    *("run.name", "run.outputs", "run.staging", "run.tags", "run.notes", "run.accept_changed_*"),
    *("tracker.*", "objective", "train.callbacks*"),
    # Length, and the lengths in the learning rate schedule that follow from it.
    *("train.steps", "train.epochs", "optimizer.schedule.warmup_steps", "optimizer.schedule.decay_steps"),
    *("optimizer.schedule.steps", "optimizer.schedule.restarts"),
    # Reports and evaluations.
    *("train.log_every", "train.progress", "train.sample.*", "train.eval_every", "train.eval_start"),
    *("train.eval_batches", "train.target_eval_loss", "train.early_stop.*", "train.evals.*"),
    *("data.eval_sets*", "task.evaluation.*"),
    *("task.keep_rollouts", "task.on_policy.keep_rollouts"),
    *("checkpoint.mode", "checkpoint.every", "checkpoint.keep", "checkpoint.keep_best", "checkpoint.best_metric"),
    *("checkpoint.persist_every", "checkpoint.local_every", "checkpoint.local_folder", "checkpoint.peer_copies"),
    *("checkpoint.max_overhead", "checkpoint.single_replica", "checkpoint.every_minutes", "checkpoint.first_minutes"),
    # Hardware, sharding, kernels and memory. The batch over all devices is compared separately.
    *("hardware.platform", "hardware.device_kinds", "hardware.peak_tflops*", "hardware.memory_gib"),
    *("hardware.bandwidth_gb_s", "hardware.xla_flags", "hardware.flag_sets*", "hardware.compilation_cache"),
    *("hardware.compiled", "hardware.dump_step", "hardware.links.*", "optimizer.offload*"),
    *("hardware.simulated_devices", "hardware.debug_nans", "hardware.distributed.*", "hardware.gke.*"),
    *("mesh.*", "task.rollout_mesh", "task.teacher.mesh", "train.per_device_batch_size", "train.grad_accum"),
    *("train.elastic", "task.rollout_devices", "task.teacher.devices"),
    *("train.loss_chunk", "model.kernels.*", "model.remat.*", "model.scan_unroll", "model.expert_parallel.*"),
    *("task.engine.max_batch", "task.engine.cache_tokens", "task.engine.page_size", "task.engine.max_context"),
    *("task.engine.prefill_chunk", "task.engine.burst", "task.engine.warm_up", "task.engine.prefix_cache"),
    *("task.engine.prefill_devices", "task.engine.speculation.*"),
    *("task.on_policy.engine.max_batch", "task.on_policy.engine.cache_tokens", "task.on_policy.engine.page_size"),
    *("task.on_policy.engine.max_context", "task.on_policy.engine.prefill_*", "task.on_policy.engine.burst"),
    *("task.on_policy.engine.warm_up", "task.on_policy.engine.prefix_cache", "task.on_policy.engine.speculation.*"),
    *("data.workers", "data.prefetch", "data.cache", "data.fingerprint", "reward.workers", "reward.timeout"),
    *("environment.timeout", "environment.url", "environment.memory_limit_gib", "environment.concurrency"),
    *("reward.memory_limit_gib", "train.allow_no_learning", "train.checks"),
    *(f"reward.terms.*.{key}" for key in ("concurrency", "judge.url", "judge.key_variable", "judge.retries")),
    # Reactions to faults that end a session: the next one may continue past them.
    *("train.on_nonfinite", "train.spike.*", "data.on_error", "data.max_characters", "reward.on_error"),
    *("watchdog.*", "profile.*", "statistics.*", "alerts.*"),
    # A mixture continues each source at its position with the new shares (data/stream.py).
    *("data.weights*", "data.temperature"),
    # No effect on the weights' function: the option file of the model, and the longest sequence that it accepts.
    *("model.path", "model.context_length"),
)
INPUT_KEYS = (
    *("checkpoint.load_parameters", "checkpoint.load_full_state", "task.teacher.weights"),
    "reward.terms.*.weights",
    *("data.path", "data.eval_path", "data.sources.*.path", "data.sources.*.eval_path"),
    *("data.remap_from", "data.remap_to", "data.sources.*.remap_from", "data.sources.*.remap_to"),
    *("data.tokenizer.path", "data.tokenizer.chat_template"),
)
_CORPUS_KEYS = (
    *("source", "format", "name", "config", "split", "eval_split", "eval_name", "data_dir", "streaming"),
    *("repetition_filter", "digits", "operators", "problems", "eval_fraction", "record_type", "columns*", "formatting"),
)
FIXED_KEYS = (
    *("run.seed", "run.weights_seed", "run.data_seed", "optimizer.eps_root", "optimizer.grad_dtype"),
    *("optimizer.cautious_decay", "optimizer.rate_ratios*", "optimizer.layer_decay", "optimizer.ema_decay"),
    *("optimizer.matrix_weight_decay", "optimizer.update_rms", "optimizer.neuron_b2"),
    *("optimizer.precondition_every", "optimizer.precondition_max_dim"),
    *("hardware.matmul_precision", "adapter.*", "quantization.*"),
    *("optimizer.kind", "optimizer.learning_rate", "optimizer.schedule.kind", "optimizer.schedule.final_fraction"),
    *("optimizer.schedule.decay_style", "optimizer.weight_decay", "optimizer.no_decay", "optimizer.trainable"),
    *("optimizer.clip_norm", "optimizer.b1", "optimizer.b2", "optimizer.b2_decay", "optimizer.eps"),
    *("optimizer.momentum", "optimizer.newton_schulz_steps", "optimizer.min_dim_factored", "optimizer.mu_dtype"),
    *("model.num_layers", "model.emb_dim", "model.mlp_dim", "model.num_heads", "model.num_kv_heads", "model.head_dim"),
    *("model.vocab_size", "model.prefix", "model.pattern", "model.kinds*", "model.head", "model.norm"),
    *("model.norm_eps", "model.mtp.*", "model.embedding.*", "model.logit_softcap", "model.per_layer.*"),
    *("model.dropout", "model.init_scale", "model.vision.*", "model.audio.*", "model.transfer.*", "model.dtypes.*"),
    *("model.qk_clip", "model.hyper_connections.*", "model.multipliers.*", "model.diffusion.*", "model.speech.*"),
    *("train.seq_len", "train.ramp.*", "train.z_loss", "train.diloco.*", "optimizer.moments", "optimizer.sparsity.*"),
    *(f"data.{key}" for key in _CORPUS_KEYS),
    *("data.sources", *(f"data.sources.*.{key}" for key in _CORPUS_KEYS)),
    *("data.tokenizer.kind", "data.tokenizer.add_bos", "data.tokenizer.add_eos", "data.tokenizer.bos"),
    *("data.tokenizer.eos", "data.tokenizer.pad", "data.packing.*", "data.shuffle", "data.streams"),
    *("data.overfit_batches", "data.loss_on", "data.thinking", "data.max_images"),
    *("data.max_clips", "data.max_seconds"),
    *("reward.terms", "reward.answer", "reward.passes", "reward.pass_at"),
    *(f"reward.terms.*.{key}" for key in ("kind", "weight", "pattern", "target", "buffer", "function", "scope")),
    *(f"reward.terms.*.judge.{key}" for key in ("model", "rubric", "max_tokens", "temperature")),
    *("task.name", "task.loss", "task.beta", "task.label_smoothing", "task.nll_weight", "task.margin"),
    *("task.desirable_weight", "task.undesirable_weight", "task.reference", "task.centering"),
    *("environment.kind", "environment.function", "environment.tools", "environment.max_turns"),
    *("environment.turn_tokens", "environment.action", "environment.observation"),
    *("task.group_size", "task.max_tokens", "task.clip.*", "task.kl.*", "task.scale", "task.mask_degenerate"),
    *("task.baseline", "task.entropy_bonus", "task.mask_truncated", "task.importance", "task.importance_floor"),
    *("task.critic.*", "task.router_replay"),
    *("task.rounds", "task.importance_cap", "task.iterations", "task.off_policy_steps", "task.max_staleness"),
    *("task.engine.cache_dtype", "task.engine.deterministic"),
    *("task.teacher.align", "task.teacher.top_k"),
    # Objects of the user, whose code is compared by content; their settings, the sections `options`, are fixed too.
    *("train.loss.function", "optimizer.function"),
    *("task.teacher.model", "task.teacher.overrides", "task.divergence", "task.alpha", "task.alpha_end"),
    *("task.beta_end", "task.temperature", "task.temperature_end", "task.course", "task.features.*"),
    *(
        "task.init_layers",
        "task.learn_to_init.*",
        "task.on_policy.fraction",
        "task.on_policy.max_tokens",
        "task.on_policy.temperature",
    ),
    *("task.on_policy.engine.cache_dtype", "task.on_policy.engine.deterministic"),
)


@dataclasses.dataclass(frozen=True)
class ConfigChange:
    """A key whose value differs from that of the run's last session; a value is None if the key was absent."""

    key: str
    before: Any
    now: Any

    @property
    def is_free(self) -> bool:
        return matches_key(self.key, FREE_KEYS)

    @property
    def is_input(self) -> bool:
        return matches_key(self.key, INPUT_KEYS)

    def __str__(self) -> str:
        return f"{self.key} {show(self.before)} -> {show(self.now)}"


def matches_key(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(key, pattern) for pattern in patterns)


def config_changes(stored_yaml: str, config: Config, *, hidden: str) -> list[ConfigChange]:
    """Keys that differ between a run's config.yaml and a config. A value that contains `hidden` was not stored."""
    stored, given = _read(stored_yaml), _plain(config)
    task = str(given.get("task", {}).get("name"))
    found = _section_changes(Config, stored, given, "")
    before, now = stored.get("task", {}), given.get("task", {})
    if before.get("name") == now.get("name") and task in task_schemas():
        found = [change for change in found if not change.key.startswith("task.")]
        found += _section_changes(task_schemas()[task], before, now, "task")
    found = _without_new_videos(found, stored.get("model"))
    # A value of a variable is stored as its reference.
    found = [change for change in found if change.before != redact_config(change.now, change.key)]
    return [change for change in found if hidden not in str(change.before) and hidden not in str(change.now)]


def model_changes(stored_yaml: str, model: Model) -> list[ConfigChange]:
    """Keys of the model that differ between a run's config.yaml and another model."""
    stored = _read(stored_yaml).get("model")
    return _without_new_videos(_section_changes(Model, stored, _plain(model), "model"), stored)


def _without_new_videos(changes: list[ConfigChange], stored_model: Any) -> list[ConfigChange]:
    """Changes other than those of videos, if the stored model took none: its weights do not depend on them."""
    if _mapping(_mapping(stored_model).get("vision")).get("video_id") is not None:
        return changes
    return [change for change in changes if not change.key.startswith("model.vision.video")]


def fixed_problems(changes: Iterable[ConfigChange], accepted: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each change of a key that may not change, unless `accepted` names it or a section of it."""
    for change in changes:
        if not (change.is_free or change.is_input or is_accepted(change.key, accepted)):
            yield changed_problem(change)


def changed_problem(change: ConfigChange) -> Problem:
    reason = f"was {show(change.before)} in the last session of this run, and cannot change when a run resumes"
    hint = f"keep the value, choose another run.name, or accept the change with {ACCEPT_CONFIG}=[{change.key}]"
    return Problem(change.key, reason, value=change.now, accepted=show(change.before), hint=hint)


def is_accepted(key: str, accepted: Iterable[str]) -> bool:
    """Whether a list of keys contains a key or a section that it belongs to."""
    return any(key == name or key.startswith(f"{name}.") for name in accepted)


def unknown_keys(names: Iterable[str], config: Config) -> Iterator[Problem]:
    """Yield a problem for each name in run.accept_changed_config that is not a key or section of the config."""
    task = [(path, field) for path, field in walk(type(config.task), "task")]
    known = [path for path, _ in [*walk(Config), *task]]
    known += [f"{path}.*" for path, field in walk(Config) if field.spec.type is Options]
    for name in names:
        if not any(fnmatch(name, path) for path in known):
            hint = did_you_mean(name, known) or "name keys as on the command line"
            yield Problem(ACCEPT_CONFIG, "contains an unknown key", value=name, accepted="config keys", hint=hint)


def _section_changes(schema: type, before: Any, now: Any, path: str) -> list[ConfigChange]:
    """Compare the plain values of two sections. A key that an older version did not store has its default."""
    before, now = _mapping(before), _mapping(now)
    changes: list[ConfigChange] = []
    for name, field in fields(schema).items():
        key = f"{path}.{name}" if path else name
        if field.spec.type is Options:
            changes += _option_changes(_mapping(before.get(name)), _mapping(now.get(name)), key)
        elif field.spec.is_section:
            changes += _section_changes(field.spec.type, before.get(name), now.get(name), key)
        elif field.spec.item is not None and field.spec.item.is_section:
            changes += _entry_changes(field, before.get(name) or {}, now.get(name) or {}, key)
        else:
            values = [values.get(name, _plain_default(field)) for values in (before, now)]
            if values[0] != values[1]:
                changes.append(ConfigChange(key, *values))
    return changes


def _option_changes(before: Mapping[str, Any], now: Mapping[str, Any], path: str) -> list[ConfigChange]:
    """Compare the settings of an object of the user, whose class another version of its code may have changed."""
    names = dict.fromkeys([*before, *now])
    changes = [ConfigChange(f"{path}.{name}", before.get(name), now.get(name)) for name in names]
    return [change for change in changes if change.before != change.now]


def _mapping(values: Any) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else {}


def _entry_changes(field: Field, before: Mapping[str, Any], now: Mapping[str, Any], path: str) -> list[ConfigChange]:
    """Compare two mappings of names to sections, such as layer kinds or data sources."""
    assert field.spec.item is not None
    changes: list[ConfigChange] = []
    for name in dict.fromkeys([*before, *now]):
        key = f"{path}.{name}"
        if name in before and name in now:
            changes += _section_changes(field.spec.item.type, before[name], now[name], key)
        else:
            changes.append(ConfigChange(key, before.get(name), now.get(name)))
    return changes


def _plain_default(field: Field) -> Any:
    """The default as config.yaml stores it; None for a required key."""
    return None if field.default is MISSING else _plain(field.default)


def _plain(value: Any) -> Any:
    """A value as config.yaml stores it."""
    if isinstance(value, Schema):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, Enum) else value


def _read(config_yaml: str) -> dict[str, Any]:
    content = yaml.load(config_yaml, Loader=_LOADER)
    return migrate_config(content) if isinstance(content, dict) else {}
