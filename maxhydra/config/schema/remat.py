"""Schema of rematerialization."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem, did_you_mean

ACTIVATIONS = ("query", "key", "value", "context", "attention_out", "mlp_gate", "mlp_up", "mlp_out", "routing")


class RematPolicy(Enum):
    none = "none"
    full = "full"
    minimal = "minimal"
    custom = "custom"
    auto = "auto"


@schema
class Remat(Schema):
    """Rematerialization: which activations are saved for the backward pass, and which are recomputed."""

    policy: RematPolicy = RematPolicy.none
    """none saves all activations, full only layer inputs, minimal also the outputs of matmuls (of experts only without
    expert parallelism) and attention and the router's decisions, custom those named in save and offload. auto: the
    first of none, minimal and full that fits in device memory by the estimate of task=plan (dpo, reward_model, grpo,
    distill: minimal or full); minimal if the memory is unknown."""
    save: list[str] = option([])
    """custom: activations saved on the device: query, key, value, context, attention_out, mlp_gate, mlp_up, mlp_out,
    routing (logits of the router, experts of each token and their order)."""
    offload: list[str] = option([])
    """custom: activations offloaded to host memory."""

    def check(self) -> Iterator[Problem]:
        for field in ("save", "offload"):
            names: list[str] = getattr(self, field)
            for name in names:
                if name not in ACTIVATIONS:
                    yield Problem(
                        field,
                        f"has no activation {name!r}",
                        value=names,
                        accepted=", ".join(ACTIVATIONS),
                        hint=did_you_mean(name, ACTIVATIONS),
                    )
            if names and self.policy is not RematPolicy.custom:
                yield Problem(
                    field,
                    f"is not used by policy={self.policy.value}",
                    value=names,
                    hint="set policy=custom, or leave this empty",
                )
        if self.policy is RematPolicy.custom and not self.save and not self.offload:
            yield Problem(
                "policy",
                "needs names in save or offload",
                value="custom",
                accepted="names from " + ", ".join(ACTIVATIONS),
                hint="to save nothing but layer inputs, set policy=full",
            )
