"""The teacher: its model, weights and sharding, its top-k logits, and students initialized with its layers."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from omegaconf import DictConfig, OmegaConf

from maxhydra import model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.errors import show
from maxhydra.config.schema.data import Data, Packing
from maxhydra.config.schema.data import Tokenizer as TokenizerConfig
from maxhydra.config.schema.hardware import Mesh as MeshConfig
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.tasks.distill import Teacher
from maxhydra.config.serialize import from_yaml
from maxhydra.convert.adapter_lineage import run_folder
from maxhydra.convert.compatibility import changes_from_run
from maxhydra.convert.load import load_weights
from maxhydra.data import BatchSpec, Tokenizer, make_batch
from maxhydra.data.packing import plan_rows
from maxhydra.data.rows import Document, pack_rows
from maxhydra.data.tokenizers import load_tokenizer, smallest_id_dtype
from maxhydra.layers import Context
from maxhydra.model import ModelDef
from maxhydra.modelfiles import model_path
from maxhydra.modelfiles.hub import is_hub_id
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
    teacher_model, mesh = _resolve(teacher)
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


def check_tokenizer(data: Data, teacher: Teacher) -> None:
    """Raise ConfigError if a token id is another token for the teacher than for the student.

    The teacher's tokenizer is that of its run, or the one in its folder; if neither exists, nothing is compared.
    """
    stored = _stored_tokenizer(teacher)
    if stored is None or (stored.kind, stored.path) == (data.tokenizer.kind, data.tokenizer.path):
        return
    student = load_tokenizer(data)
    other = load_tokenizer(dataclasses.replace(data, tokenizer=stored))
    names = student.special_token_ids.keys() & other.special_token_ids.keys()
    special = {name: (other.special_token_ids[name], student.special_token_ids[name]) for name in sorted(names)}
    differences = [f"{name} is id {a} there and {b} here" for name, (a, b) in special.items() if a != b]
    for id in range(min(student.vocab_size, other.vocab_size)) if not differences else ():
        if (a := other.decode([id])) != (b := student.decode([id])):
            differences.append(f"id {id} is {a!r} there and {b!r} here")
            break
    if differences:
        reason = f"has another tokenizer than the student: {differences[0]}"
        hint = "use the teacher's tokenizer (data.tokenizer.kind and path), or set task.teacher.align=true"
        raise ConfigError(Problem("task.teacher.weights", reason, value=teacher.weights, hint=hint))


def open_tokenizer(data: Data, teacher: Teacher) -> Tokenizer:
    """The tokenizer of the teacher's run or folder."""
    if (stored := _stored_tokenizer(teacher)) is None:
        reason = "has no tokenizer, which task.teacher.align=true needs"
        accepted = "a run whose tokenizer files exist, or a folder with tokenizer.json"
        raise ConfigError(Problem("task.teacher.weights", reason, value=teacher.weights, accepted=accepted))
    return load_tokenizer(dataclasses.replace(data, tokenizer=stored))


def _stored_tokenizer(teacher: Teacher) -> TokenizerConfig | None:
    """The tokenizer of the teacher's run or folder; None if it is unknown or its files are missing."""
    assert teacher.weights is not None
    if (run := run_folder(teacher.weights)) is None:
        folder = model_path("task.teacher.weights", teacher.weights, weights=False)
        return TokenizerConfig(kind="hf", path=str(folder)) if (folder / "tokenizer.json").is_file() else None
    content = OmegaConf.to_container(OmegaConf.load(run / "config.yaml"))
    assert isinstance(content, dict)
    stored = content.get("data", {}).get("tokenizer", {})
    kind, path = stored.get("kind", TokenizerConfig.kind), stored.get("path")
    is_local = path is not None and kind != "tiktoken" and not is_hub_id(path)
    is_missing = is_local and not Path(path).expanduser().exists()
    return None if is_missing else TokenizerConfig(kind=kind, path=path)


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
    run = run_folder(teacher.weights)
    if teacher.model is not None:
        for change in [] if run is None else changes_from_run(run, composed.model):
            values = f"{change.key} is {show(change.before)} there, here {show(change.now)}"
            reason = f"differs from the run of the weights: {values}"
            hint = "omit task.teacher.model and overrides: the model is then that of the run"
            raise ConfigError(Problem("task.teacher.model", reason, value=teacher.model, hint=hint))
        return composed.model, mesh
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
