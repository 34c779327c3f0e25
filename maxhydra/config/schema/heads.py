"""Checks of the sizes of attention heads."""

from collections.abc import Iterator

from maxhydra.config.errors import Problem
from maxhydra.config.schema.attention import Attention
from maxhydra.config.schema.layer_kind import Kind, Mixer


def head_problems(kinds: dict[str, Kind], num_heads: int, num_kv_heads: int, head_dim: int) -> Iterator[Problem]:
    """Yield sizes of heads that do not fit each other, of the model and of its layer kinds."""
    for name, kind in kinds.items():
        if kind.mixer is Mixer.compressed:
            for problem in kind.compressed.check_sizes(num_heads, head_dim):
                yield problem.under(f"kinds.{name}.compressed")
    sizes = num_heads, num_kv_heads, head_dim
    yield from _attention_problems(
        {"": None, **{f"kinds.{n}.attention.": k.attention for n, k in kinds.items()}}, *sizes
    )


def _attention_problems(
    layers: dict[str, Attention | None], num_heads: int, num_kv_heads: int, model_head_dim: int
) -> Iterator[Problem]:
    for prefix, layer in layers.items():
        heads = layer.num_heads if layer and layer.num_heads else num_heads
        kv_heads = layer.num_kv_heads if layer and layer.num_kv_heads else num_kv_heads
        head_dim = layer.head_dim if layer and layer.head_dim else model_head_dim
        is_repeat = layer is not None and (layer.num_heads, layer.num_kv_heads) == (None, None)
        if heads % kv_heads and not is_repeat:
            divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            yield Problem(
                f"{prefix}num_kv_heads",
                f"does not divide {prefix}num_heads={heads}",
                value=kv_heads,
                accepted=", ".join(divisors),
            )
        if head_dim % 2 and not (layer is not None and layer.head_dim is None):
            yield Problem(
                f"{prefix}head_dim", "is odd, but RoPE rotates pairs", value=head_dim, accepted="an even number"
            )
        elif layer and int(head_dim * layer.rope.share) not in range(2, head_dim + 1, 2):
            accepted = f"a value for which share * head_dim={head_dim} is even"
            yield Problem(
                f"{prefix}rope.share",
                "does not select a whole number of pairs",
                value=layer.rope.share,
                accepted=accepted,
            )
        elif layer and layer.rope.sections and sum(layer.rope.sections) != (pairs := layer.rope.pairs_of(head_dim)):
            reason, value = f"does not have the {pairs} rotated pairs of a head", layer.rope.sections
            yield Problem(f"{prefix}rope.sections", reason, value=value, accepted=f"numbers with the sum {pairs}")
