"""A Hopper GPU in NumPy, which runs Pallas kernels for Mosaic as they stand: `run(f, *arrays)` is f(*arrays).

Values alone would hide most mistakes of such kernels, so nothing happens before it must: a product of the matrix unit
is made when it is waited for, a copy at any time before its barrier has passed, and warpgroups take turns at random.
hopper_memory.py says what is a Race then; a wait for what never comes is a Deadlock. Layouts of registers and of shared
memory are left to the compiler, which the lowering shows. There are no semaphores.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from tests.support.hopper_arithmetic import computed
from tests.support.hopper_memory import Barrier, Load, Memory, Product, Race, Store, View

NOTHING = ("set_max_registers_p", "commit_group", "async_prefetch")
# Where an equation has another program inside.
INNER = ("jaxpr", "call", "call_jaxpr", "fun_jaxpr")


class Deadlock(Exception):
    """All warpgroups wait."""


def run(function: Callable[..., Any], *arguments: Any, seed: int = 0) -> Any:
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    host = Warpgroup(Cluster([{}], np.random.default_rng(seed)), 0, {}, 0)
    outcome = _last(host.evaluate(traced, jax.tree.leaves(arguments)))
    return jax.tree.unflatten(jax.tree.structure(shapes), outcome)


def _last(steps: Generator[Any, None, Any]) -> Any:
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        return stop.value


class Cluster:
    """Programs that run at the same time, mostly one; `members` are their places by the names of axes."""

    def __init__(self, members: list[dict[str, int]], rng: np.random.Generator) -> None:
        self.members, self.rng = members, rng
        self.loads: list[Load] = []
        # What all of them must ask for before it comes.
        self.shared_loads: dict[Any, list[Load]] = {}
        self.scopes: dict[tuple[int, int], list[list[Memory]]] = {}

    def others(self, member: int, axes: str | tuple[str, ...]) -> list[int]:
        """The member and those that differ from it in these axes alone."""
        axes = (axes,) if isinstance(axes, str) else axes
        own = [(name, i) for name, i in self.members[member].items() if name not in axes]
        return [number for number, place in enumerate(self.members) if all(place[name] == i for name, i in own)]

    def scope(self, key: tuple[int, int], made: Callable[[int], list[Memory]]) -> list[list[Memory]]:
        """Shared memory and barriers of each member."""
        if key not in self.scopes:
            self.scopes[key] = [made(member) for member in range(len(self.members))]
            for same in zip(*self.scopes[key], strict=True):
                for memory in same:
                    memory.everywhere = same
        return self.scopes[key]

    def run(self, jaxpr: Any, memories: list[Memory], threads: int, thread_name: str | None) -> None:
        groups = [
            Warpgroup(self, member, {**place, **({} if thread_name is None else {thread_name: number})}, number)
            for member, place in enumerate(self.members)
            for number in range(threads)
        ]
        steps = {group: group.evaluate(jaxpr, memories) for group in groups}
        waits: dict[Warpgroup, Any] = dict.fromkeys(groups)
        # How likely a copy ends while somebody can go on, and how likely that is who went last: by chance, since some
        # mistakes show when copies are late, others when one warpgroup is far ahead.
        haste, persistence = self.rng.random(2)
        last: list[Warpgroup] = []
        while steps:
            able = [group for group in steps if waits[group] is None or waits[group].has_passed(group.number)]
            if not able and not self.loads:
                raise Deadlock(", ".join(group.where for group in steps))
            if self.loads and (not able or self.rng.random() < haste):
                self.loads.pop(self.rng.integers(len(self.loads))).finish()
                continue
            again = [group for group in last if group in able and self.rng.random() < persistence]
            group = (again or able)[self.rng.integers(len(again or able))]
            last = [group]
            if waits[group] is not None:
                waits[group].pass_by(group.number)
            try:
                waits[group] = next(steps[group])
            except StopIteration:
                del steps[group]
            except Race as race:
                race.add_note(group.where)
                raise
        if self.loads or self.shared_loads or any(group.products or group.stores for group in groups):
            raise Race("a program ends before what it has begun")


class Warpgroup:
    """Goes through a program's equations; a generator of barriers to wait for, None where others may go first."""

    def __init__(self, cluster: Cluster, member: int, place: dict[str, int], number: int) -> None:
        self.cluster, self.member, self.place, self.number = cluster, member, place, number
        self.products: deque[Product] = deque()
        self.stores: deque[Store] = deque()
        self.written: list[View] = []
        self.visits: Counter[int] = Counter()
        self.equation: Any = None

    def visit(self, equation: Any) -> tuple[int, int]:
        """Names this time at an equation, as other warpgroups name it."""
        self.visits[id(equation)] += 1
        return id(equation), self.visits[id(equation)]

    def evaluate(self, jaxpr: Any, arguments: Iterable[Any]) -> Generator[Barrier | None, None, list[Any]]:
        consts = []
        if isinstance(jaxpr, ClosedJaxpr):
            jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def value(var: Any) -> Any:
            return var.val if isinstance(var, Literal) else known[var]

        for equation in jaxpr.eqns:
            name, values = equation.primitive.name, list(map(value, equation.invars))
            self.equation = equation
            if rule := RULES.get(name):
                outcome = rule(self, equation, *values)
                if isinstance(outcome, Generator):
                    outcome = yield from outcome
            elif inner := next((equation.params[key] for key in INNER if key in equation.params), None):
                outcome = yield from self.evaluate(inner, values)
            elif name in NOTHING:
                outcome = []
            elif (found := computed(equation, values)) is not None:
                outcome = [found]
            else:
                outcome = equation.primitive.bind(*values, **equation.params)
                outcome = outcome if equation.primitive.multiple_results else [outcome]
            known.update(zip(equation.outvars, outcome or [], strict=True))
        return list(map(value, jaxpr.outvars))

    @property
    def where(self) -> str:
        frames = self.equation.source_info.traceback.frames
        own = next(frame for frame in frames if "site-packages" not in frame.file_name)
        return f"warpgroup {self.number} at {own.file_name}:{own.line_num}, {self.equation.primitive.name}"

    def finish(self, begun: deque, but: int) -> None:
        while len(begun) > but:
            begun.popleft().finish()

    def assert_settled(self, memory: Memory) -> None:
        if any(product.acc.memory is memory for product in self.products):
            raise Race("an accumulator is read before its product has ended")


