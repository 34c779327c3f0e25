"""Jinja sandbox with a budget: a template from a model folder cannot run for ever or fill the memory.

Jinja's own sandbox protects objects, not time or memory: `{% for %}` loops nest, macros recurse, `'a' * 10**10`
allocates, and thirty assignments of `[x, x]` make a list whose text has 2**30 items. Here a render has a budget of cost
units, and every operation whose cost is not bounded by the size of the source is charged before it runs: loop
iterations, calls, filters, tests, operators, text that is joined. Costs are counted, not timed, so that a record is
accepted or rejected alike on every machine. What cannot be charged is not available: bytes, numeric methods, a few
filters.
"""

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from string import Formatter
from types import BuiltinMethodType, MethodType, NoneType
from typing import Any

from jinja2 import TemplateRuntimeError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame, MacroRef, operators
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

# Longest source; the largest published chat templates have 30,000 characters.
MAX_SOURCE = 2**17
# Cost units of a render: about one for 0.5 us, and one for 8 characters.
MIN_BUDGET, BUDGET_PER_CHARACTER, BUDGET_PER_MESSAGE = 400_000, 8, 2_000
MACRO_COST, LOOP_COST, CALL_COST, FILTER_COST = 12, 4, 4, 3
CHARACTERS_PER_UNIT = 8
# Widths of center, indent, batch and others; bits of an integer; nesting of a value that is printed or compared.
MAX_WIDTH, MAX_BITS, MAX_DEPTH = 10_000, 2**16, 200

# Filters that can be very slow or whose result is random, and that no chat template needs.
_NO_FILTERS = ("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
# Filters that handle the items of a value without looking into them, and filters that do not even visit the items.
_SHALLOW_FILTERS = frozenset(("batch", "items", "list", "reverse", "slice"))
_LAZY_FILTERS = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))
_CONSTANT_FILTERS = frozenset(("attr", "count", "d", "default", "first", "last", "length"))
_SORTING_FILTERS = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
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
_SCALARS = (bool, float, NoneType)
# A width of five digits, or one that an argument sets.
_WIDE_FORMAT = re.compile(r"[0-9]{5}|%[-+ #0-9.]*\*")


class TemplateLimitError(TemplateRuntimeError):
    """A template exceeded its budget, or used something whose cost cannot be bounded."""


class _Budget:
    """Cost units that a render may still use."""

    __slots__ = ("remaining", "total")

    def __init__(self, total: int):
        self.total = self.remaining = total

    def charge(self, units: int) -> None:
        self.remaining -= units
        if self.remaining < 0:
            reason = f"it runs for more than {self.total:,} steps, or makes more text than such a conversation can need"
            raise TemplateLimitError(reason)


_budget: ContextVar[_Budget | None] = ContextVar("template budget", default=None)


@contextlib.contextmanager
def limited(messages: Collection[Mapping[str, Any]]) -> Iterator[None]:
    """Give renders in this context a budget in proportion to the conversation."""
    characters = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
    total = MIN_BUDGET + BUDGET_PER_MESSAGE * len(messages) + BUDGET_PER_CHARACTER * characters
    token = _budget.set(_Budget(total))
    try:
        yield
    finally:
        _budget.reset(token)


def _charge(units: int) -> None:
    budget = _budget.get()
    # Without a budget the compiler evaluates a constant, whose size is bounded by that of the source.
    if budget is not None:
        budget.charge(units)


