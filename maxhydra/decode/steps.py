"""The compiled programs of the engine: read parts of prompts, advance every running sequence by a token, draw tokens.

Forward and draw are separate programs: their variants add up instead of multiplying. Cache and board are donated and
live on the device, where drawn tokens are fed back.

A row's arithmetic is its own, but programs of different shapes may add its numbers in a different order: logits of the
same sequence in different company differ by rounding (about 1e-6 of their size in float32), and a token only where two
candidates are nearer to each other than that.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.decode.buckets import Shape
from maxhydra.decode.compile_cache import CompileCache, Program
from maxhydra.decode.sampler import SampledTokens, SamplingFeatures, Settings, choose, likeliest
from maxhydra.decode.step_inputs import HEAD, Plan, columns, later
from maxhydra.decode.weight_layout import WeightLayout
from maxhydra.layers import Context, PagedCacheSpec, PageTable
from maxhydra.sharding import Sharder

Tree = Any
# Tokens from which on kernels of a GPU take longer than their launch: to gather launches in graphs, which takes a
# millisecond before the first, gains nothing any more.
LONG = 1024


class SampleKey(NamedTuple):
    """A program that draws: for how many rows, and how."""

    rows: int
    steps: SamplingFeatures

    def holds(self, other: "SampleKey") -> bool:
        return self.rows == other.rows and self.steps.holds(other.steps)

    @property
    def size(self) -> int:
        """About the times that the logits are looked at."""
        steps = self.steps
        return self.rows * (1 + 4 * steps.draws + 64 * steps.filters + steps.penalises + 8 * steps.reports)

    @property
    def length(self) -> int:
        return 1


class MultiStepKey(NamedTuple):
    """A program that advances every row by several tokens, each fed by the one before it."""

    shape: Shape
    steps: SamplingFeatures
    length: int

    def holds(self, other: "MultiStepKey") -> bool:
        return self.length >= other.length and self.shape.holds(other.shape) and self.steps.holds(other.steps)

    @property
    def size(self) -> int:
        return self.shape.size * self.length


class SlotState(NamedTuple):
    """What is known of every place among the sequences decoded at a time; the last place is nobody's."""

    last_N: jax.Array
    """The token drawn last."""
    seen_NV: jax.Array
    """Tokens of the prompt and the answer; kept up for sequences with a repetition penalty."""


