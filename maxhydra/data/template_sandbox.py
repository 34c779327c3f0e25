"""Jinja sandbox with a budget: a template from a model folder cannot run for ever or fill the memory.

Jinja's own sandbox protects objects, not time or memory: `{% for %}` loops nest, macros recurse, `'a' * 10**10`
allocates, and thirty assignments of `[x, x]` make a list whose text has 2**30 items. Here a render has a budget of cost
units, and every operation whose cost is not bounded by the size of the source is charged before it runs: loop
iterations, calls, filters, tests, operators, text that is joined. Costs are counted, not timed, so that a record is
accepted or rejected alike on every machine. What cannot be charged is not available: bytes, numeric methods, a few
filters.
"""

from collections.abc import Callable, Iterable, Iterator
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, MacroRef, operators
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from maxhydra.data.template_budget import (
    CALL_COST,
    CHARACTERS_PER_UNIT,
    LOOP_COST,
    MACRO_COST,
    MAX_BITS,
    TemplateLimitError,
    charge,
    charge_deep,
    charge_replace,
    charge_value,
    check_braces,
    check_format,
    check_width,
    items,
    length,
    limit_filter,
    limit_test,
)

# Longest source; the largest published chat templates have 30,000 characters.
MAX_SOURCE = 2**17
# Filters that can be very slow or whose result is random, and that no chat template needs.
_NO_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# Methods of texts, other than those that return bytes or texts of any length.
_TEXT_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - frozenset(
    ("encode", "expandtabs", "maketrans", "translate")
)
_METHODS: dict[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}


