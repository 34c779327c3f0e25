"""The device mesh: devices along each axis, within a slice and across slices, and what is sharded over which."""

from collections.abc import Iterator

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem, did_you_mean

# From least to most communication: neighbours on the fastest links belong to the last axis.
AXES = ("data", "fsdp", "expert", "sequence", "tensor")

# Logical axis -> mesh axes. Weights name their dimensions after what they hold; activations begin with `act_`.
RULES: dict[str, list[str]] = {
    "act_batch": ["data", "fsdp", "expert"],
    "act_length": ["sequence"],
    "act_embed": [],
    "act_heads": ["tensor"],
    "act_kv_heads": ["tensor"],
    "act_mlp": ["tensor"],
    "act_experts": ["expert"],
    "act_vocab": ["tensor"],
    "layers": [],
    "experts": ["expert"],
    "embed": ["fsdp", "expert", "sequence"],
    "latent": ["fsdp", "expert", "sequence"],
    "heads": ["tensor"],
    "kv_heads": ["tensor"],
    "head_dim": [],
    "mlp": ["tensor"],
    "vocab": ["tensor"],
    "positions": [],
    "norm": [],
}


@schema
class Axes(Schema):
    """Devices along each axis; one axis may be -1 and takes what is left."""

    data: int = option(1, ge=-1)
    """Replicas of the whole model, each on its share of the batch."""
    fsdp: int = option(1, ge=-1)
    """The batch and the weights are both split; weights are gathered layer by layer."""
    expert: int = option(1, ge=-1)
    """Experts of a mixture are split; elsewhere it acts as fsdp does."""
    sequence: int = option(1, ge=-1)
    """Tokens of a sequence are split; keys and values are gathered in attention."""
    tensor: int = option(1, ge=-1)
    """Heads, feed-forward columns and vocabulary are split."""

    def check(self) -> Iterator[Problem]:
        sizes = {axis: getattr(self, axis) for axis in AXES}
        for axis, size in sizes.items():
            if size == 0:
                yield Problem(axis, "is not a size", value=0, accepted="a positive number, or -1 for what is left")
        automatic = [axis for axis, size in sizes.items() if size == -1]
        if len(automatic) > 1:
            yield Problem(
                automatic[-1],
                f"only one axis can be -1, and {automatic[0]} is too",
                value=-1,
                accepted="a positive number",
            )


@schema
class Mesh(Axes):
    """Axes within a slice (fast links) stand here; those across slices (data-centre network) under dcn."""

    dcn: Axes = section(Axes)
    slices: int | None = option(None, ge=1)
    """Slices that the devices form. null: as the devices say."""
    rules: dict[str, list[str]] = option(RULES)
    """Mesh axes over which each logical axis is split, first to last."""

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        for name, axes in self.rules.items():
            if name not in RULES:
                yield Problem(
                    f"rules.{name}",
                    "is not a logical axis",
                    value=axes,
                    accepted=", ".join(RULES),
                    hint=did_you_mean(name, RULES),
                )
            for axis in axes:
                if axis not in AXES:
                    yield Problem(
                        f"rules.{name}",
                        f"no mesh axis is called {axis!r}",
                        value=axes,
                        accepted=", ".join(AXES),
                        hint=did_you_mean(axis, AXES),
                    )