class Programs:
    """Forward and draw in every shape that comes up."""

    def __init__(
        self, arrangement: WeightLayout, params: Tree, room: PagedCacheSpec, *, sharder: Sharder, steady: bool
    ):
        """`params` as they are kept, and only for their shapes and shardings; `steady`: no program stands in for
        another."""
        model = arrangement.model
        self._arrangement, self._model, self._room, self._sharder = arrangement, model, room, sharder
        self._params = jax.tree.map(lambda leaf: _placed(leaf, leaf.sharding), params)
        self._whole = sharder.sharding(())
        self._logits = sharder.sharding(("act_batch", "act_vocab"))
        caches = jax.eval_shape(lambda: model.empty_cache(room))
        self._cache_shardings = jax.tree.map(
            lambda cache: sharder.tree(cache.axes()), caches, is_leaf=lambda node: not isinstance(node, (dict, list))
        )
        self._caches = jax.tree.map(_placed, caches, self._cache_shardings)
        self._forwards: CompileCache[Shape] = CompileCache(self._compile_forward, steady=steady)
        self._draws: CompileCache[SampleKey] = CompileCache(self._compile_draw, steady=steady)
        self._bursts: CompileCache[MultiStepKey] = CompileCache(self._compile_burst, steady=steady)

    @property
    def nobody(self) -> int:
        """The place of rows without a sequence."""
        return self._room.slots

    def empty(self) -> tuple[Tree, SlotState]:
        """A cache and a board on the device."""
        cache = jax.jit(lambda: self._model.empty_cache(self._room), out_shardings=self._cache_shardings)()
        zeros = [jax.device_put(np.zeros(leaf.shape, leaf.dtype), self._whole) for leaf in self._board()]
        return cache, SlotState(*zeros)

    def shape_for(self, shape: Shape, *, eventual: Shape) -> Shape:
        """The shape itself, or that of a program in hand; `eventual` is what it will soon grow to."""
        return self._forwards.choose(shape, eventual=eventual)

    def ahead(self, shape: Shape, steps: SamplingFeatures) -> None:
        """Begin to compile what a coming step will need."""
        name = SampleKey(shape.rows, steps)
        self._forwards.begin(self._forwards.choose(shape, eventual=shape))
        self._draws.begin(self._draws.choose(name, eventual=name))

    def forward(
        self, shape: Shape, params: Tree, cache: Tree, board: SlotState, plan_BC: np.ndarray
    ) -> tuple[jax.Array, Tree, jax.Array]:
        """Logits [B, V] after the last token of each row, the cache with the tokens in it, and how to draw the next."""
        logits_BV, cache, head_BC = self._forwards.get(shape)(params, cache, board.last_N, plan_BC)
        return logits_BV, cache, head_BC

    def draw(
        self, board: SlotState, logits_BV: jax.Array, head_BC: jax.Array, steps: SamplingFeatures
    ) -> tuple[SlotState, SampledTokens]:
        """A token for every row, and the board with them on it."""
        name = SampleKey(logits_BV.shape[0], steps)
        board, choice = self._draws.get(self._draws.choose(name, eventual=name))(board, logits_BV, head_BC)
        return board, choice

    def burst_for(self, name: MultiStepKey, *, eventual: MultiStepKey) -> MultiStepKey | None:
        """The burst to use for work of this name; None while there is none, which is then being compiled."""
        chosen = self._bursts.choose(name, eventual=eventual)
        self._bursts.begin(chosen)
        return chosen if self._bursts.is_ready(chosen) else None

    def burst(
        self, name: MultiStepKey, params: Tree, cache: Tree, board: SlotState, plan_BC: np.ndarray | jax.Array
    ) -> tuple[Tree, SlotState, jax.Array, SampledTokens]:
        """Tokens for every row, [length, B], and the plan of those after them; of a row with less than `length` tokens
        left, the rest means nothing."""
        cache, board, next_BC, choice = self._bursts.get(name)(params, cache, board, plan_BC)
        return cache, board, next_BC, choice

    def note_prompt(self, board: SlotState, slot: int, prompt: tuple[int, ...]) -> SlotState:
        """Write down a new sequence's tokens, for the repetition penalty."""
        seen_V = np.zeros(board.seen_NV.shape[1], bool)
        seen_V[list(prompt)] = True
        return SlotState(board.last_N, _noted(board.seen_NV, np.int32(slot), seen_V))

    def settled(self) -> int:
        """As of Compiled, over all programs."""
        return self._forwards.settled() + self._draws.settled() + self._bursts.settled()

    def close(self) -> None:
        self._forwards.close()
        self._draws.close()
        self._bursts.close()

    def _compile_forward(self, shape: Shape) -> Program:
        forward = _forward(self._arrangement, self._sharder, shape)
        shardings = (self._logits, self._cache_shardings, self._whole)
        jitted = jax.jit(forward, donate_argnums=1, out_shardings=shardings)
        is_long = self._sharder.platform == "gpu" and shape.rows * shape.tokens >= LONG
        options: dict[str, str | bool] | None = {"xla_gpu_enable_command_buffer": ""} if is_long else None
        lowered = jitted.lower(self._params, self._caches, self._board().last_N, self._plan(shape.rows, columns(shape)))
        return lowered.compile(compiler_options=options)

    def _compile_draw(self, name: SampleKey) -> Program:
        rows, steps = name
        config = self._model.config
        logits = jax.ShapeDtypeStruct(
            (rows, config.vocab_size), jnp.dtype(config.dtypes.logits.value), sharding=self._logits
        )
        jitted = jax.jit(_draw(steps), donate_argnums=0, out_shardings=self._whole)
        return jitted.lower(self._board(), logits, self._plan(rows, HEAD)).compile()

    def _compile_burst(self, name: MultiStepKey) -> Program:
        burst = _burst(self._arrangement, self._sharder, name, nobody=self.nobody)
        shardings = (self._cache_shardings, self._whole, self._whole, self._whole)
        jitted = jax.jit(burst, donate_argnums=(1, 2), out_shardings=shardings)
        plan = self._plan(name.shape.rows, columns(name.shape))
        return jitted.lower(self._params, self._caches, self._board(), plan).compile()

    def _plan(self, rows: int, width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, width), jnp.uint32, sharding=self._whole)

    def _board(self) -> Any:
        """The board's shapes."""
        places, vocab = self._room.slots + 1, self._model.config.vocab_size
        board = jax.eval_shape(lambda: SlotState(jnp.zeros(places, jnp.int32), jnp.zeros((places, vocab), bool)))
        return jax.tree.map(lambda leaf: _placed(leaf, self._whole), board)


def _forward(
    arrangement: WeightLayout, sharder: Sharder, shape: Shape
) -> Callable[..., tuple[jax.Array, Tree, jax.Array]]:
    hidden = _hidden(arrangement, sharder, shape)

    def forward(params: Tree, cache: Tree, last_N: jax.Array, plan_BC: jax.Array) -> tuple[jax.Array, Tree, jax.Array]:
        params, plan = arrangement.use(params), Plan.of(plan_BC, pages=shape.pages)
        tokens_BT = plan.tokens_BT if shape.is_prompt else last_N[plan.rows.slots_B][:, None]
        hidden_B1D, cache = hidden(params, cache, tokens_BT, plan.positions(shape.tokens), plan.rows)
        logits_BV = arrangement.model.logits(params, hidden_B1D, sharder)[:, 0]
        return logits_BV, cache, later(plan_BC[:, :HEAD], shape.tokens)

    return forward


