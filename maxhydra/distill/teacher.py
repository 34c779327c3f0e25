"""The online teacher: its model, weights and sharding."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

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
from maxhydra.train.loss import Batch, Tree


@dataclasses.dataclass(frozen=True)
class OnlineTeacher:
    """A teacher that runs in the same step as the student."""

    model: ModelDef
    sharder: Sharder

    def load(self, location: str) -> Tree:
        """Load its weights in the compute dtype, since they are not updated."""
        self.sharder.check(self.model.axes, self.model.shapes)
        return load_weights(
            location,
            self.model,
            shardings=self.sharder.tree(self.model.axes),
            dtype=jnp.dtype(self.model.config.dtypes.compute.value),
            key="task.teacher.weights",
        )

    def features(self, weights: Tree, batch: Batch, layers: Sequence[int]) -> tuple[jax.Array, list[jax.Array]]:
        """Final hidden states of a batch, and the residual stream after the given layers."""
        context = Context.of_batch(batch, self.sharder, None)
        return self.model.features(weights, batch["tokens"], context, layers)

    def logits(self, weights: Tree, hidden: jax.Array) -> jax.Array:
        return self.model.logits(weights, hidden, self.sharder)


def plan_teacher(config: Config, teacher: Teacher, student: Sharder) -> OnlineTeacher:
    """The teacher of a config, without its weights; ConfigError if it does not fit the student."""
    teacher_model, mesh = _resolve(teacher)
    if teacher_model.vocab_size != config.model.vocab_size:
        reason = f"has a vocabulary of {teacher_model.vocab_size}, but the student's is {config.model.vocab_size}"
        hint = "both must use the same token ids; set model.vocab_size to the teacher's"
        raise ConfigError(Problem("task.teacher", reason, value=teacher.weights, hint=hint))
    if teacher_model.context_length < config.train.seq_len:
        reason = f"exceeds the teacher's context_length={teacher_model.context_length}"
        raise ConfigError(Problem("train.seq_len", reason, value=config.train.seq_len))
    sharder = student if mesh is None else Sharder(remeshed(mesh, student.mesh.devices), mesh.rules)
    return OnlineTeacher(model.build(teacher_model), sharder)


def _resolve(teacher: Teacher) -> tuple[Model, MeshConfig | None]:
    """The teacher's model config, and its mesh config if it differs from the student's."""
    assert teacher.weights is not None
    options = {"model": teacher.model, "mesh": teacher.mesh}
    choices = [f"{group}={option}" for group, option in options.items() if option is not None]
    # Imports Hydra, which workers of other tasks do not need.
    from maxhydra.config.compose.composer import compose  # noqa: PLC0415

    try:
        composed = compose([*choices, *teacher.overrides]).config
    except ConfigError as error:
        raise ConfigError(problem.under("task.teacher") for problem in error.problems) from None
    mesh = None if teacher.mesh is None else composed.mesh
    if teacher.model is not None:
        return composed.model, mesh
    run = run_folder(teacher.weights)
    if run is None:
        reason = "is not a run folder with a config, so its model is unknown"
        hint = "set task.teacher.model=NAME, an option of the group model"
        raise ConfigError(Problem("task.teacher.weights", reason, value=teacher.weights, hint=hint))
    return _model_of(run / "config.yaml"), mesh


def _model_of(path: Path) -> Model:
    """The model of a run's config. Its data section is ignored, because the data may no longer exist."""
    content = OmegaConf.load(path)
    assert isinstance(content, DictConfig)
    content.pop("data", None)
    return from_yaml(OmegaConf.to_yaml(content), str(path)).model
