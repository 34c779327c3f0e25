"""A simulator of a Hopper GPU in NumPy that runs unmodified Pallas Mosaic kernels: `run(f, *arrays)` is f(*arrays).

Comparing values alone would hide most bugs of such kernels, so everything happens as late as possible: a wgmma is
computed when it is waited for, a copy at a random time before its barrier completes, and warpgroups are interleaved at
random. hopper_memory.py defines a Race; a wait that can never end is a Deadlock. Layouts of registers and of shared
memory are not simulated; lowering the kernels checks them. Semaphores are unsupported.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from tests.support.hopper_arithmetic import evaluate_elementwise
from tests.support.hopper_memory import Barrier, Load, Memory, Race, Store, View, Wgmma

NO_OPS = ("set_max_registers_p", "commit_group", "async_prefetch")
# Parameters that hold an inner jaxpr.
INNER = ("jaxpr", "call", "call_jaxpr", "fun_jaxpr")


class Deadlock(Exception):
    """All warpgroups are waiting."""


def run(function: Callable[..., Any], *arguments: Any, seed: int = 0) -> Any:
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    host = Warpgroup(Cluster([{}], np.random.default_rng(seed)), 0, {}, 0)
    outcome = _run_to_end(host.evaluate(traced, jax.tree.leaves(arguments)))
    return jax.tree.unflatten(jax.tree.structure(shapes), outcome)


def _run_to_end(steps: Generator[Any, None, Any]) -> Any:
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        return stop.value


class Cluster:
    """Programs that run concurrently, usually one; `members` are their indices by axis name."""

    def __init__(self, members: list[dict[str, int]], rng: np.random.Generator) -> None:
        self.members, self.rng = members, rng
        self.loads: list[Load] = []
        # Multicast loads, which start when all members have issued them.
        self.shared_loads: dict[Any, list[Load]] = {}
        self.scopes: dict[tuple[int, int], list[list[Memory]]] = {}

    def peers(self, member: int, axes: str | tuple[str, ...]) -> list[int]:
        """The member and those that differ from it only in these axes."""
        axes = (axes,) if isinstance(axes, str) else axes
        fixed = [(name, i) for name, i in self.members[member].items() if name not in axes]
        return [number for number, index in enumerate(self.members) if all(index[name] == i for name, i in fixed)]

    def scope(self, key: tuple[int, int], allocate: Callable[[int], list[Memory]]) -> list[list[Memory]]:
        """Shared memory and barriers of each member."""
        if key not in self.scopes:
            self.scopes[key] = [allocate(member) for member in range(len(self.members))]
            for copies in zip(*self.scopes[key], strict=True):
                for memory in copies:
                    memory.copies = copies
        return self.scopes[key]

    def run(self, jaxpr: Any, memories: list[Memory], threads: int, thread_name: str | None) -> None:
        groups = [
            Warpgroup(self, member, {**index, **({} if thread_name is None else {thread_name: number})}, number)
            for member, index in enumerate(self.members)
            for number in range(threads)
        ]
        steps = {group: group.evaluate(jaxpr, memories) for group in groups}
        waits: dict[Warpgroup, Any] = dict.fromkeys(groups)
        # Probability that a copy finishes while a warpgroup could run, and that the last warpgroup runs again. Both are
        # random: some bugs show when copies are late, others when one warpgroup is far ahead.
        copy_rate, persistence = self.rng.random(2)
        last: list[Warpgroup] = []
        while steps:
            runnable = [group for group in steps if waits[group] is None or waits[group].has_passed(group.number)]
            if not runnable and not self.loads:
                raise Deadlock(", ".join(group.where for group in steps))
            if self.loads and (not runnable or self.rng.random() < copy_rate):
                self.loads.pop(self.rng.integers(len(self.loads))).finish()
                continue
            again = [group for group in last if group in runnable and self.rng.random() < persistence]
            group = (again or runnable)[self.rng.integers(len(again or runnable))]
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
        if self.loads or self.shared_loads or any(group.wgmmas or group.stores for group in groups):
            raise Race("a program ends while its asynchronous operations are still running")


class Warpgroup:
    """Interprets a program's equations; yields barriers to wait for, or None where others may run first."""

    def __init__(self, cluster: Cluster, member: int, index: dict[str, int], number: int) -> None:
        self.cluster, self.member, self.index, self.number = cluster, member, index, number
        self.wgmmas: deque[Wgmma] = deque()
        self.stores: deque[Store] = deque()
        self.uncommitted: list[View] = []
        self.visits: Counter[int] = Counter()
        self.equation: Any = None

    def visit(self, equation: Any) -> tuple[int, int]:
        """A key for this visit to an equation, equal for all warpgroups."""
        self.visits[id(equation)] += 1
        return id(equation), self.visits[id(equation)]

    def evaluate(self, jaxpr: Any, arguments: Iterable[Any]) -> Generator[Barrier | None, None, list[Any]]:
        consts = []
        if isinstance(jaxpr, ClosedJaxpr):
            jaxpr, consts = jaxpr.jaxpr, jaxpr.consts
        environment = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

        def value(var: Any) -> Any:
            return var.val if isinstance(var, Literal) else environment[var]

        for equation in jaxpr.eqns:
            name, values = equation.primitive.name, list(map(value, equation.invars))
            self.equation = equation
            if rule := RULES.get(name):
                outcome = rule(self, equation, *values)
                if isinstance(outcome, Generator):
                    outcome = yield from outcome
            elif inner := next((equation.params[key] for key in INNER if key in equation.params), None):
                outcome = yield from self.evaluate(inner, values)
            elif name in NO_OPS:
                outcome = []
            elif (result := evaluate_elementwise(equation, values)) is not None:
                outcome = [result]
            else:
                outcome = equation.primitive.bind(*values, **equation.params)
                outcome = outcome if equation.primitive.multiple_results else [outcome]
            environment.update(zip(equation.outvars, outcome or [], strict=True))
        return list(map(value, jaxpr.outvars))

    @property
    def where(self) -> str:
        frames = self.equation.source_info.traceback.frames
        frame = next(frame for frame in frames if "site-packages" not in frame.file_name)
        return f"warpgroup {self.number} at {frame.file_name}:{frame.line_num}, {self.equation.primitive.name}"

    def finish(self, pending: deque, remaining: int) -> None:
        """Finish the oldest operations until `remaining` are pending."""
        while len(pending) > remaining:
            pending.popleft().finish()

    def assert_finished(self, memory: Memory) -> None:
        if any(wgmma.acc.memory is memory for wgmma in self.wgmmas):
            raise Race("an accumulator is read before its wgmma has finished")


