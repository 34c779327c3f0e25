"""What a block asks of its two parts: the mixer, which carries information between tokens, and the feed-forward.

A mechanism is a frozen spec, made from the config of a layer kind, and a module that the spec builds. B batch, T
tokens, D residual stream.
"""

from typing import Any, NamedTuple, Protocol

import jax

from maxhydra.layers.context import Context
from maxhydra.layers.kv_cache import Cache, CacheSpec
from maxhydra.layers.params import ParamBuilder

AuxOutputs = dict[str, jax.Array]
"""What a part tells besides its output, by name. `loss`: a scalar, already weighted, that training adds to its own."""


class MixerOutput(NamedTuple):
    """What a mixer gives back."""

    out_BTD: jax.Array
    cache: Any
    """The successor of the layer's cache; None without one."""
    side: AuxOutputs
    handed: Any = None
    """What later layers find under this layer's kind in `ctx.shared`; None: nothing."""
    normed_BTD: jax.Array | None = None
    """The norm of what it gives, where that was asked for and made along."""


class FeedForwardOutput(NamedTuple):
    """What a feed-forward gives back."""

    out_BTD: jax.Array
    side: AuxOutputs
    normed_BTD: jax.Array | None = None
    """As of a mixer."""


class Mixer(Protocol):
    """Looks at the tokens at hand and at those in the cache."""

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput: ...

    def empty_cache(self, room: CacheSpec, layers: int) -> Cache:
        """What so many layers of this kind keep of earlier tokens."""
        ...


class FeedForward(Protocol):
    """Works on each token alone."""

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> FeedForwardOutput: ...


class MixerSpec(Protocol):
    """A mixer's sizes and mechanisms, resolved."""

    def build(self, make: ParamBuilder) -> Any: ...

    def forward_flops(self, seq_len: int) -> float:
        """Operations of a forward pass per token of sequences of this length: weights, and the look at others."""
        ...


class FeedForwardSpec(Protocol):
    """A feed-forward's sizes and mechanisms, resolved."""

    def build(self, make: ParamBuilder) -> Any: ...

    def forward_flops(self) -> float:
        """Operations of a forward pass per token: of the weights that a token meets."""
        ...

    def idle_parameters(self) -> int:
        """Weights that a token does not meet."""
        ...

    def settled(self, new: Any, old: Any, side: AuxOutputs) -> Any:
        """The weights that a training step made of old ones, with what changes by what the layer told instead."""
        ...


def visible_keys(window: int | None, seq_len: int) -> float:
    """Keys that a token sees on average: token i sees min(i + 1, window) of them."""
    window = min(window or seq_len, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def visible_in_chunk(chunk: int, seq_len: int) -> float:
    """The same where token i sees i % chunk + 1 of them."""
    whole, rest = divmod(seq_len, chunk)
    return (whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2) / seq_len
