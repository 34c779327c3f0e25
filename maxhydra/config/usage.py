"""Which keys have an effect in a run: by its task, and by the values of other keys.

A value on the command line that has no effect is an error, which names what would use it. Options and experiments may
set more than a task uses, because several tasks share them. Tasks that describe or measure a training run accept its
whole config: their command is that of the run with another task.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from typing import Any

from maxhydra.config.errors import UNSET, Problem
from maxhydra.config.plug_ins import is_plug_in
from maxhydra.config.registry import modules
from maxhydra.config.schema.audio import Audio, AudioEncoder
from maxhydra.config.schema.checkpoint import SaveMode
from maxhydra.config.schema.config import DESCRIBING_TASKS, ENGINE_TASKS, NEXT_TOKEN_TASKS, TRAINING_TASKS, Config
from maxhydra.config.schema.data import IMAGE_TYPES, READY_ROWS, Corpus, PackingMethod
from maxhydra.config.schema.encoders import has_audio
from maxhydra.config.schema.kernels import AttentionBackend
from maxhydra.config.schema.metrics import unlogged_metric
from maxhydra.config.schema.model import Dtype
from maxhydra.config.schema.quantization import QuantizationKind
from maxhydra.config.schema.reward import EnvironmentKind
from maxhydra.config.schema.speech import Speech
from maxhydra.config.schema.tasks.inference import DecodeTask, SpeechOutput
from maxhydra.config.schema.vision import Vision
from maxhydra.record.redact import redact_config

PATCH_FIELDS = ("min_patches", "fill_patches", "axis_positions", "frames", "deepstack", "video_id")
VISION_FIELDS, AUDIO_FIELDS, SPEECH_FIELDS, SPOKEN_FIELDS = (
    [field.name for field in dataclasses.fields(kind)] for kind in (Vision, Audio, Speech, SpeechOutput)
)
# Keys of the talker that change its inputs and outputs, but not its weights.
SPOKEN_KEYS = ("special_codes", "hidden_layer", "speakers", "end_code", "prompt_codes", "pad_code", "begin_code")
MEASURING_TASKS = ("bench", "tune")
# Tasks whose command contains the config of a training run.
OF_TRAINING = (*TRAINING_TASKS, *MEASURING_TASKS, *DESCRIBING_TASKS)
# Tasks that load weights, and those that read the records of a corpus.
WITH_WEIGHTS = (*OF_TRAINING, *ENGINE_TASKS, "convert", "eval", "score", "teacher_logits")
WITH_RECORDS = (*OF_TRAINING, "teacher_logits", "tokenize", "train_tokenizer")
WITH_TOKENIZER = (*WITH_RECORDS, *ENGINE_TASKS, "convert", "eval", "score")
WITH_RUN = (*OF_TRAINING, "train_tokenizer")
ON_POLICY = ("grpo", *MEASURING_TASKS, *DESCRIBING_TASKS)
# Patterns of keys and the tasks that use them; the first that matches applies, and a key without one is used by all.
TASKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward.*", ON_POLICY),
    ("environment.*", ON_POLICY),
    ("optimizer.*", OF_TRAINING),
    ("tracker.*", OF_TRAINING),
    ("watchdog.*", OF_TRAINING),
    ("statistics.*", OF_TRAINING),
    *((f"model.speech.talker.{key}*", ("decode", "convert")) for key in SPOKEN_KEYS),
    *((f"{section}.*", WITH_WEIGHTS) for section in ("model", "mesh", "quantization", "adapter")),
    *((key, (*WITH_RUN, "eval")) for key in ("run.tags", "run.notes")),
    *((key, WITH_RUN) for key in ("run.staging", "alerts.*")),
    ("run.accept_changed_*", OF_TRAINING),
    ("checkpoint.load_parameters", WITH_WEIGHTS),
    ("checkpoint.*", OF_TRAINING),
    ("train.loss.*", (*NEXT_TOKEN_TASKS, *MEASURING_TASKS, *DESCRIBING_TASKS)),
    ("train.seq_len", WITH_WEIGHTS),
    ("train.per_device_batch_size", (*OF_TRAINING, "teacher_logits", "score")),
    ("train.loss_chunk", (*OF_TRAINING, "teacher_logits", "score")),
    ("train.progress", (*OF_TRAINING, "eval", "score", "teacher_logits", "tokenize", "train_tokenizer")),
    ("train.*", OF_TRAINING),
    ("data.tokenizer.*", WITH_TOKENIZER),
    ("data.packing.*", (*OF_TRAINING, "teacher_logits")),
    ("data.overfit_batches", OF_TRAINING),
    ("data.*", (*WITH_RECORDS, "score")),
)


@dataclasses.dataclass(frozen=True)
class Condition:
    """Keys that have an effect only with certain values of other keys."""

    keys: tuple[str, ...]
    holds: Callable[[Config], bool]
    needs: str
    """What to set so that they have one."""


CONDITIONS = (
    Condition(
        ("profile.*",),
        lambda c: c.task.name != "decode" or c.model.diffusion.block_size is None,
        "model.diffusion.block_size=null",
    ),
    Condition(("tracker.entity", "tracker.mode"), lambda c: "wandb" in c.tracker.backends, "tracker=wandb"),
    Condition(("tracker.uri",), lambda c: "mlflow" in c.tracker.backends, "tracker=mlflow"),
    Condition(
        ("tracker.project",),
        lambda c: bool({"wandb", "mlflow", "trackio"} & {*c.tracker.backends}),
        "tracker=wandb, mlflow or trackio",
    ),
    Condition(
        ("checkpoint.every*", "checkpoint.keep*", "checkpoint.first_minutes", "checkpoint.best_metric"),
        lambda c: c.checkpoint.mode is not SaveMode.off,
        "checkpoint.mode=asynchronous",
    ),
    Condition(("checkpoint.best_metric",), lambda c: c.checkpoint.keep_best > 0, "checkpoint.keep_best=1 or more"),
    Condition(
        ("checkpoint.first_minutes",), lambda c: c.checkpoint.every_minutes is not None, "checkpoint.every_minutes"
    ),
    Condition(("checkpoint.local_folder",), lambda c: c.checkpoint.local_every is not None, "checkpoint.local_every"),
    Condition(
        ("train.spike.decay", "train.spike.warmup_steps"),
        lambda c: c.train.spike.sigmas is not None,
        "train.spike.sigmas",
    ),
    Condition(("train.steps",), lambda c: c.train.epochs is None, "train.epochs=null, which otherwise gives the steps"),
    Condition(
        ("train.early_stop.min_delta",),
        lambda c: c.train.early_stop.patience is not None,
        "train.early_stop.patience",
    ),
    Condition(
        tuple(f"train.evals.{key}" for key in ("limit", "shots", "harness_path", "batch", "every", "max_context")),
        lambda c: bool(c.train.evals.tasks),
        "train.evals.tasks",
    ),
    Condition(
        ("train.ramp.increment", "train.ramp.sequences"), lambda c: c.train.ramp.start is not None, "train.ramp.start"
    ),
    Condition(
        ("train.diloco.learning_rate", "train.diloco.momentum", "train.diloco.fragments"),
        lambda c: c.train.diloco.period is not None,
        "train.diloco.period",
    ),
    Condition(
        tuple(f"train.sample.{key}" for key in ("prompt", "temperature", "at_evaluations")),
        lambda c: c.train.sample.tokens > 0,
        "train.sample.tokens=1 or more",
    ),
    Condition(
        ("alerts.events", "alerts.spike_*", "alerts.min_seconds", "alerts.timeout"),
        lambda c: c.alerts.command is not None or c.alerts.webhook is not None,
        "alerts.command or alerts.webhook",
    ),
    Condition(
        tuple(
            f"environment.{key}" for key in ("max_turns", "turn_tokens", "timeout", "concurrency", "memory_limit_gib")
        ),
        lambda c: c.environment.kind is not EnvironmentKind.none,
        "an option of the group environment",
    ),
    Condition(
        tuple(f"quantization.{key}" for key in ("targets", "group", "history", "backward", "activations")),
        lambda c: c.quantization.kind is not QuantizationKind.none,
        "an option of the group quantization",
    ),
    Condition(
        ("model.dtypes.softmax",),
        lambda c: (
            c.model.dtypes.softmax is Dtype.float32
            or c.model.kernels.attention in (AttentionBackend.auto, AttentionBackend.xla)
        ),
        "model.kernels.attention=xla; other kernels compute the softmax in float32",
    ),
    Condition(
        tuple(f"model.vision.{field}*" for field in VISION_FIELDS if field != "num_layers"),
        lambda c: c.model.vision.num_layers is not None,
        "model.vision.num_layers",
    ),
    Condition(
        tuple(f"model.vision.tiles.{name}_id" for name in ("column", "row", "whole")),
        lambda c: c.model.vision.tiles.max_tiles is not None,
        "model.vision.tiles.max_tiles",
    ),
    Condition(
        tuple(f"model.vision.{name}" for name in PATCH_FIELDS),
        lambda c: c.model.vision.max_patches is not None,
        "model.vision.max_patches",
    ),
    Condition(
        ("model.vision.min_patches", "model.vision.videos.min_patches"),
        lambda c: not c.model.vision.fill_patches,
        "model.vision.fill_patches=false",
    ),
    Condition(
        ("model.vision.causal_without_window",),
        lambda c: c.model.vision.bidirectional,
        "model.vision.bidirectional",
    ),
    Condition(
        ("model.vision.projector.norm_scale",),
        lambda c: c.model.vision.projector.norm,
        "model.vision.projector.norm",
    ),
    Condition(
        tuple(f"model.audio.{field}*" for field in AUDIO_FIELDS if field != "num_layers"),
        lambda c: c.model.audio.num_layers is not None,
        "model.audio.num_layers",
    ),
    Condition(
        tuple(f"model.audio.{name}" for name in ("chunk_frames", "window_chunks", "conv_dim")),
        lambda c: c.model.audio.encoder is AudioEncoder.transformer,
        "model.audio.encoder=transformer",
    ),
    Condition(
        ("model.audio.conformer*",),
        lambda c: c.model.audio.encoder is AudioEncoder.conformer,
        "model.audio.encoder=conformer",
    ),
    Condition(
        tuple(f"model.speech.{field}*" for field in SPEECH_FIELDS if field != "codebooks"),
        lambda c: c.model.speech.codebooks is not None,
        "model.speech.codebooks",
    ),
    Condition(
        tuple(f"task.speech.{field}" for field in SPOKEN_FIELDS if field != "folder"),
        lambda c: not isinstance(c.task, DecodeTask) or c.task.speech.folder is not None,
        "task.speech.folder",
    ),
    Condition(
        ("data.max_images",),
        lambda c: any(corpus.record_type in IMAGE_TYPES for corpus in c.data.corpora().values()),
        f"data.record_type={' or '.join(IMAGE_TYPES)}",
    ),
    Condition(
        ("data.max_clips", "data.max_seconds"),
        lambda c: any(has_audio(corpus.record_type, c.model.vision) for corpus in c.data.corpora().values()),
        "data.record_type=audio_chat, or image_chat with model.vision.videos.use_audio_in_video",
    ),
    Condition(("data.weights*", "data.temperature"), lambda c: c.data.source == "mixture", "data=mixture"),
    Condition(("data.temperature",), lambda c: not c.data.weights, "data.weights={}, which it replaces"),
    Condition(
        ("data.packing.window",),
        lambda c: c.data.packing.method is PackingMethod.none or any(map(_is_buffered, c.data.corpora().values())),
        "documents to pack: data.record_type=text, tokens or chat, of files; or records with images",
    ),
    Condition(
        ("data.packing.max_segments", "data.packing.method"),
        lambda c: c.data.packing.method is PackingMethod.none or any(map(_packs(c), c.data.corpora().values())),
        "documents to pack: data.record_type=text, tokens or chat, of files",
    ),
    Condition(
        ("data.packing.overlong",),
        lambda c: any(corpus.source not in READY_ROWS for corpus in c.data.corpora().values()),
        "a source of documents, such as data=grain",
    ),
)
# Sources that use a key of data; `hf` may take its split from files.
SOURCES = {
    "format": ("grain",),
    "config": ("hf",),
    "split": ("hf", "tfds", "c4_mlperf"),
    "data_dir": ("hf", "tfds", "c4_mlperf"),
    "streaming": ("hf",),
    "remap_from": ("olmo",),
    "remap_to": ("olmo",),
    "repetition_filter": ("olmo",),
    "digits": ("arithmetic",),
    "operators": ("arithmetic",),
    "problems": ("arithmetic", "reasoning_gym", "shapes", "tones"),
    "columns": ("grain", "hf", "tfds", "c4_mlperf"),
    "formatting": ("grain", "hf", "tfds", "arithmetic", "reasoning_gym"),
}
PACKED_TYPES = ("text", "tokens", "chat", "teacher")


def unused_problems(config: Config, given: Iterable[tuple[str, Any]]) -> Iterator[Problem]:
    """Yield a problem for each key of the command line, with its value, that has no effect in this run."""
    task = config.task.name
    for key, value in given:
        tasks = using_tasks(key)
        if task not in tasks and not is_plug_in(task):
            shown = [name for name in tasks if name not in (*MEASURING_TASKS, *DESCRIBING_TASKS)]
            accepted = f"task={', '.join(shown)}"
            yield Problem(key, f"has no effect in task={task}", value=_shown(key, value), accepted=accepted)
            continue
        if (needs := _missing(config, key)) is not None:
            yield Problem(key, "has no effect in this run", value=_shown(key, value), hint=f"needs {needs}")
    keys = [key for key, _ in given]
    if "objective" in keys and task not in DESCRIBING_TASKS and not is_plug_in(task):
        yield from unlogged_metric("objective", config.objective, task=task, train=config.train)


def unused_keys(config: Config, keys: Iterable[str]) -> set[str]:
    """Return the keys that have no effect in a run, whatever their values."""
    task = config.task.name
    keys = list(keys)
    used = [key for key in keys if task in using_tasks(key) or is_plug_in(task)]
    return {*keys} - {key for key in used if _missing(config, key) is None}


def using_tasks(key: str) -> tuple[str, ...]:
    """Tasks in which a key can have an effect."""
    return next((tasks for pattern, tasks in TASKS if fnmatch(key, pattern)), tuple(modules("maxhydra.tasks")))


def _missing(config: Config, key: str) -> str | None:
    """What a key needs to have an effect; None if it has one."""
    for condition in CONDITIONS:
        if any(fnmatch(key, pattern) for pattern in condition.keys) and not condition.holds(config):
            return condition.needs
    section, _, rest = key.partition(".")
    if section != "data":
        return None
    corpus: Corpus = config.data
    name = rest.partition(".")[0]
    if name == "sources" and rest.count(".") >= 2:
        _, source_name, name = rest.split(".")[:3]
        corpus = config.data.sources.get(source_name, config.data)
    sources = SOURCES.get(name)
    if sources is None or corpus.source in sources or is_plug_in(corpus.source):
        return None
    return " or ".join(f"source={source}" for source in sources)


def _is_packed(corpus: Corpus) -> bool:
    return corpus.source not in READY_ROWS and corpus.record_type in PACKED_TYPES


def _packs(config: Config) -> Callable[[Corpus], bool]:
    """Whether documents of a corpus share sequences; conversations with images only if a method is chosen."""
    method = config.data.packing.method
    return lambda corpus: (
        _is_packed(corpus) or (corpus.record_type == "image_chat" and method is not PackingMethod.auto)
    )


def _is_buffered(corpus: Corpus) -> bool:
    return _is_packed(corpus) or corpus.record_type in IMAGE_TYPES


def _shown(key: str, value: Any) -> Any:
    """A value for a message, without secrets. That of a whole section is left out."""
    return UNSET if isinstance(value, dict) else redact_config(value, key)