def _views(equation: Any, leaves: Iterable[Any], *memories: tuple[Any, Any]) -> Iterable[Any]:
    """Views of memories through their transforms, whose leaves are concatenated; arrays are unchanged."""
    leaves = iter(leaves)
    for memory, tree in memories:
        count = 0 if tree is None else tree.num_leaves
        own_leaves = list(itertools.islice(leaves, count))
        transforms = () if tree is None else jax.tree.unflatten(tree, own_leaves)
        yield memory.at(transforms) if isinstance(memory, Memory) else memory
    assert not list(leaves), f"{equation.primitive.name} with a predicate is unsupported"


def _axis_index(self: Warpgroup, equation: Any) -> Any:
    return [np.int32(self.index[equation.params["axis_name"]])]


def _cond(self: Warpgroup, equation: Any, which: Any, *values: Any) -> Any:
    return (yield from self.evaluate(equation.params["branches"][int(which)], values))


def _while(self: Warpgroup, equation: Any, *values: Any) -> Any:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, body_consts, carry = values[:first], values[first:second], list(values[second:])
    while (yield from self.evaluate(params["cond_jaxpr"], [*cond_consts, *carry]))[0]:
        carry = yield from self.evaluate(params["body_jaxpr"], [*body_consts, *carry])
    return carry


