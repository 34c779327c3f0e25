"""What a forward pass passes along with the activations: positions, cache, sharding, randomness.

Also the kernel choices of the config: a requested backend that does not support the call is a config error.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.config import ConfigError, Problem
from maxhydra.kernels.dispatch import UnsupportedError
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.tiles import Sizes
from maxhydra.layers.kv_cache import PageTable
from maxhydra.sharding import LogicalAxes, Sharder

# Name of the chosen experts: an aux output of a mixture of experts, [B, T, K], and a column of a training batch,
# [B, T, L, K].
EXPERTS = "experts"
# Names of the pixels of images, of the log-mel frames of audio clips and of their lengths: columns of a training batch.
IMAGES, AUDIO, AUDIO_LENGTHS = "images", "audio", "audio_lengths"
_collects_statistics: ContextVar[bool] = ContextVar("collects_statistics", default=False)


@contextmanager
def collect_statistics(is_on: bool) -> Iterator[None]:
    """Set `has_statistics` of the contexts of training batches that are created inside, while a step is traced.

    A loss creates its own context, and only the step knows whether statistics are due.
    """
    token = _collects_statistics.set(is_on)
    try:
        yield
    finally:
        _collects_statistics.reset(token)


class AudioClips(NamedTuple):
    """Audio clips of each row, in the order of their placeholders, then padding."""

    frames: Any
    """[B, clips, frames, bands] log-mel frames."""
    lengths: Any
    """[B, clips] frames of each clip, followed by padding; 0 for padding clips."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("positions", "segments", "cache", "dropout_key", "rows", "layer_input", "expert_ids", "shared"),
        *("output_index", "adapters_B", "tokens", "images", "image_groups_BT", "axis_positions", "deepstack", "audio"),
        "visible_BTS",
    ],
    meta_fields=["sharder", "is_adapted", "is_fresh", "has_statistics", "records_experts", "groups_need_window"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Inputs of a forward pass other than tokens; training, prefill and decoding differ only in these.

    A pytree, in which the sharder and the is_* flags are static.
    """

    positions: jax.Array
    """[B, T] position of each token in its sequence."""
    segments: jax.Array | None
    """[B, T] number of the token's sequence within its row; 0 is padding. None: one sequence per row, followed by
    padding at position 0. With a cache every row is one sequence, and only zero or nonzero matters."""
    sharder: Sharder
    """How activations are sharded."""
    cache: Any
    """State of earlier tokens: the whole model's in the decoder, one layer's inside a layer. None: no cache."""
    dropout_key: jax.Array | None
    """PRNG key for dropout. None: no dropout."""
    rows: PageTable | None = None
    """Pages and slots of the rows in a cache that is larger than the call. None: cache rows are the call's rows."""
    layer_input: jax.Array | None = None
    """[B, T, P] per-layer embedding of the tokens (Gemma 3n); in the decoder [L, B, T, P]. None if unused."""
    expert_ids: jax.Array | None = None
    """[B, T, K] experts that the router must choose, -1 for tokens whose experts it chooses itself; in the decoder
    [L, B, T, K]. None: it chooses all."""
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By layer kind, what the latest layer of that kind shares with others, such as keys and values."""
    output_index: jax.Array | None = None
    """[B] index of the only token of each row whose output is used. The last layer skips the feed-forward of the
    others. None: the outputs of all tokens are used."""
    adapters_B: jax.Array | None = None
    """[B] index of each row's adapter, in a model with several; None: no row has one."""
    tokens: jax.Array | None = None
    """[B, T] ids of the tokens, for layers with a memory of n-grams or experts by token; None in models without."""
    images: jax.Array | None = None
    """[B, images, height, width, channels] pixels of each row's images, in the order of their placeholders, then
    padding; read by the decoder, None inside a layer. With fewer rows than tokens have, adjacent rows share them. None:
    no images."""
    image_groups_BT: jax.Array | None = None
    """[B, T] number of the token's image, 0 for text: tokens of one image attend to each other in both directions.
    None: attention is causal."""
    axis_positions: jax.Array | None = None
    """[B, T, axes] positions of RoPE where they differ from `positions`: an image takes fewer positions than tokens.
    Three axes, or one if the axes of all tokens are equal. None: `positions`."""
    deepstack: jax.Array | None = None
    """[layers, B, T, D] features of images that are added to the residual stream after each of the first layers; read
    by the decoder, None inside a layer. None: no features."""
    visible_BTS: jax.Array | None = None
    """[B, T, S] keys that each query may attend to in its segment; S are the tokens of this call, or the slots of
    a dense cache. None: attention is causal."""
    audio: AudioClips | None = None
    """Audio clips of each row; read by the decoder, None inside a layer. None: no audio."""
    is_adapted: bool = True
    """Whether the adapter is applied; without it the model gives the outputs of its base."""
    is_fresh: bool = False
    """Whether every row starts with the tokens of this call, padding behind them: the cache is still empty."""
    has_statistics: bool = False
    """Whether sub-layers add statistics of their activations (layers/statistics.py) to their aux outputs."""
    groups_need_window: bool = False
    """Whether attention without a window is causal also among the tokens of an image."""
    records_experts: bool = False
    """Whether mixtures of experts add the chosen experts to their aux outputs, as EXPERTS."""

    @classmethod
    def of_batch(
        cls,
        batch: Mapping[str, jax.Array],
        sharder: Sharder,
        key: jax.Array | None,
        *,
        is_adapted: bool = True,
    ) -> "Context":
        """The context of a training batch, whose rows hold one or several documents."""
        expert_ids = batch.get(EXPERTS)
        return cls(
            positions=batch["positions"],
            segments=batch.get("segments"),
            sharder=sharder,
            cache=None,
            dropout_key=key,
            expert_ids=None if expert_ids is None else jnp.moveaxis(expert_ids, 2, 0),
            images=batch.get(IMAGES),
            audio=AudioClips(batch[AUDIO], batch[AUDIO_LENGTHS]) if AUDIO in batch else None,
            is_adapted=is_adapted,
            has_statistics=_collects_statistics.get(),
        )

    def for_encoder(self, rows: int) -> "Context":
        """The context of an encoder of other media: a separate batch, without cache, dropout and adapters by row."""
        return Context(
            positions=jnp.zeros((rows, 1), jnp.int32),
            segments=None,
            sharder=self.sharder,
            cache=None,
            dropout_key=None,
            is_adapted=self.is_adapted,
        )

    @property
    def rotary_positions(self) -> jax.Array:
        """[B, T, axes] positions of RoPE."""
        return self.positions[:, :, None] if self.axis_positions is None else self.axis_positions

    @property
    def is_length_split(self) -> bool:
        """Whether sequences are sharded along their length. With a cache they are not: tokens come a few at a time."""
        return self.cache is None and self.sharder.num_shards("act_length") > 1

    @property
    def is_real_BT(self) -> jax.Array:
        """[B, T] False for padding. Without segments that is every token at position 0 except the first."""
        if self.segments is not None:
            return self.segments != 0
        return (self.positions > 0) | (jnp.arange(self.positions.shape[1]) == 0)

    @property
    def cached_positions_BT(self) -> jax.Array:
        """[B, T] positions of the tokens as caches take them, -1 for padding."""
        return self.positions if self.segments is None else jnp.where(self.segments == 0, -1, self.positions)

    @property
    def place(self) -> Placement:
        """The devices and the sharding as kernels take them."""
        spec, length = self.sharder.spec, "act_length" if self.is_length_split else None
        stream = self._stream_length(self.positions.shape[1])
        batch, tokens, heads = spec(("act_batch", length, "act_heads"))
        return Placement(
            self.sharder.platform,
            self.sharder.mesh,
            batch=batch,
            heads=heads,
            kv_heads=spec(("act_batch", length, "act_kv_heads"))[2],
            length=tokens,
            stream_length=spec(("act_batch", stream))[1],
            vocab=spec(("act_batch", length, "act_vocab"))[2],
            experts=spec(("experts",))[0],
            context=self.sharder.options.context,
        )

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain the sharding of an activation to these logical axes."""
        names = [None if axis == "act_length" and not self.is_length_split else axis for axis in axes]
        return self.sharder.constrain(x, *names)

    def to_stream(self, x_BTD: jax.Array) -> jax.Array:
        """The output of a branch, sharded as the residual stream.

        Under tensor parallelism the stream is split along the length (Korthikanti et al., 2022): partial sums of a
        branch are reduce-scattered instead of all-reduced, and norms run on the shards.
        """
        stream, branch = self._layouts(x_BTD)
        return self.sharder.reshard(x_BTD, stream, gradient=branch)

    def to_branch(self, x_BTD: jax.Array) -> jax.Array:
        """A norm of the residual stream, gathered along the length for the branch that reads it."""
        stream, branch = self._layouts(x_BTD)
        return self.sharder.reshard(x_BTD, branch, gradient=stream)

    def constrain_stream(self, x_BTD: jax.Array) -> jax.Array:
        """Constrain the sharding of the residual stream."""
        return self.sharder.constrain(x_BTD, *self._layouts(x_BTD)[0])

    def _layouts(self, x_BTD: jax.Array) -> tuple[LogicalAxes, LogicalAxes]:
        """Logical axes of the residual stream, and of the inputs of a branch."""
        branch = "act_length" if self.is_length_split else None
        stream = self._stream_length(x_BTD.shape[1])
        return ("act_batch", stream, "act_embed"), ("act_batch", branch, "act_embed")

    def _stream_length(self, length: int) -> str | None:
        """Logical axis of the stream's length; lengths that do not divide, and caches, are not split over tensor."""
        if self.cache is None and length % self.sharder.num_shards("act_stream_length") == 0:
            return "act_stream_length"
        return "act_length" if self.is_length_split else None

    def is_causal(self, window: int | None) -> bool:
        """Whether no query of attention with this window sees a later key."""
        return not self._has_groups(window) and self.visible_BTS is None

    def _has_groups(self, window: int | None) -> bool:
        """Whether the tokens of an image see each other in attention with this window."""
        return self.image_groups_BT is not None and not (self.groups_need_window and window is None)

    def selected_keys(self, window: int | None) -> jax.Array | None:
        """[B, T, S] keys that each query sees: visible_BTS, or with image groups also later tokens of its image.

        None: causal attention. Keys before the window stay hidden, also those of the same image.
        """
        groups_BT = self.image_groups_BT
        if groups_BT is None or not self._has_groups(window):
            return self.visible_BTS
        query_T1, key_1T = (jnp.expand_dims(jnp.arange(groups_BT.shape[1]), axis) for axis in (1, 0))
        is_same_BTT = (groups_BT[:, :, None] == groups_BT[:, None, :]) & (groups_BT[:, :, None] > 0)
        seen_BTT = is_same_BTT | (key_1T <= query_T1)
        return seen_BTT if window is None else seen_BTT & (key_1T > query_T1 - window)

    @property
    def layer_inputs(self) -> tuple[jax.Array | None, jax.Array | None]:
        """In the decoder, what each layer takes its own part of, stacked over the layers."""
        return self.layer_input, self.expert_ids

    def at_layer(
        self,
        index: jax.Array | int,
        cache: Any,
        layer_input: jax.Array | None,
        expert_ids: jax.Array | None = None,
    ) -> "Context":
        """The context of the layer of this index, with its own cache, dropout key and layer inputs."""
        key = self.key(index)
        inputs: dict[str, Any] = {"layer_input": layer_input, "expert_ids": expert_ids, "deepstack": None}
        return dataclasses.replace(self, cache=cache, dropout_key=key, **inputs)

    def add_deepstack(self, x_BTD: jax.Array, layer: int) -> jax.Array:
        """The residual stream after a layer, with what `deepstack` has for it."""
        if self.deepstack is None or layer >= len(self.deepstack):
            return x_BTD
        return x_BTD + self.deepstack[layer].astype(x_BTD.dtype)

    def for_output_tokens(self) -> "Context":
        """The context of the tokens that `select_output_tokens` selects."""
        names = ("positions", "segments", "layer_input", "expert_ids", "axis_positions", "tokens")
        tokens = {name: self.select_output_tokens(getattr(self, name)) for name in names}
        return dataclasses.replace(self, **tokens, output_index=None)

    def select_output_tokens(self, x_BT: jax.Array | None) -> Any:
        """[B, T, ...] reduced to [B, 1, ...], the tokens whose output is used; unchanged if all outputs are used."""
        if x_BT is None or self.output_index is None:
            return x_BT
        index = self.output_index.reshape(-1, *[1] * (x_BT.ndim - 1))
        return jnp.take_along_axis(x_BT, index, axis=1)

    def key(self, index: jax.Array | int) -> jax.Array | None:
        """The dropout key folded with an index; None without dropout."""
        return None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, index)


class KernelChoice(NamedTuple):
    """Backend and tile sizes of one operation; the fields are named like the arguments of its function."""

    backend: str
    sizes: Sizes
    """Tile sizes of the backend's kernel."""


@contextmanager
def kernel_errors_as_config_errors() -> Iterator[None]:
    """Raise UnsupportedError of kernels as ConfigError for the key that chose the backend or strategy."""
    try:
        yield
    except UnsupportedError as error:
        key = "mesh.context" if error.operation == "context" else f"model.kernels.{error.operation}"
        accepted = ", ".join(("auto", *error.supported))
        raise ConfigError(Problem(key, "; ".join(error.reasons), value=error.backend, accepted=accepted)) from None
