"""The teacher: its model, weights and sharding, its top-k logits, and students initialized with its layers."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra import model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.data import Data, Packing
from maxhydra.config.schema.hardware import Mesh as MeshConfig
from maxhydra.config.schema.tasks.distill import Teacher
from maxhydra.convert.load import load_weights
from maxhydra.data import BatchSpec, Tokenizer, make_batch
from maxhydra.data.packing import plan_rows
from maxhydra.data.rows import Document, pack_rows
from maxhydra.data.tokenizers import smallest_id_dtype
from maxhydra.decode.second_model import SecondModel
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.runtime.channel import broadcast
from maxhydra.sharding import Sharder, build_mesh, remeshed
from maxhydra.train import map_sequence_chunks
from maxhydra.train.loss import Batch, Tree


@dataclasses.dataclass(frozen=True)
class OnlineTeacher:
    """A teacher that runs in the same step as the student."""

    model: ModelDef
    sharder: Sharder

    def load(self, location: str) -> Tree:
        """Load its weights in the compute dtype, since they are not updated."""
        self.model.check_mesh(self.sharder)
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


def plan_teacher(
    config: Config, teacher: Teacher, student: Sharder, *, devices: Sequence[jax.Device] = ()
) -> OnlineTeacher:
    """The teacher of a config, without its weights; ConfigError if it does not fit the student.

    It is sharded over its own `devices`, or without any over those of the student.
    """
    teacher_model, mesh = second_model(teacher).resolve()
    if teacher_model.vocab_size != config.model.vocab_size and not teacher.align:
        reason = f"has a vocabulary of {teacher_model.vocab_size}, but the student's is {config.model.vocab_size}"
        hint = "use the same token ids and set model.vocab_size to the teacher's, or set task.teacher.align=true"
        raise ConfigError(Problem("task.teacher", reason, value=teacher.weights, hint=hint))
    if teacher_model.context_length < config.train.seq_len:
        reason = f"exceeds the teacher's context_length={teacher_model.context_length}"
        raise ConfigError(Problem("train.seq_len", reason, value=config.train.seq_len))
    if not teacher.align:
        check_tokenizer(config.data, teacher)
    return OnlineTeacher(model.build(teacher_model), _make_sharder(mesh, config.mesh, student, devices))


def _make_sharder(
    mesh: MeshConfig | None, student_mesh: MeshConfig, student: Sharder, devices: Sequence[jax.Device]
) -> Sharder:
    if mesh is None and not devices:
        return student
    mesh = mesh or student_mesh
    try:
        over = build_mesh(mesh, devices) if devices else remeshed(mesh, student.mesh.devices)
    except ConfigError as error:
        raise ConfigError(problem.under("task.teacher") for problem in error.problems) from None
    return Sharder.from_config(mesh, over)


def second_model(teacher: Teacher) -> SecondModel:
    """The model that task.teacher describes."""
    assert teacher.weights is not None
    return SecondModel("task.teacher", "teacher", teacher.weights, teacher.model, teacher.overrides, mesh=teacher.mesh)


def check_tokenizer(data: Data, teacher: Teacher) -> None:
    """Raise ConfigError if a token id is another token for the teacher than for the student."""
    second_model(teacher).check_tokenizer(data, "student", ", or set task.teacher.align=true")


def open_tokenizer(data: Data, teacher: Teacher) -> Tokenizer:
    """The tokenizer of the teacher's run or folder."""
    return second_model(teacher).open_tokenizer(data, needed_by="task.teacher.align=true")


# The subtrees of the weights that hold layers; the others are embedding, final norm and head.
LAYER_GROUPS = ("prefix", "pattern", "remainder")


def init_from_teacher(
    student: ModelDef, teacher: ModelDef, weights: Tree, layers: Sequence[int], *, sharder: Sharder
) -> Tree:
    """Student weights: layer i is the teacher's layers[i]; embedding, final norm and head are the teacher's."""
    build = arrange_layers(student, teacher, layers)
    require_same_shapes(student.shapes, jax.eval_shape(build, teacher.shapes))
    # The teacher may be on other devices than the student.
    return jax.device_put(jax.jit(build)(weights), sharder.tree(student.axes))


def check_layers(path: str, layers: Sequence[int], model: ModelDef, *, of: str) -> None:
    """Raise a ConfigError if the model does not have one of the layers."""
    last = model.config.num_layers - 1
    if any(layer > last for layer in layers):
        reason = f"names a layer that the {of} does not have"
        raise ConfigError(Problem(path, reason, value=layers, accepted=f"0 to {last}"))


def arrange_layers(student: ModelDef, teacher: ModelDef, layers: Sequence[int]) -> Callable[[Tree], Tree]:
    """The function from the teacher's weights to those layers of them, in the places of the student's."""
    config = student.config
    if len(layers) != config.num_layers:
        reason = f"names {len(layers)} layers, but the student has model.num_layers={config.num_layers}"
        raise ConfigError(Problem("task.init_layers", reason, value=layers))
    check_layers("task.init_layers", layers, teacher, of="teacher")
    dtype = jnp.dtype(config.dtypes.weights.value)

    def build(weights: Tree) -> Tree:
        student_layers = [_layer(teacher, weights, layer) for layer in layers]
        prefix, period, repeated = _layout(student)
        stacks = [student_layers[prefix + index : prefix + repeated : period] for index in range(period)]
        groups = {
            "prefix": student_layers[:prefix],
            "pattern": [jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack) for stack in stacks],
            "remainder": student_layers[prefix + repeated :],
        }
        others = {name: tree for name, tree in weights.items() if name not in LAYER_GROUPS}
        numbered = {group: {str(i): tree for i, tree in enumerate(trees)} for group, trees in groups.items() if trees}
        return jax.tree.map(lambda leaf: leaf.astype(dtype), {**others, **numbered})

    return build


