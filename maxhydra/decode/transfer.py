"""Copies sequences from the runner that prefilled them to the one that decodes them, on other devices.

A copy reaches all groups of devices of the target, since the runners need not have the same number of groups.
"""

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.decode.cache_arrays import map_caches
from maxhydra.decode.page_pool import PageLease, Place
from maxhydra.decode.pending import PendingTokens, PrefillOutput
from maxhydra.decode.runner import Runner
from maxhydra.decode.sequence import Sequence
from maxhydra.decode.slot_state import COMPLETION, SlotState
from maxhydra.layers import SequenceIndex
from maxhydra.sharding import LogicalAxes, is_axes

Tree = Any
# Prefill calls that may be in flight: one runs while the next one is queued behind it.
MAX_CALLS = 2
NO_PAGES = PageLease([], num_shared=0, parent=0, num_published=0, generation=0)


class SequenceCopy(NamedTuple):
    """A sequence, and its KV cache and first token on the devices of the target."""

    sequence: Sequence
    num_pages: int
    arrays: tuple[Tree, jax.Array]


class CallInFlight(NamedTuple):
    """A prefill call in flight, and the copies of the sequences whose prompts it completes."""

    output: PrefillOutput
    copies: list[SequenceCopy]

    @property
    def arrays(self) -> list[Any]:
        return jax.tree.leaves((self.output.logits_BV, [copy.arrays for copy in self.copies]))


class Transfer:
    """The prefill calls in flight, first come, first served."""

    def __init__(self, source: Runner, target: Runner):
        self._source, self._target = source, target
        self._calls: deque[CallInFlight] = deque()
        # A copy goes directly from device to device if both runners shard the heads in the same way.
        runners = source, target
        is_alike = len({runner.sharder.num_shards("act_kv_heads") for runner in runners}) == 1
        axes = target.programs.cache.axes
        taken, self._copied = (_sequence_shardings(axes, runner, is_sharded=is_alike) for runner in runners)
        self._take = jax.jit(
            partial(_take, sizes={name: len(caches) for name, caches in axes.items()}), out_shardings=taken
        )
        state = (target.programs.cache.shardings, target.programs.replicated)
        self._put = jax.jit(_put, donate_argnums=(0, 1), out_shardings=state)

    @property
    def is_full(self) -> bool:
        """Whether another prefill call would only wait for those in flight."""
        return len(self._calls) >= MAX_CALLS

    def warm_up(self) -> None:
        """Compile the programs of all lengths of a prompt, by copying the padding slot, which has no pages."""
        buckets = self._source.buckets
        lengths = range(buckets.page_size, buckets.max_pages * buckets.page_size + 1, buckets.page_size)
        for num_pages in sorted({buckets.round_pages(length) for length in lengths}):
            source, target = (
                _index(Place(0, runner.programs.padding_slot, NO_PAGES, b""), num_pages, runner)
                for runner in (self._source, self._target)
            )
            self._write(self._read(source), target)

    def start(self, output: PrefillOutput) -> None:
        """Start to copy the sequences whose prompts a prefill call completes."""
        rows = [] if output.first_tokens is None else output.first_tokens.sequences
        copies = [self._copy(sequence) for sequence in rows if sequence is not None]
        self._calls.append(CallInFlight(output, copies))

    def receive(self, *, wait: bool) -> tuple[PendingTokens | None, list[Sequence]] | None:
        """Dispatch the writes of the first call's sequences to the target; return its first tokens and sequences.

        None if no call is in flight, or without `wait` if the copies have not arrived: decode steps that are dispatched
        after the writes would wait for them.
        """
        if not self._calls or not (wait or all(array.is_ready() for array in self._calls[0].arrays)):
            return None
        call = self._calls.popleft()
        jax.block_until_ready(call.arrays)
        # The pages of a sequence that was cancelled may belong to another one by now.
        copies = [copy for copy in call.copies if not copy.sequence.is_finished]
        for sequence, num_pages, arrays in copies:
            assert sequence.place is not None
            self._target.set_controls(sequence.place, sequence)
            self._write(arrays, _index(sequence.place, num_pages, self._target))
        return call.output.first_tokens, [copy.sequence for copy in copies]

    def _copy(self, sequence: Sequence) -> SequenceCopy:
        assert sequence.prefill_place is not None
        num_pages = self._source.buckets.round_pages(len(sequence.request.prompt))
        return SequenceCopy(sequence, num_pages, self._read(_index(sequence.prefill_place, num_pages, self._source)))

    def _read(self, index: SequenceIndex) -> tuple[Tree, jax.Array]:
        """A sequence of the source, copied to the devices of the target."""
        copied: tuple[Tree, jax.Array] = jax.device_put(self._take(*self._source.take_state(), index), self._copied)
        return copied

    def _write(self, arrays: tuple[Tree, jax.Array], index: SequenceIndex) -> None:
        """Write a copy to the state of the target."""
        self._target.put_state(*self._put(*self._target.take_state(), arrays, index))


