"""Checks of training objectives that need the whole config: what block diffusion supports."""

from collections.abc import Iterator

from maxhydra.config.errors import Problem, show
from maxhydra.config.schema.hardware import Mesh
from maxhydra.config.schema.layer_kind import Kind, Mixer
from maxhydra.config.schema.model import Model, Positions
from maxhydra.config.schema.run import Task, Train

# Tasks that support block diffusion, and those that describe one of them and do not depend on the loss.
DIFFUSION_TASKS = ("pretrain", "sft", "decode")
DIFFUSION_DESCRIPTIONS = ("compile", "inspect", "inspect_data")
# Sampling parameters of decoding by block diffusion; the others have no form for tokens of a block sampled together.
DIFFUSION_SAMPLING = ("max_tokens", "temperature", "seed", "stop", "ignore_eos")
# Engine settings of it, and the section that Engine.check_model checks.
DIFFUSION_ENGINE = ("max_context", "speculation")
SECTION = "model.diffusion.block_size"


def diffusion_problems(model: Model, *, task: Task, train: Train, mesh: Mesh) -> Iterator[Problem]:
    """Yield what block diffusion does not support; paths are those of the config."""
    size, mask = model.diffusion.block_size, model.diffusion.mask_token
    if size is None:
        return
    if task.name not in (*DIFFUSION_TASKS, *DIFFUSION_DESCRIPTIONS):
        accepted = f"null, or task={', '.join(DIFFUSION_TASKS)}"
        yield Problem(SECTION, f"is not supported by task={task.name}", value=size, accepted=accepted)
    if mask is not None and mask >= model.vocab_size:
        reason = f"is not in the vocabulary of {model.vocab_size} tokens"
        yield Problem("model.diffusion.mask_token", reason, value=mask, accepted=f"0 to {model.vocab_size - 1}")
    required: dict[str, tuple[object, object]] = {
        "model.mtp.depth": (model.mtp.depth, 0),
        "model.vision.num_layers": (model.vision.num_layers, None),
        "model.qk_clip": (model.qk_clip, None),
        "train.loss.function": (train.loss.function, None),
        "train.evals.tasks": (train.evals.tasks, []),
        **{f"mesh.{axis}": (getattr(mesh, axis), 1) for axis in ("stage", "sequence")},
        **{f"mesh.dcn.{axis}": (getattr(mesh.dcn, axis), 1) for axis in ("stage", "sequence")},
    }
    for name in dict.fromkeys(model.layer_kinds() if model.pattern else model.prefix):
        if name in model.kinds:
            required |= {f"model.kinds.{name}.{key}": pair for key, pair in _kind_requirements(model.kinds[name])}
    for path, (value, only) in required.items():
        if value != only:
            accepted = show(only)
            yield Problem(path, f"is not supported with {SECTION}", value=value, accepted=accepted)
    if model.embedding.positions is Positions.learned:
        reason = f"is not supported with {SECTION}, which has a token at position train.seq_len"
        yield Problem("model.embedding.positions", reason, value="learned", accepted="none, sinusoidal")
    if task.name == "decode":
        yield from _decoding_problems(task)


def _kind_requirements(kind: Kind) -> Iterator[tuple[str, tuple[object, object]]]:
    """Keys of a layer kind, their values, and the only values with which attention follows the mask of the blocks."""
    yield "mixer", (kind.mixer, Mixer.attention)
    yield "attention.window", (kind.attention.window, None)
    yield "attention.chunk", (kind.attention.chunk, None)
    yield "attention.moba.block_size", (kind.attention.moba.block_size, None)
    yield "engram.vocab_sizes", (kind.engram.vocab_sizes, [])


def _decoding_problems(task: Task) -> Iterator[Problem]:
    """Sampling parameters and engine settings that decoding by blocks does not have."""
    for section, accepted_names in (("sampling", DIFFUSION_SAMPLING), ("engine", DIFFUSION_ENGINE)):
        values = getattr(task, section, None)
        for name, value in vars(values).items() if values is not None else ():
            if name not in accepted_names and value != (default := getattr(type(values), name)):
                reason, accepted = f"is not supported with {SECTION}", f"{show(default)}, the default"
                yield Problem(f"task.{section}.{name}", reason, value=value, accepted=accepted)