def _scan(self: Warpgroup, equation: Any, *values: Any) -> Any:
    params, inner = equation.params, getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
    # Carried values have the same shape inside and outside; scanned inputs and outputs have one more axis outside.
    carried = _count_same_shapes(equation.outvars, inner.outvars)
    end = _count_same_shapes(equation.invars, inner.invars)
    consts, carry, scanned = values[: end - carried], list(values[end - carried : end]), values[end:]
    steps, outs = range(params["length"]), []
    for i in reversed(steps) if params["reverse"] else steps:
        out = yield from self.evaluate(params["jaxpr"], [*consts, *carry, *(x[i] for x in scanned)])
        carry = out[:carried]
        outs.append(out[carried:])
    outs = outs[::-1] if params["reverse"] else outs
    return [*carry, *(np.stack(out) for out in zip(*outs, strict=True))]


def _count_same_shapes(outer: Iterable[Any], inner: Iterable[Any]) -> int:
    return sum(a.aval.shape == b.aval.shape for a, b in zip(outer, inner, strict=True))


def _run_scoped(self: Warpgroup, equation: Any, *values: Any) -> Any:
    params = equation.params

    def allocate(member: int) -> list[Memory]:
        pairs = zip(params["jaxpr"].invars, params["ref_transforms"], strict=True)
        return [_allocate(var.aval, layouts, partial(self.cluster.peers, member)) for var, layouts in pairs]

    if params["collective_axes"]:
        scope = self.cluster.scope(self.visit(equation), allocate)[self.member]
    else:
        scope = allocate(self.member)
    outcome = yield from self.evaluate(ClosedJaxpr(params["jaxpr"], values), scope)
    for memory in scope:
        self.assert_finished(memory)
    return outcome


def _allocate(aval: Any, layouts: Iterable[Any], peers: Callable[[Any], list[int]]) -> Memory:
    """Allocate memory or barriers of a scope."""
    inner = aval.inner_aval
    if not jax.dtypes.issubdtype(inner.dtype, jax.dtypes.extended):
        for layout in layouts:
            inner = layout.transform_type(inner)
        return Memory.empty(inner.shape, inner.dtype, str(aval.memory_space))
    barriers = Memory(np.empty(inner.shape, object), "barriers")
    for axes in getattr(inner.dtype, "collective_axes", ()):
        barriers.multicast_members |= set(peers(axes))
    for i in range(barriers.values.size):
        barriers.values.flat[i] = Barrier(inner.dtype.num_arrivals * max(1, len(barriers.multicast_members)))
    return barriers


def _run_state(self: Warpgroup, equation: Any, *values: Any) -> Any:
    params = equation.params
    assert all(params["is_initialized"])
    refs = [
        value if isinstance(value, Memory) else Memory(np.array(value), str(var.aval.memory_space))
        for value, var in zip(values, params["jaxpr"].invars, strict=True)
    ]
    yield from self.evaluate(params["jaxpr"], refs)
    if any(ref.space == "regs" for ref in refs):
        self.finish(self.wgmmas, 0)
    return [value if isinstance(value, Memory) else ref.values for value, ref in zip(values, refs, strict=True)]


def _new_ref(self: Warpgroup, equation: Any, value: Any) -> Any:
    return [Memory(np.array(value), "gmem")]


def _launch(self: Warpgroup, equation: Any, *values: Any) -> Any:
    (jaxpr,), (mesh,) = equation.params["jaxprs"], equation.params["meshes"]
    assert not equation.params["input_output_aliases"]
    memories = [value if isinstance(value, Memory) else Memory(np.array(value), "gmem") for value in values]
    outs = [Memory.empty(var.aval.shape, var.aval.dtype, "gmem") for var in equation.outvars]
    for index in np.ndindex(*mesh.grid):
        grid_index = dict(zip(mesh.grid_names, index, strict=True))
        cluster_indices = [dict(zip(mesh.cluster_names, member, strict=True)) for member in np.ndindex(*mesh.cluster)]
        cluster = Cluster([grid_index | member for member in cluster_indices], self.cluster.rng)
        cluster.run(jaxpr, [*memories, *outs], int(mesh.num_threads or 1), mesh.thread_name)
    return [out.values for out in outs]