def _layer(model: ModelDef, weights: Tree, layer: int) -> Tree:
    """The weights of one layer."""
    prefix, period, repeated = _layout(model)
    if layer < prefix:
        return weights["prefix"][str(layer)]
    if layer - prefix >= repeated:
        return weights["remainder"][str(layer - prefix - repeated)]
    repetition, index = divmod(layer - prefix, period)
    return jax.tree.map(lambda leaf: leaf[repetition], weights["pattern"][str(index)])


def _layout(model: ModelDef) -> tuple[int, int, int]:
    """Number of layers in the prefix, in one period of the pattern, and in all its repetitions."""
    prefix, remainder = len(model.config.prefix), len(model.shapes.get("remainder", {}))
    return prefix, len(model.shapes.get("pattern", {})), model.config.num_layers - prefix - remainder


def require_same_shapes(expected: Tree, given: Tree, *, differs_in: str = "layers") -> None:
    """Reject a teacher whose arrays have other names or shapes, naming the first difference."""
    student_shapes, teacher_shapes = (
        {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (expected, given))
    )
    for name in sorted({*student_shapes, *teacher_shapes}):
        student, teacher = student_shapes.get(name, "missing"), teacher_shapes.get(name, "missing")
        if student != teacher:
            difference = f"{name} is {teacher} in the teacher and {student} in the student"
            reason = f"needs a teacher that differs from the student only in its number of {differs_in}: {difference}"
            raise ConfigError(Problem("task.init_layers", reason))


@dataclasses.dataclass(frozen=True)
class TopLogits:
    """Adds the k most likely next tokens to documents, which are packed into rows as in training."""

    model: ModelDef
    weights: Tree
    sharder: Sharder
    spec: BatchSpec
    packing: Packing
    k: int
    chunk: int

    def __call__(self, documents: list[Document]) -> list[Document]:
        """The documents in order, split if longer than a row, with columns `teacher_ids` and `teacher_logits`.

        `teacher_logits` are log-probabilities, which differ from the logits by a constant.
        """
        documents = [document for document in documents if document.num_targets]
        lengths = np.array([document.num_targets for document in documents], np.int64)
        pieces = plan_rows(lengths, self.spec.rows.seq_len, self.packing)
        rows = pack_rows(documents, pieces, self.spec.rows.seq_len, with_segments=True)
        outputs = [self._run([rows[index] for index in part]) for part in _chunks(len(rows), self.spec.batch)]
        if not outputs:
            return []
        ids, logits = (np.concatenate(arrays) for arrays in zip(*outputs, strict=True))
        enriched = []
        for piece in np.lexsort((pieces.start, pieces.document)):
            document, start, count = documents[pieces.document[piece]], pieces.start[piece], pieces.count[piece]
            positions = pieces.row[piece], slice(pieces.offset[piece], pieces.offset[piece] + count)
            tokens = slice(start, start + count + 1)
            weights = None if document.weights is None else document.weights[tokens]
            columns = {"teacher_ids": ids[positions], "teacher_logits": logits[positions]}
            enriched.append(Document(document.tokens[tokens], weights, columns))
        return enriched

    def follow(self) -> None:
        """Compute what process 0 needs, until it closes; for all other processes."""
        while self._compute(None) is not None:
            pass

    def close(self) -> None:
        """End `follow` in the other processes."""
        broadcast(None)

    def _run(self, rows: list[dict[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        padding = self.spec.batch - len(rows)
        columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        columns = {name: np.pad(column, [(0, padding), (0, 0)]) for name, column in columns.items()}
        outputs = self._compute(columns)
        assert outputs is not None
        ids, logits = (output[: len(rows)] for output in outputs)
        return ids.astype(smallest_id_dtype(self.model.config.vocab_size)), logits.astype(np.float16)

    def _compute(self, columns: dict[str, np.ndarray] | None) -> tuple[np.ndarray, np.ndarray] | None:
        """Ids and log-probabilities of a batch of process 0; None after the last one."""
        columns = broadcast(columns)
        if columns is None:
            return None
        local = self.spec.local_rows(self.spec.batch)
        rows = [{name: column[index] for name, column in columns.items()} for index in local]
        ids, logits = self._top_k(self.weights, make_batch(rows, self.spec, self.spec.batch))
        return np.asarray(ids), np.asarray(logits)

    @cached_property
    def _top_k(self) -> Any:
        """Jitted (weights, batch) -> ids and log-probabilities, [B, S, k], replicated."""
        model, sharder = self.model, self.sharder

        def top_k(weights: Tree, batch: Batch) -> tuple[jax.Array, jax.Array]:
            context = Context.of_batch(batch, sharder, None)
            hidden, _ = model.hidden(weights, batch["tokens"], context)

            def top_k_of(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
                logits = model.logits(weights, hidden, sharder).astype(jnp.float32)
                values, ids = jax.lax.top_k(jax.nn.log_softmax(logits), self.k)
                return ids, values

            return map_sequence_chunks(top_k_of, hidden, chunk=self.chunk)

        return jax.jit(top_k, out_shardings=sharder.sharding((None, None, None)))


def _chunks(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]
