"""Rematerialization (Chen et al., 2016): which activations of a layer are saved for the backward pass, and where."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from maxhydra.config.schema import model as config
from maxhydra.kernels.attention.spec import CHECKPOINT_NAME


@dataclasses.dataclass(frozen=True)
class Remat:
    """The remat policy of a config, applied to the function of a layer."""

    policy: config.RematPolicy
    save: tuple[str, ...]
    offload: tuple[str, ...]

    @classmethod
    def of(cls, remat: config.Remat) -> "Remat":
        return cls(remat.policy, tuple(remat.save), tuple(remat.offload))

    def wrap(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """Wrap a function in jax.checkpoint with this policy.

        Outside a loop XLA must be kept from merging the recomputation with the original by CSE, which would save
        everything after all. In a scan the two are in different bodies, and the barrier would only cost time.
        """
        if self.policy is config.RematPolicy.none:
            return function
        return jax.checkpoint(function, policy=self._saveable(), prevent_cse=not in_loop)

    def _saveable(self) -> Callable[..., Any]:
        policies = jax.checkpoint_policies
        if self.policy is config.RematPolicy.full:
            return policies.nothing_saveable
        if self.policy is config.RematPolicy.minimal:
            # The projections; matmuls with a batch dimension are attention's, which grow with the square of the length.
            return _with_fused_attention(policies.dots_with_no_batch_dims_saveable)
        named = policies.save_only_these_names(*self.save)
        if self.offload:
            named = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=list(self.save),
                names_which_can_be_offloaded=list(self.offload),
                offload_src="device",
                offload_dst="pinned_host",
            )
        # Saving the kernel's output alone is not enough: its backward pass also reads the softmax normalizer.
        return _with_fused_attention(named) if "context" in self.save else named


def _with_fused_attention(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The policy, also saving outputs of attention kernels: as small as their inputs, expensive to recompute."""

    def is_saveable(primitive: Any, *args: Any, **params: Any) -> Any:
        is_attention = primitive.name.startswith("dot_product_attention_fwd") or params.get("name") == CHECKPOINT_NAME
        return is_attention or policy(primitive, *args, **params)

    return is_saveable