def _get(self: Warpgroup, equation: Any, memory: Memory, *leaves: Any) -> Any:
    (view,) = _views(equation, leaves, (memory, equation.params["tree"]))
    self.assert_finished(memory)
    return [view.values.copy()]


def _swap(self: Warpgroup, equation: Any, memory: Memory, value: Any, *leaves: Any) -> Any:
    (view,) = _views(equation, leaves, (memory, equation.params["tree"]))
    self.assert_finished(memory)
    previous = view.values.copy()
    view.values[...] = value
    if memory.writers is not None:
        view.writers[...] = self.number + 1
        self.uncommitted.append(view)
    return [previous]


def _commit_smem(self: Warpgroup, equation: Any) -> None:
    for view in self.uncommitted:
        view.writers[view.writers == self.number + 1] = 0
    self.uncommitted.clear()


def _arrive(self: Warpgroup, equation: Any, barriers: Memory, *leaves: Any) -> Any:
    for copy in [barriers.copies[member] for member in barriers.multicast_members] or [barriers]:
        (view,) = _views(equation, leaves, (copy, equation.params["transforms_treedef"]))
        view.values.item().arrive()
    yield None


def _wait(self: Warpgroup, equation: Any, barriers: Memory, *leaves: Any) -> Any:
    (view,) = _views(equation, leaves, (barriers, equation.params["transforms_treedef"]))
    yield view.values.item()


def _load(self: Warpgroup, equation: Any, source: Memory, target: Memory, barriers: Memory, *leaves: Any) -> None:
    params = equation.params
    trees = (params[f"{name}_transforms_treedef"] for name in ("src", "dst", "barrier"))
    source_view, target_view, barrier = _views(equation, leaves, *zip((source, target, barriers), trees, strict=True))
    load = Load(source_view, target_view, barrier.values.item())
    if not params["collective_axes"]:
        target_view.invalidate()
        self.cluster.loads.append(load)
        return
    # Multicast: each member loads a part that all receive.
    members = self.cluster.peers(self.member, params["collective_axes"])
    for member in members:
        View(target.copies[member], target_view.transforms).invalidate()
    key = (self.visit(equation), *members)
    issued = self.cluster.shared_loads.setdefault(key, [])
    issued.append(load)
    if len(issued) == len(members):
        self.cluster.loads.extend(self.cluster.shared_loads.pop(key))


def _store(self: Warpgroup, equation: Any, source: Memory, target: Memory, *leaves: Any) -> None:
    params = equation.params
    assert params["commit_group"]
    trees = (params[f"{name}_transforms_treedef"] for name in ("src", "dst"))
    source_view, target_view = _views(equation, leaves, *zip((source, target), trees, strict=True))
    self.stores.append(Store(source_view, target_view, params["reduction_op"]))


def _wgmma(self: Warpgroup, equation: Any, acc: Memory, left: Any, right: Any, *leaves: Any) -> None:
    trees = (equation.params[f"{name}_transforms_tree"] for name in ("acc", "a", "b"))
    self.wgmmas.append(Wgmma(*_views(equation, leaves, *zip((acc, left, right), trees, strict=True))))


def _deref(self: Warpgroup, equation: Any, acc: Memory) -> Any:
    self.finish(self.wgmmas, equation.params["wait_n"] or 0)
    self.assert_finished(acc)
    return [acc.values.copy()]


def _wgmma_wait(self: Warpgroup, equation: Any, *n: Any) -> None:
    self.finish(self.wgmmas, int(equation.params.get("n", *n)))


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