def _charge_value(value: Any) -> Any:
    """Charge for reading a value with everything in it, as printing and comparing do; return it."""
    budget = _budget.get()
    if budget is None:
        return value
    if type(value) is str:
        budget.charge(1 + len(value) // CHARACTERS_PER_UNIT)
    elif type(value) in _SCALARS:
        budget.charge(1)
    else:
        _charge_deep(value)
    return value


def _charge_deep(value: Any) -> None:
    """Charge for a container; an item that occurs twice is charged twice, as it is printed twice."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        units = len(level)
        for item in level:
            if isinstance(item, str):
                units += len(item) // CHARACTERS_PER_UNIT
            elif isinstance(item, int):
                units += item.bit_length() // 64
            elif isinstance(item, (list, tuple, set, frozenset)):
                below.extend(item)
            elif isinstance(item, Mapping):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, range):
                units += len(item)
            elif isinstance(item, Collection) and not isinstance(item, Undefined):
                # Views of a dict.
                below.extend(item)
            # `below` has at most as many entries as were charged for, times the longest container.
            if len(below) > MIN_BUDGET:
                _charge(len(below))
        _charge(units)
        if not below:
            return
        level = below
    raise TemplateLimitError(f"a value is nested more than {MAX_DEPTH} deep")


def _check_width(value: Any) -> None:
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TemplateLimitError(f"the width {value} exceeds {MAX_WIDTH}")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, Sized) and not isinstance(value, Undefined) else 0


def _items(value: Any) -> Any:
    """Turn an iterator, whose items are not known yet, into a list."""
    return list(value) if isinstance(value, Iterator) else value


def _check_format(text: str) -> None:
    """Check a text for the operator %."""
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("a format has a number of more than 4 digits, or a width that an argument sets")


def _check_braces(text: str) -> None:
    """Check a text for str.format."""
    for _, _, spec, _ in Formatter().parse(text):
        if spec and ("{" in spec or _WIDE_FORMAT.search(spec)):
            raise TemplateLimitError("a format has a width of more than 4 digits, or one that an argument sets")


def _charge_replace(text: Any, old: Any, new: Any) -> None:
    _charge(str(text).count(str(old)) * len(str(new)) // CHARACTERS_PER_UNIT)


def _passed(function: Callable[..., Any], context: Context) -> tuple[Any, ...]:
    """First arguments that Jinja passes to a filter or test in addition to those of the template."""
    wanted = getattr(function, "jinja_pass_arg", None)
    if wanted is None:
        return ()
    values = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
    return (values[wanted.name],)


def _limit_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it is charged; with the context, so that the compiler does not evaluate it."""

    @pass_context
    def limited_filter(context: Context, value: Any, *args: Any, **options: Any) -> Any:
        arguments = (*args, *options.values())
        for argument in arguments:
            _check_width(argument)
        _charge(FILTER_COST)
        if name in _SHALLOW_FILTERS:
            _charge(_length(value))
        elif name in _LAZY_FILTERS:
            _charge(FILTER_COST * _length(value))
        elif name not in _CONSTANT_FILTERS:
            value = _items(value)
            for each in (value, *arguments):
                _charge_value(each)
            _charge_growth(name, value, arguments)
        result = function(*_passed(function, context), value, *args, **options)
        return _charge_value(result) if isinstance(result, str) else result

    return limited_filter


def _charge_growth(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """Charge filters whose result can be larger than everything they read."""
    if name in _SORTING_FILTERS:
        _charge(16 * _length(value))
    elif name == "join" and arguments:
        _charge(_length(value) * len(str(arguments[0])) // CHARACTERS_PER_UNIT)
    elif name == "replace" and len(arguments) >= 2:
        _charge_replace(value, arguments[0], arguments[1])
    elif name == "indent":
        width = max([4, *(each if isinstance(each, int) else _length(each) for each in arguments)])
        _charge(str(value).count("\n") * width // CHARACTERS_PER_UNIT)
    elif name == "tojson":
        width = sum(each if isinstance(each, int) else _length(each) for each in arguments)
        if width > 2 * CHARACTERS_PER_UNIT:
            raise TemplateLimitError("tojson has an indent or separators of more than 16 characters")
        # Each line is indented by the depth of its value.
        _charge_indented(value)
    elif name == "sum" and any(not isinstance(each, (str, int, float, NoneType)) for each in arguments):
        raise TemplateLimitError("sum only adds numbers")
    elif name == "format":
        _check_format(str(value))


def _charge_indented(value: Any, depth: int = 1) -> None:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for part in parts:
        _charge(2 * depth)
        _charge_indented(part, depth + 1)


def _limit_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def limited_test(context: Context, value: Any, *args: Any) -> Any:
        _charge(FILTER_COST)
        # Comparisons, and tests of the value's text.
        if args or name in ("lower", "upper"):
            for each in (value, *args):
                _charge_value(each)
        return function(*_passed(function, context), value, *args)

    return limited_test


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
    charge_value = staticmethod(_charge_value)

    def __init__(self, **options: Any):
        super().__init__(optimized=False, finalize=_charge_value, **options)
        del self.globals["lipsum"]
        self.globals["namespace"] = _OpaqueNamespace
        self.filters = {
            name: _limit_filter(name, function) for name, function in self.filters.items() if name not in _NO_FILTERS
        }
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: _limit_test(name, function) for name, function in tests.items()}
        self._functions: set[Any] = set(self.globals.values())

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = _limit_filter(name, function)

    def add_functions(self, **functions: Callable[..., Any]) -> None:
        """Make functions available to templates."""
        self.globals |= functions
        self._functions |= set(functions.values())

    def counted(self, iterable: Iterable[Any], cost: int) -> Iterator[Any]:
        """Iterate, and charge for each item."""
        for item in iterable:
            _charge(LOOP_COST + cost)
            yield item

    def step(self, cost: int) -> None:
        """Charge for one call of a macro."""
        _charge(cost)

    def charge_length(self, value: Any) -> Any:
        """Charge for a slice of a value."""
        _charge(1 + _length(value) // CHARACTERS_PER_UNIT)
        return value

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """Join text that the template wrote, and charge for it part by part."""
        if isinstance(parts, list):
            _charge(len(parts) + sum(map(len, parts)) // CHARACTERS_PER_UNIT)
            return "".join(parts)

        def charged() -> Iterator[str]:
            for part in parts:
                _charge(1 + len(part) // CHARACTERS_PER_UNIT)
                yield part

        return "".join(charged())

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            _charge_deep(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            _charge(1 + (len(left) + len(right)) // CHARACTERS_PER_UNIT)
            return left + right
        if isinstance(left, int) and isinstance(right, int):
            self._check_integers(operator, left, right)
        elif operator == "*":
            number, sequence = (left, right) if isinstance(left, int) else (right, left)
            repeats = max(number, 1) if isinstance(number, int) else 1
            units = CHARACTERS_PER_UNIT if isinstance(sequence, str) else 1
            _charge(repeats * (1 + _length(sequence)) // units)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
            _charge_value(right)
        _charge(1 + (_length(left) + _length(right)) // CHARACTERS_PER_UNIT)
        return super().call_binop(context, operator, left, right)

    def _check_integers(self, operator: str, left: int, right: int) -> None:
        bits = left.bit_length()
        size = bits * max(right, 1) if operator == "**" else bits + right.bit_length()
        if size > MAX_BITS:
            raise TemplateLimitError(f"an integer would have more than {MAX_BITS} bits")

    def call(self, context: Context, function: Any, /, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Call what a template may call: macros, loops, our functions, and some methods of texts and containers."""
        _charge(MACRO_COST if isinstance(function, (Macro, LoopContext, BlockReference)) else CALL_COST)
        if isinstance(function, LoopContext):
            args = (self.counted(args[0], MACRO_COST), *args[1:]) if args else args
        elif not isinstance(function, (Macro, BlockReference, Joiner, Undefined)):
            args = tuple(map(_items, args))
            # Names with an underscore are Jinja's own arguments.
            for value in (*args, *(value for name, value in options.items() if not name.startswith("_"))):
                _charge_value(value)
            if function not in self._functions:
                self._charge_method(getattr(function, "__wrapped__", function), args)
        result = super().call(context, function, *args, **options)
        return _charge_value(result) if isinstance(result, str) else result

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
            _charge_value(owner)
        _charge(1 + _length(owner))
        if isinstance(owner, str):
            _charge_text_method(owner, name, arguments)


def _charge_text_method(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    if name in ("center", "ljust", "rjust", "zfill"):
        for argument in arguments:
            _check_width(argument)
    elif name in ("format", "format_map"):
        _check_braces(text)
    elif name == "replace" and len(arguments) >= 2:
        _charge_replace(text, arguments[0], arguments[1])
    elif name == "join" and arguments:
        _charge(_length(arguments[0]) * len(text) // CHARACTERS_PER_UNIT)
    elif name in ("strip", "lstrip", "rstrip") and arguments:
        _charge(len(text) * _length(arguments[0]) // 64)