def _take(
    cache: Tree, slot_state: SlotState, index: SequenceIndex, *, sizes: Mapping[str, int]
) -> tuple[Tree, jax.Array]:
    """The KV cache and the last token of one sequence. `sizes`: blocks of each part of the target's cache."""
    taken = map_caches(lambda each: each.take(index), cache)
    if {name: len(caches) for name, caches in taken.items()} != sizes:
        taken = _restack(taken, sizes)
    return taken, slot_state.last_token_N[index.slot]


def _restack(taken: dict[str, list[Any]], sizes: Mapping[str, int]) -> Tree:
    """The caches of all layers, stacked as those of a runner with another weight layout.

    Runners of one device have a block per layer, others stack the repetitions of the pattern.
    """
    repetitions = max([leaf.shape[0] for leaf in jax.tree.leaves(taken["pattern"])], default=0)
    pattern = [
        jax.tree.map(lambda x, at=at: x[at : at + 1], cache) for at in range(repetitions) for cache in taken["pattern"]
    ]
    layers = [*taken["prefix"], *pattern, *taken["remainder"]]
    first, last = sizes["prefix"], len(layers) - sizes["remainder"]
    stacks = [layers[start : last : sizes["pattern"]] for start in range(first, first + sizes["pattern"])]
    return {
        **taken,
        "prefix": layers[:first],
        "pattern": [jax.tree.map(lambda *each: jnp.concatenate(each), *stack) for stack in stacks],
        "remainder": layers[last:],
    }


def _put(
    cache: Tree, slot_state: SlotState, taken: tuple[Tree, jax.Array], index: SequenceIndex
) -> tuple[Tree, SlotState]:
    """Cache and slot state with one sequence added."""
    rows, token = taken
    last_token_N = slot_state.last_token_N.at[index.slot].set(token)
    usage_NV = slot_state.usage_NV.at[index.slot, token].add(COMPLETION)
    slot_state = slot_state._replace(last_token_N=last_token_N, usage_NV=usage_NV)
    return map_caches(lambda each, new: each.put(new, index), cache, rows), slot_state


def _sequence_shardings(cache_axes: Tree, runner: Runner, *, is_sharded: bool) -> tuple[Tree, Any]:
    """Shardings of what `_take` returns: as in a cache, without the axis of groups, or replicated."""

    def of_leaf(axes: LogicalAxes) -> Any:
        return runner.sharder.sharding(axes[1:] if is_sharded else ())

    return jax.tree.map(of_leaf, cache_axes, is_leaf=is_axes), runner.programs.replicated


def _index(place: Place, num_pages: int, runner: Runner) -> SequenceIndex:
    """The pages and slot of a place, padded with out-of-range pages."""
    pages = np.full(num_pages, runner.capacity.pages_per_group, np.int32)
    own = np.frombuffer(place.page_table, np.uint32)[:num_pages]
    pages[: len(own)] = own
    numbers: tuple[Any, Any, Any] = np.int32(place.group), pages, np.int32(place.slot)
    return SequenceIndex(*numbers)