def _hidden(arrangement: WeightLayout, sharder: Sharder, shape: Shape) -> Callable[..., tuple[jax.Array, Tree]]:
    """Hidden states [B, 1, D] of the last token of each row, and the cache with the tokens in it."""

    def hidden(
        params: Tree, cache: Tree, tokens_BT: jax.Array, positions_BT: jax.Array, rows: PageTable
    ) -> tuple[jax.Array, Tree]:
        is_token_BT = positions_BT >= 0
        context = Context(
            positions=positions_BT,
            segments=is_token_BT.astype(jnp.int32),
            sharder=sharder,
            cache=cache,
            dropout_key=None,
            rows=rows,
            asked=jnp.maximum(jnp.sum(is_token_BT, axis=1) - 1, 0) if shape.is_prompt else None,
            is_fresh=shape.is_fresh,
        )
        return arrangement.model.hidden(params, tokens_BT, context)

    return hidden


def _draw(steps: SamplingFeatures) -> Callable[..., tuple[SlotState, SampledTokens]]:
    def draw(board: SlotState, logits_BV: jax.Array, head_BC: jax.Array) -> tuple[SlotState, SampledTokens]:
        plan = Plan.of(head_BC, pages=0)
        seen_NV, choice = _chosen(steps, board.seen_NV, logits_BV, plan.target_B, plan.settings)
        return SlotState(board.last_N.at[plan.target_B].set(jnp.maximum(choice.token_B, 0)), seen_NV), choice

    return draw


def _chosen(
    steps: SamplingFeatures, seen_NV: jax.Array, logits_BV: jax.Array, slots_B: jax.Array, settings: Settings
) -> tuple[jax.Array, SampledTokens]:
    """A token for every row, and the tokens seen with it where that is kept up."""
    choice = choose(logits_BV, seen_NV[slots_B] if steps.penalises else None, settings, steps)
    if steps.penalises:
        seen_NV = seen_NV.at[slots_B, jnp.maximum(choice.token_B, 0)].set(True)
    return seen_NV, choice


def _burst(
    arrangement: WeightLayout, sharder: Sharder, name: MultiStepKey, *, nobody: int
) -> Callable[..., tuple[Tree, SlotState, jax.Array, SampledTokens]]:
    """Tokens go from step to step by themselves; the board has them at the end."""
    model, hidden = arrangement.model, _hidden(arrangement, sharder, name.shape)

    def burst(
        params: Tree, cache: Tree, board: SlotState, plan_BC: jax.Array
    ) -> tuple[Tree, SlotState, jax.Array, SampledTokens]:
        plan = Plan.of(plan_BC, pages=name.shape.pages)
        table_BW, slots_B = plan.rows

        def step(carry: tuple[Tree, jax.Array, jax.Array], number: jax.Array) -> tuple[Any, SampledTokens]:
            """A row that has no tokens left reads and writes nothing any more."""
            (cache, seen_NV, last_B), used = carry, arrangement.use(params)
            is_left_B = number < plan.left_B
            position_B1 = jnp.where(is_left_B, plan.start_B + number, -1)[:, None]
            own_B = jnp.where(is_left_B, slots_B, nobody)
            hidden_B1D, cache = hidden(used, cache, last_B[:, None], position_B1, PageTable(table_BW, own_B))
            if name.steps.takes_likeliest:
                logit_B, token_B = model.largest_logit(used, hidden_B1D[:, 0], sharder)
                return (cache, seen_NV, token_B), likeliest(logit_B, token_B)
            logits_BV = model.logits(used, hidden_B1D, sharder)[:, 0]
            settings = plan.settings._replace(position_B=plan.start_B + number + 1)
            seen_NV, choice = _chosen(name.steps, seen_NV, logits_BV, own_B, settings)
            return (cache, seen_NV, jnp.maximum(choice.token_B, 0)), choice

        before = cache, board.seen_NV, board.last_N[slots_B]
        (cache, seen_NV, _), choices = jax.lax.scan(step, before, jnp.arange(name.length))
        own_B = jnp.where(plan.left_B > 0, slots_B, nobody)
        last_B = choices.token_B[jnp.clip(plan.left_B, 1, name.length) - 1, jnp.arange(own_B.shape[0])]
        board = SlotState(board.last_N.at[own_B].set(jnp.maximum(last_B, 0)), seen_NV)
        return cache, board, later(plan_BC, name.length), choices

    return burst


@jax.jit
def _noted(seen_NV: jax.Array, slot: jax.Array, seen_V: jax.Array) -> jax.Array:
    return seen_NV.at[slot].set(seen_V)


def _placed(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
