"""Schema of the device mesh: devices per axis, within and across slices, and sharding rules."""

from collections.abc import Iterator

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem, did_you_mean

# From least to most communication: devices on the fastest links are adjacent along the last axis.
AXES = ("data", "fsdp", "expert", "sequence", "tensor")

# Logical axis -> mesh axes. Axes of activations start with `act_`; all others belong to weights.
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
    """Devices along each axis; one axis may be -1 and gets the remaining devices."""

    data: int = option(1, ge=-1)
    """Data parallelism: replicas of the model, each with a part of the batch."""
    fsdp: int = option(1, ge=-1)
    """Fully sharded data parallelism: batch and weights are sharded; weights are all-gathered layer by layer."""
    expert: int = option(1, ge=-1)
    """Expert parallelism: experts are sharded; in other layers the axis acts as fsdp."""
    sequence: int = option(1, ge=-1)
    """Context parallelism: sequences are sharded; keys and values are all-gathered in attention."""
    tensor: int = option(1, ge=-1)
    """Tensor parallelism: heads, feed-forward columns and vocabulary are sharded."""

    def check(self) -> Iterator[Problem]:
        sizes = {axis: getattr(self, axis) for axis in AXES}
        for axis, size in sizes.items():
            if size == 0:
                yield Problem(
                    axis, "is not a size", value=0, accepted="a positive number, or -1 for the remaining devices"
                )
        automatic = [axis for axis, size in sizes.items() if size == -1]
        if len(automatic) > 1:
            yield Problem(
                automatic[-1],
                f"only one axis can be -1, but {automatic[0]} is -1 too",
                value=-1,
                accepted="a positive number",
            )


@schema
class Mesh(Axes):
    """Mesh axes within a slice (fast links); those across slices (data center network) are under dcn."""

    dcn: Axes = section(Axes)
    slices: int | None = option(None, ge=1)
    """Number of slices. null: as reported by the devices."""
    rules: dict[str, list[str]] = option(RULES)
    """Mesh axes over which each logical axis is sharded, in order."""

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
                        f"{axis!r} is not a mesh axis",
                        value=axes,
                        accepted=", ".join(AXES),
                        hint=did_you_mean(axis, AXES),
                    )
