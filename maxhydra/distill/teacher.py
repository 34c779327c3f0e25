"""The teacher beside the student: which model it is, its weights, and how they lie on the devices."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from omegaconf import DictConfig, OmegaConf

from maxhydra import model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.mesh import Mesh as MeshConfig
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.tasks.distill import Teacher
from maxhydra.config.serialize import from_yaml
from maxhydra.convert.adapter_lineage import run_folder
from maxhydra.convert.load import load_weights
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder, remeshed
from maxhydra.train.step import Batch

Tree = Any


@dataclasses.dataclass(frozen=True)
class OnlineTeacher:
    """A teacher whose weights lie beside the student's, in the same step."""

    model: ModelDef
    sharder: Sharder

    def load(self, location: str) -> Tree:
        """Its weights, in the format of the computation: nothing is added to them."""
        self.sharder.check(self.model.axes, self.model.shapes)
        return load_weights(
            location,
            self.model,
            shardings=self.sharder.tree(self.model.axes),
            dtype=jnp.dtype(self.model.config.dtypes.compute.value),
            key="task.teacher.weights",
        )

    def features(self, weights: Tree, batch: Batch, layers: Sequence[int]) -> tuple[jax.Array, list[jax.Array]]:
        """Hidden states of a batch, and the residual stream after some layers."""
        context = Context.of_batch(batch, self.sharder, None)
        return self.model.features(weights, batch["tokens"], context, layers)

    def logits(self, weights: Tree, hidden: jax.Array) -> jax.Array:
        return self.model.logits(weights, hidden, self.sharder)


def plan_teacher(config: Config, teacher: Teacher, student: Sharder) -> OnlineTeacher:
    """The teacher of a config, refused where it does not fit the student. No weights are read yet."""
    its_model, its_mesh = _described(teacher)
    if its_model.vocab_size != config.model.vocab_size:
        reason = f"has a vocabulary of {its_model.vocab_size}, the student's is {config.model.vocab_size}"
        hint = "both must give the same tokens the same ids; set model.vocab_size to the teacher's"
        raise ConfigError(Problem("task.teacher", reason, value=teacher.weights, hint=hint))
    if its_model.context_length < config.train.seq_len:
        reason = f"is over the teacher's context_length={its_model.context_length}"
        raise ConfigError(Problem("train.seq_len", reason, value=config.train.seq_len))
    sharder = student if its_mesh is None else Sharder(remeshed(its_mesh, student.mesh.devices), its_mesh.rules)
    return OnlineTeacher(model.build(its_model), sharder)


def _described(teacher: Teacher) -> tuple[Model, MeshConfig | None]:
    """Its model, and its mesh where that is its own."""
    assert teacher.weights is not None
    chosen = {"model": teacher.model, "mesh": teacher.mesh}
    named = [f"{group}={option}" for group, option in chosen.items() if option is not None]
    # Hydra, which a worker of any other task does without.
    from maxhydra.config.compose.composer import compose  # noqa: PLC0415

    try:
        composed = compose([*named, *teacher.overrides]).config
    except ConfigError as error:
        raise ConfigError(problem.under("task.teacher") for problem in error.problems) from None
    its_mesh = None if teacher.mesh is None else composed.mesh
    if teacher.model is not None:
        return composed.model, its_mesh
    run = run_folder(teacher.weights)
    if run is None:
        reason = "is no run that says which model it is"
        hint = "give task.teacher.model=NAME, an option of the group model"
        raise ConfigError(Problem("task.teacher.weights", reason, value=teacher.weights, hint=hint))
    return _model_of(run / "config.yaml"), its_mesh


def _model_of(path: Path) -> Model:
    """The model of a run's config. What the run was trained on may have gone since, and is not asked for."""
    content = OmegaConf.load(path)
    assert isinstance(content, DictConfig)
    content.pop("data", None)
    return from_yaml(OmegaConf.to_yaml(content), str(path)).model