def _views(equation: Any, leaves: Iterable[Any], *memories: tuple[Any, Any]) -> Iterable[Any]:
    """Memories as seen through transforms whose leaves follow each other; an array as it is."""
    leaves = iter(leaves)
    for memory, tree in memories:
        count = 0 if tree is None else tree.num_leaves
        some = list(itertools.islice(leaves, count))
        transforms = () if tree is None else jax.tree.unflatten(tree, some)
        yield memory.at(transforms) if isinstance(memory, Memory) else memory
    assert not list(leaves), f"{equation.primitive.name} with a predicate"


def _axis_index(self: Warpgroup, equation: Any) -> Any:
    return [np.int32(self.place[equation.params["axis_name"]])]


def _cond(self: Warpgroup, equation: Any, which: Any, *values: Any) -> Any:
    return (yield from self.evaluate(equation.params["branches"][int(which)], values))


def _while(self: Warpgroup, equation: Any, *values: Any) -> Any:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_cond, of_body, carry = values[:first], values[first:second], list(values[second:])
    while (yield from self.evaluate(params["cond_jaxpr"], [*of_cond, *carry]))[0]:
        carry = yield from self.evaluate(params["body_jaxpr"], [*of_body, *carry])
    return carry


def _scan(self: Warpgroup, equation: Any, *values: Any) -> Any:
    params, inner = equation.params, getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
    # What goes around has the shape of the loop's own; what is taken or given step by step has one more axis.
    carried = _alike(equation.outvars, inner.outvars)
    beyond = _alike(equation.invars, inner.invars)
    consts, carry, every = values[: beyond - carried], list(values[beyond - carried : beyond]), values[beyond:]
    steps, outs = range(params["length"]), []
    for i in reversed(steps) if params["reverse"] else steps:
        out = yield from self.evaluate(params["jaxpr"], [*consts, *carry, *(one[i] for one in every)])
        carry = out[:carried]
        outs.append(out[carried:])
    outs = outs[::-1] if params["reverse"] else outs
    return [*carry, *(np.stack(one) for one in zip(*outs, strict=True))]


