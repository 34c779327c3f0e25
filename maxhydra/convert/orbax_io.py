"""Weights in checkpoints of our own, which Orbax wrote: where they lie, and whether they belong to the model."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from omegaconf import OmegaConf

from maxhydra.config import ConfigError, Problem
from maxhydra.config.compose.validate import section_from
from maxhydra.config.migrations import migrate_config
from maxhydra.config.schema.quantization import Quantization

Tree = Any
FORMAT = "quantization.yaml"
# Orbax tells its own story at every turn, tracebacks of its threads included; what a user needs, our messages say.
for noisy in ("absl", "asyncio"):
    logging.getLogger(noisy).setLevel(logging.CRITICAL)


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, in order."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit() and entry.is_dir())


def find_checkpoint(key: str, location: str) -> Path:
    """A run folder, its checkpoints folder, or one checkpoint -> one checkpoint."""
    root = Path(location).expanduser().resolve()
    if (root / "params").is_dir():
        return root
    for folder in (root / "checkpoints", root):
        if steps := steps_in(folder):
            return folder / str(steps[-1])
    reason = "holds no checkpoint" if root.is_dir() else "is not a folder"
    accepted = "a run folder, its checkpoints folder, or one checkpoint in it"
    raise ConfigError(Problem(key, reason, value=location, accepted=accepted))


def read_parameters(key: str, path: Path, abstract_params: Tree) -> Tree:
    """The weights of a checkpoint on the shapes, types and shardings of `abstract_params`."""
    with readable(key, path):
        require_same(path, "params", abstract_params)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
            items = reader.restore(path, args=ocp.args.Composite(params=ocp.args.StandardRestore(abstract_params)))
    return items.params


@contextmanager
def readable(key: str, path: Path) -> Iterator[None]:
    """ConfigError where a checkpoint that the config field `key` names is not whole, such as one copied in part."""
    try:
        yield
    except (ConfigError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except Exception as error:  # Orbax and what it stores in raise anything
        reason = f"cannot be read: {first_line(error)}"
        hint = "copy it anew, or name an earlier checkpoint, RUN/checkpoints/STEP"
        raise ConfigError(Problem(key, reason, value=path, hint=hint)) from error


def first_line(error: BaseException) -> str:
    """What an error says, shortly."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"\s+", " ", text)[:200]


def write_format(folder: Path, quantization: Quantization) -> None:
    """Say in a checkpoint in which formats its weights are kept."""
    (folder / FORMAT).write_text(OmegaConf.to_yaml(OmegaConf.structured(quantization)), encoding="utf-8")


def read_format(checkpoint: Path) -> Quantization | None:
    """What `write_format` said; None where weights are plain numbers."""
    path = checkpoint / FORMAT
    if not path.is_file():
        return None
    values = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    assert isinstance(values, dict)
    return section_from(Quantization, migrate_config(values, "quantization"), path="quantization", source=str(path))


def require_same(path: Path, item: str, wanted: Tree) -> None:
    """Refuse a checkpoint whose arrays differ in name or shape, naming the first that does."""
    with ocp.StandardCheckpointer() as reader:
        stored = reader.metadata(path / item).item_metadata
    if stored is None:
        raise ValueError(f"the list of arrays in {item} is missing or damaged")
    have = {name: tuple(leaf.shape) for name, leaf in _named(stored.tree).items()}
    want = {name: tuple(leaf.shape) for name, leaf in _named(ocp.tree.serialize_tree(wanted)).items()}
    for name in sorted({*have, *want}):
        if have.get(name) == want.get(name):
            continue
        told = f"{item}/{name} is {have.get(name, 'not there')}, this run has {want.get(name, 'no such array')}"
        reason = f"holds another {'model' if item == 'params' else 'optimizer or state'}: {told}"
        hint = "choose another run.name, or the model that it was trained with"
        if item == "rest":
            hint = "choose another run.name; checkpoint.load_parameters takes the weights alone"
        raise ConfigError(Problem("checkpoint", reason, value=path, hint=hint))


def _named(tree: Tree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in leaves
        if leaf is not None and leaf != {} and leaf != []
    }
