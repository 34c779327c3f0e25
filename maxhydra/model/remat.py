"""Rematerialisation (Chen et al., 2016): which activations of a layer wait for the backward pass, and where."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from maxhydra.config import model as config


@dataclasses.dataclass(frozen=True)
class Remat:
    """A policy of `config.Remat`, ready to wrap a layer."""

    policy: config.RematPolicy
    save: tuple[str, ...]
    offload: tuple[str, ...]

    @classmethod
    def of(cls, remat: config.Remat) -> "Remat":
        return cls(remat.policy, tuple(remat.save), tuple(remat.offload))

    def wrap(self, function: Callable[..., Any], *, in_loop: bool) -> Callable[..., Any]:
        """The function with its activations kept by the policy.

        Outside a loop the compiler must be kept from merging the second computation with the first, which would keep
        everything after all. In a loop the two lie in different bodies, and the barrier would only cost.
        """
        if self.policy is config.RematPolicy.none:
            return function
        return jax.checkpoint(function, policy=self._saveable(), prevent_cse=not in_loop)

    def _saveable(self) -> Callable[..., Any]:
        policies = jax.checkpoint_policies
        if self.policy is config.RematPolicy.full:
            return policies.nothing_saveable
        if self.policy is config.RematPolicy.minimal:
            # The projections; products with a batch dimension are attention's, whose results grow with length squared.
            return policies.dots_with_no_batch_dims_saveable
        if not self.offload:
            return policies.save_only_these_names(*self.save)
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.save),
            names_which_can_be_offloaded=list(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
