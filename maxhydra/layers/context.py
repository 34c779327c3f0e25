"""What travels beside the activations: where each token stands, the cache, the sharding, the source of randomness."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.kernels.placement import Placement
from maxhydra.layers.kv_cache import PageTable
from maxhydra.sharding import Sharder


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "positions",
        "segments",
        "cache",
        "dropout_key",
        "rows",
        "layer_input",
        "shared",
        "normed",
        "following",
        "asked",
    ],
    meta_fields=["sharder", "is_adapted", "is_fresh"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The same forward pass serves training, prefill and decoding; this says which it is. A pytree, the sharder and
    what begins with is_ static."""

    positions: jax.Array
    """[B, T] place of each token in its own sequence."""
    segments: jax.Array | None
    """[B, T] sequence of its row to which a token belongs; 0 is padding. None: one sequence a row, padding
    behind it, at position 0. With a cache a row is one sequence, and only 0 or not 0 counts."""
    sharder: Sharder
    """Where activations live."""
    cache: Any
    """What earlier tokens left behind: the whole model's at the top, one layer's inside it. None: nothing is kept."""
    dropout_key: jax.Array | None
    """Randomness for dropout. None: no dropout."""
    rows: PageTable | None = None
    """Where the rows lie in a cache that outlives the call. None: the cache has the rows of the call."""
    layer_input: jax.Array | None = None
    """[B, T, P] embedding of the tokens for this very layer; None where layers have none."""
    shared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """By layer kind what its last layer so far handed on to others."""
    normed: jax.Array | None = None
    """[B, T, D] what this layer's first norm makes of its input, where the layer before made it along."""
    following: jax.Array | None = None
    """[D] scale of the next layer's first norm, for a layer that can make it along. Norms of a model differ in that."""
    asked: jax.Array | None = None
    """[B] the token of each row that alone is looked at after the last layer, which need not feed the others forward.
    None: all are."""
    is_adapted: bool = True
    """Whether an adapter adds to the model; without, it answers as it did before the adapter was trained."""
    is_fresh: bool = False
    """Whether every row begins with the tokens at hand, padding behind them: the cache has nothing to look at yet."""

    @classmethod
    def of_batch(
        cls,
        batch: Mapping[str, jax.Array],
        sharder: Sharder,
        key: jax.Array | None,
        *,
        is_adapted: bool = True,
    ) -> "Context":
        """Of whole rows as they are trained on, of one document or of several."""
        return cls(
            positions=batch["positions"],
            segments=batch.get("segments"),
            sharder=sharder,
            cache=None,
            dropout_key=key,
            is_adapted=is_adapted,
        )

    @property
    def is_length_split(self) -> bool:
        """Whether the tokens of a sequence lie on several devices. Those that meet a cache come a few at a time."""
        return self.cache is None and self.sharder.ways("act_length") > 1

    @property
    def is_real_BT(self) -> jax.Array:
        """[B, T] whether a token is none of the padding, which without segments is at position 0, as the first is."""
        if self.segments is not None:
            return self.segments != 0
        return (self.positions > 0) | (jnp.arange(self.positions.shape[1]) == 0)

    @property
    def place(self) -> Placement:
        """The devices as kernels see them."""
        batch, heads = self.sharder.spec(("act_batch", "act_heads"))
        kv_heads = self.sharder.spec(("act_batch", "act_kv_heads"))[1]
        return Placement(self.sharder.platform, self.sharder.mesh, batch, heads, kv_heads)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Have the compiler split an activation by these logical axes."""
        split = [None if axis == "act_length" and not self.is_length_split else axis for axis in axes]
        return self.sharder.constrain(x, *split)

    def at_layer(self, index: jax.Array | int, cache: Any, layer_input: jax.Array | None) -> "Context":
        """What the layer of this index sees: its own cache, key and input."""
        return dataclasses.replace(self, cache=cache, dropout_key=self.key(index), layer_input=layer_input)

    def of_asked(self) -> "Context":
        """What is left of it where only the tokens that are asked for go on."""
        tokens = {name: self.taken(getattr(self, name)) for name in ("positions", "segments", "layer_input", "normed")}
        return dataclasses.replace(self, **tokens, asked=None)

    def taken(self, x_BT: jax.Array | None) -> Any:
        """[B, 1, ...] of [B, T, ...]: the tokens that are asked for; all of them if nothing says which."""
        if x_BT is None or self.asked is None:
            return x_BT
        places = self.asked.reshape(-1, *[1] * (x_BT.ndim - 1))
        return jnp.take_along_axis(x_BT, places, axis=1)

    def key(self, index: jax.Array | int) -> jax.Array | None:
        """The index-th key below this one; None where there is no dropout."""
        return None if self.dropout_key is None else jax.random.fold_in(self.dropout_key, index)
