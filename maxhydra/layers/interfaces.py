"""Interfaces of the two sub-layers of a block: the mixer, which combines tokens, and the feed-forward.

Each consists of a frozen spec, made from the config of a layer kind, and a module that the spec builds. B batch, T
tokens, D residual stream.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from maxhydra.layers.context import Context
from maxhydra.layers.kv_cache import Cache, CacheSpec
from maxhydra.layers.params import ParamBuilder

AuxOutputs = dict[str, jax.Array]
"""Auxiliary outputs of a sub-layer by name: sums over tokens, which add up over microbatches, and maxima, whose names
end in `max` (layers/statistics.py)."""


def with_aux_losses(aux: Any) -> Any:
    """A tree of aux outputs with the sums that define a loss replaced by `loss`, which training adds to its loss.

    `loss_sum`: loss = loss_sum / tokens. `shares`, the weighted sum of each expert's normalized scores: loss = E *
    sum_e f_e p_e, f the fraction of the load and p the mean score (Fedus et al., 2022; equation 4), 1 times its weight
    for a uniform load. The gradient flows through p only: the load is a count. Leading axes are layers.
    """
    if not isinstance(aux, dict):
        return aux
    if "tokens" not in aux:
        return {name: with_aux_losses(outputs) for name, outputs in aux.items()}
    tokens = jnp.maximum(aux["tokens"], 1)
    if "loss_sum" in aux:
        loss = aux["loss_sum"] / tokens
    else:
        load = aux["load"]
        fractions = load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1)
        loss = load.shape[-1] * jnp.sum(fractions * (aux["shares"] / tokens[..., None]), axis=-1)
    rest = {name: outputs for name, outputs in aux.items() if name not in ("tokens", "loss_sum", "shares")}
    return {**rest, "loss": loss}


class MixerOutput(NamedTuple):
    """What a mixer returns."""

    out_BTD: jax.Array
    cache: Any
    """The layer's updated cache; None without one."""
    aux: AuxOutputs
    shared: Any = None
    """What later layers read as `ctx.shared[kind]`, such as keys and values; None if nothing is shared."""


class FeedForwardOutput(NamedTuple):
    """What a feed-forward returns."""

    out_BTD: jax.Array
    aux: AuxOutputs


class Mixer(Protocol):
    """Combines the tokens of this call with each other and with those in the cache."""

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput: ...

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Cache:
        """The empty cache of this many layers of this kind."""
        ...


class FeedForward(Protocol):
    """Transforms each token separately."""

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> FeedForwardOutput: ...


class MixerSpec(Protocol):
    """Sizes and options of a mixer, resolved from the config."""

    def build(self, make: ParamBuilder) -> Any: ...

    def forward_flops(self, seq_len: int) -> float:
        """Forward FLOPs per token of a sequence of this length: projections, and the mixing of tokens."""
        ...


class FeedForwardSpec(Protocol):
    """Sizes and options of a feed-forward, resolved from the config."""

    def build(self, make: ParamBuilder) -> Any: ...

    def forward_flops(self) -> float:
        """Forward FLOPs per token, counting only the experts that it is routed to."""
        ...

    def idle_parameters(self) -> int:
        """Number of weights that are not used for a given token."""
        ...

    def apply_aux_updates(self, new: Any, old: Any, aux: AuxOutputs) -> Any:
        """Return the weights after an optimizer step, with the updates that come from `aux` instead of gradients."""
        ...


def visible_keys(window: int | None, seq_len: int) -> float:
    """Mean number of keys that a token attends to: min(i + 1, window) for token i."""
    window = min(window or seq_len, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len


def visible_in_chunk(chunk: int, seq_len: int) -> float:
    """Mean number of keys that a token attends to under chunked attention: i % chunk + 1 for token i."""
    chunks, rest = divmod(seq_len, chunk)
    return (chunks * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2) / seq_len