def _alike(outer: Iterable[Any], inner: Iterable[Any]) -> int:
    return sum(one.aval.shape == other.aval.shape for one, other in zip(outer, inner, strict=True))


def _run_scoped(self: Warpgroup, equation: Any, *values: Any) -> Any:
    params = equation.params

    def made(member: int) -> list[Memory]:
        pairs = zip(params["jaxpr"].invars, params["ref_transforms"], strict=True)
        return [_made(var.aval, layouts, partial(self.cluster.others, member)) for var, layouts in pairs]

    if params["collective_axes"]:
        scope = self.cluster.scope(self.visit(equation), made)[self.member]
    else:
        scope = made(self.member)
    outcome = yield from self.evaluate(ClosedJaxpr(params["jaxpr"], values), scope)
    for memory in scope:
        self.assert_settled(memory)
    return outcome


def _made(aval: Any, layouts: Iterable[Any], others: Callable[[Any], list[int]]) -> Memory:
    """Memory or barriers of a scope."""
    inner = aval.inner_aval
    if not jax.dtypes.issubdtype(inner.dtype, jax.dtypes.extended):
        for layout in layouts:
            inner = layout.transform_type(inner)
        return Memory.empty(inner.shape, inner.dtype, str(aval.memory_space))
    barriers = Memory(np.empty(inner.shape, object), "barriers")
    for axes in getattr(inner.dtype, "collective_axes", ()):
        barriers.reached |= set(others(axes))
    for i in range(barriers.values.size):
        barriers.values.flat[i] = Barrier(inner.dtype.num_arrivals * max(1, len(barriers.reached)))
    return barriers


def _run_state(self: Warpgroup, equation: Any, *values: Any) -> Any:
    params = equation.params
    assert all(params["is_initialized"])
    refs = [
        one if isinstance(one, Memory) else Memory(np.array(one), str(var.aval.memory_space))
        for one, var in zip(values, params["jaxpr"].invars, strict=True)
    ]
    yield from self.evaluate(params["jaxpr"], refs)
    if any(ref.space == "regs" for ref in refs):
        self.finish(self.products, 0)
    return [one if isinstance(one, Memory) else ref.values for one, ref in zip(values, refs, strict=True)]


def _new_ref(self: Warpgroup, equation: Any, value: Any) -> Any:
    return [Memory(np.array(value), "gmem")]


def _launch(self: Warpgroup, equation: Any, *values: Any) -> Any:
    (jaxpr,), (mesh,) = equation.params["jaxprs"], equation.params["meshes"]
    assert not equation.params["input_output_aliases"]
    memories = [one if isinstance(one, Memory) else Memory(np.array(one), "gmem") for one in values]
    outs = [Memory.empty(var.aval.shape, var.aval.dtype, "gmem") for var in equation.outvars]
    for place in np.ndindex(*mesh.grid):
        named = dict(zip(mesh.grid_names, place, strict=True))
        inside = [dict(zip(mesh.cluster_names, member, strict=True)) for member in np.ndindex(*mesh.cluster)]
        cluster = Cluster([named | member for member in inside], self.cluster.rng)
        cluster.run(jaxpr, [*memories, *outs], int(mesh.num_threads or 1), mesh.thread_name)
    return [out.values for out in outs]


def _get(self: Warpgroup, equation: Any, memory: Memory, *leaves: Any) -> Any:
    (view,) = _views(equation, leaves, (memory, equation.params["tree"]))
    self.assert_settled(memory)
    return [view.values.copy()]