class _Generator(CodeGenerator):
    """Code generator that charges loops, macros, comparisons, slices, dict keys and joined text."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        cost = nodes.Const(_size(node))
        node.iter = nodes.Call(nodes.EnvironmentAttribute("counted"), [node.iter, cost], [], None, None)
        super().visit_For(node, frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        step = nodes.Call(nodes.EnvironmentAttribute("step"), [nodes.Const(_size(node))], [], None, None)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return super().macro_body(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, **options: Any) -> None:  # type: ignore[override]
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, **options)
            return
        # One of the two calls above; the source of a template cannot make such a node.
        self.write(f"environment.{node.node.name}(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

    def _write_charged(self, node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.charge_value(")
        self.visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        escaped = "context.eval_ctx.autoescape" if frame.eval_ctx.volatile else str(frame.eval_ctx.autoescape)
        self.write(f"(markup_join if {escaped} else str_join)((")
        for part in node.nodes:
            self._write_charged(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._write_charged(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._write_charged(node.expr, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        # Hashing a tuple reads everything in it.
        self.write("{")
        for pair in node.items:
            self._write_charged(pair.key, frame)
            self.write(": ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.charge_length(")
        self.visit(node.node, frame)
        self.write(")[")
        self.visit(node.arg, frame)
        self.write("]")


def _size(node: nodes.Node) -> int:
    """Cost of one pass over a loop or macro body: operations that are not charged themselves, such as output."""
    return 1 + sum(1 for _ in node.find_all(nodes.Node)) // 8


class _OpaqueNamespace(Namespace):
    """A namespace that prints without its attributes, which may contain the namespace itself."""

    def __repr__(self) -> str:
        return "<namespace>"


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja environment whose renders must run within `limited(...)`."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    charge_value = staticmethod(charge_value)

    def __init__(self, **options: Any):
        super().__init__(optimized=False, finalize=charge_value, **options)
        del self.globals["lipsum"]
        self.globals["namespace"] = _OpaqueNamespace
        self.filters = {
            name: limit_filter(name, function) for name, function in self.filters.items() if name not in _NO_FILTERS
        }
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: limit_test(name, function) for name, function in tests.items()}
        self._functions: set[Any] = set(self.globals.values())

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = limit_filter(name, function)

    def add_functions(self, **functions: Callable[..., Any]) -> None:
        """Make functions available to templates."""
        self.globals |= functions
        self._functions |= set(functions.values())

    def counted(self, iterable: Iterable[Any], cost: int) -> Iterator[Any]:
        """Iterate, and charge for each item."""
        for item in iterable:
            charge(LOOP_COST + cost)
            yield item

    def step(self, cost: int) -> None:
        """Charge for one call of a macro."""
        charge(cost)

    def charge_length(self, value: Any) -> Any:
        """Charge for a slice of a value."""
        charge(1 + length(value) // CHARACTERS_PER_UNIT)
        return value

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """Join text that the template wrote, and charge for it part by part."""
        if isinstance(parts, list):
            charge(len(parts) + sum(map(len, parts)) // CHARACTERS_PER_UNIT)
            return "".join(parts)

        def charged() -> Iterator[str]:
            for part in parts:
                charge(1 + len(part) // CHARACTERS_PER_UNIT)
                yield part

        return "".join(charged())

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            charge_deep(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            charge(1 + (len(left) + len(right)) // CHARACTERS_PER_UNIT)
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            self._check_integers(operator, left, right)
        elif operator == "*":
            number, sequence = (left, right) if isinstance(left, int) else (right, left)
            repeats = max(number, 1) if isinstance(number, int) else 1
            units = CHARACTERS_PER_UNIT if isinstance(sequence, str) else 1
            charge(repeats * (1 + length(sequence)) // units)
        elif operator == "%" and isinstance(left, str):
            check_format(left)
            charge_value(right)
        charge(1 + (length(left) + length(right)) // CHARACTERS_PER_UNIT)
        return super().call_binop(context, operator, left, right)

    def _check_integers(self, operator: str, left: int, right: int) -> None:
        bits = left.bit_length()
        size = bits * max(right, 1) if operator == "**" else bits + right.bit_length()
        if size > MAX_BITS:
            raise TemplateLimitError(f"an integer would have more than {MAX_BITS} bits")

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Make an allowed call: macros, loops, our functions, and some methods of texts and containers."""
        charge(MACRO_COST if isinstance(function, (Macro, LoopContext, BlockReference)) else CALL_COST)
        if isinstance(function, LoopContext):
            args = (self.counted(args[0], MACRO_COST), *args[1:]) if args else args
        elif not isinstance(function, (Macro, BlockReference, Joiner, Undefined)):
            args = tuple(map(items, args))
            # Names with an underscore are Jinja's own arguments.
            for value in (*args, *(value for name, value in options.items() if not name.startswith("_"))):
                charge_value(value)
            if function not in self._functions:
                self._charge_method(getattr(function, "__wrapped__", function), args)
        result = super().call(context, function, *args, **options)
        return charge_value(result) if isinstance(result, str) else result

    def _charge_method(self, method: Any, arguments: tuple[Any, ...]) -> None:
        """Charge a call of a method, or raise if it is not available."""
        is_method = isinstance(method, (BuiltinMethodType, MethodType))
        owner, name = (method.__self__, method.__name__) if is_method else (None, type(method).__name__)
        if isinstance(owner, (Cycler, LoopContext)):
            return
        kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
        if kind is None or name not in _METHODS[kind]:
            raise TemplateLimitError(f"{type(owner).__name__}.{name} is not available in templates")
        if name in ("count", "index"):
            charge_value(owner)
        charge(1 + length(owner))
        if isinstance(owner, str):
            _charge_text_method(owner, name, arguments)


def _charge_text_method(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    if name in ("center", "ljust", "rjust", "zfill"):
        for argument in arguments:
            check_width(argument)
    elif name in ("format", "format_map"):
        check_braces(text)
    elif name == "replace" and len(arguments) >= 2:
        charge_replace(text, arguments[0], arguments[1])
    elif name == "join" and arguments:
        charge(length(arguments[0]) * len(text) // CHARACTERS_PER_UNIT)
    elif name in ("strip", "lstrip", "rstrip") and arguments:
        charge(len(text) * length(arguments[0]) // 64)