def _swap(self: Warpgroup, equation: Any, memory: Memory, value: Any, *leaves: Any) -> Any:
    (view,) = _views(equation, leaves, (memory, equation.params["tree"]))
    self.assert_settled(memory)
    before = view.values.copy()
    view.values[...] = value
    if memory.writers is not None:
        view.writers[...] = self.number + 1
        self.written.append(view)
    return [before]


def _commit_smem(self: Warpgroup, equation: Any) -> None:
    for view in self.written:
        view.writers[view.writers == self.number + 1] = 0
    self.written.clear()


def _arrive(self: Warpgroup, equation: Any, barriers: Memory, *leaves: Any) -> Any:
    for one in [barriers.everywhere[member] for member in barriers.reached] or [barriers]:
        (view,) = _views(equation, leaves, (one, equation.params["transforms_treedef"]))
        view.values.item().arrive()
    yield None


def _wait(self: Warpgroup, equation: Any, barriers: Memory, *leaves: Any) -> Any:
    (view,) = _views(equation, leaves, (barriers, equation.params["transforms_treedef"]))
    yield view.values.item()


def _load(self: Warpgroup, equation: Any, source: Memory, target: Memory, barriers: Memory, *leaves: Any) -> None:
    params = equation.params
    trees = (params[f"{one}_transforms_treedef"] for one in ("src", "dst", "barrier"))
    from_, to, barrier = _views(equation, leaves, *zip((source, target, barriers), trees, strict=True))
    load = Load(from_, to, barrier.values.item())
    if not params["collective_axes"]:
        to.spoil()
        self.cluster.loads.append(load)
        return
    # Each member brings a part of what all get.
    members = self.cluster.others(self.member, params["collective_axes"])
    for member in members:
        View(target.everywhere[member], to.transforms).spoil()
    key = (self.visit(equation), *members)
    so_far = self.cluster.shared_loads.setdefault(key, [])
    so_far.append(load)
    if len(so_far) == len(members):
        self.cluster.loads.extend(self.cluster.shared_loads.pop(key))


def _store(self: Warpgroup, equation: Any, source: Memory, target: Memory, *leaves: Any) -> None:
    params = equation.params
    assert params["commit_group"]
    trees = (params[f"{one}_transforms_treedef"] for one in ("src", "dst"))
    from_, to = _views(equation, leaves, *zip((source, target), trees, strict=True))
    self.stores.append(Store(from_, to, params["reduction_op"]))


def _wgmma(self: Warpgroup, equation: Any, acc: Memory, left: Any, right: Any, *leaves: Any) -> None:
    trees = (equation.params[f"{one}_transforms_tree"] for one in ("acc", "a", "b"))
    self.products.append(Product(*_views(equation, leaves, *zip((acc, left, right), trees, strict=True))))


def _deref(self: Warpgroup, equation: Any, acc: Memory) -> Any:
    self.finish(self.products, equation.params["wait_n"] or 0)
    self.assert_settled(acc)
    return [acc.values.copy()]


def _wgmma_wait(self: Warpgroup, equation: Any, *n: Any) -> None:
    self.finish(self.products, int(equation.params.get("n", *n)))


def _wait_store(self: Warpgroup, equation: Any, *n: Any) -> None:
    self.finish(self.stores, int(equation.params.get("n", *n)))


RULES = {
    "axis_index": _axis_index,
    "layout_cast": lambda self, equation, value: [value],
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "run_scoped": _run_scoped,
    "run_state": _run_state,
    "new_ref": _new_ref,
    "mpmd_map": _launch,
    "get": _get,
    "load": _get,
    "swap": _swap,
    "commit_smem": _commit_smem,
    "barrier_arrive": _arrive,
    "barrier_wait": _wait,
    "copy_gmem_to_smem": _load,
    "copy_smem_to_gmem": _store,
    "wait_smem_to_gmem": _wait_store,
    "wgmma_ref": _wgmma,
    "wgmma_accumulator_deref_p": _deref,
    "wgmma_wait": _wgmma_wait,
}
