"""Budget of a template's render: what values, filters and tests cost. See `template_sandbox`."""

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sized
from contextvars import ContextVar
from string import Formatter
from types import NoneType
from typing import Any

from jinja2 import TemplateRuntimeError, pass_context
from jinja2.runtime import Context, Undefined

# Cost units of a render: about one for 0.5 us, and one for 8 characters.
MIN_BUDGET, BUDGET_PER_CHARACTER, BUDGET_PER_MESSAGE = 400_000, 8, 2_000
MACRO_COST, LOOP_COST, CALL_COST, FILTER_COST = 12, 4, 4, 3
CHARACTERS_PER_UNIT = 8
# Widths of center, indent, batch and others; bits of an integer; nesting of a value that is printed or compared.
MAX_WIDTH, MAX_BITS, MAX_DEPTH = 10_000, 2**16, 200

# Filters that handle the items of a value without looking into them, and filters that do not even visit the items.
_SHALLOW_FILTERS = frozenset(("batch", "items", "list", "reverse", "slice"))
_LAZY_FILTERS = frozenset(("map", "reject", "rejectattr", "select", "selectattr"))
_CONSTANT_FILTERS = frozenset(("attr", "count", "d", "default", "first", "last", "length"))
_SORTING_FILTERS = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))
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


def charge(units: int) -> None:
    """Charge the current render."""
    budget = _budget.get()
    # Without a budget the compiler evaluates a constant, whose size is bounded by that of the source.
    if budget is not None:
        budget.charge(units)


def charge_value(value: Any) -> Any:
    """Charge for reading a value with everything in it, as printing and comparing do; return it."""
    budget = _budget.get()
    if budget is None:
        return value
    if type(value) is str:
        budget.charge(1 + len(value) // CHARACTERS_PER_UNIT)
    elif type(value) in _SCALARS:
        budget.charge(1)
    else:
        charge_deep(value)
    return value


def charge_deep(value: Any) -> None:
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
                charge(len(below))
        charge(units)
        if not below:
            return
        level = below
    raise TemplateLimitError(f"a value is nested more than {MAX_DEPTH} deep")


def check_width(value: Any) -> None:
    """Check an argument that may be a width."""
    if isinstance(value, int) and abs(value) > MAX_WIDTH:
        raise TemplateLimitError(f"the width {value} exceeds {MAX_WIDTH}")


def length(value: Any) -> int:
    """Number of items of a value; 0 if it has no length."""
    return len(value) if isinstance(value, Sized) and not isinstance(value, Undefined) else 0


def items(value: Any) -> Any:
    """Turn an iterator, whose items are not known yet, into a list."""
    return list(value) if isinstance(value, Iterator) else value


def check_format(text: str) -> None:
    """Check a text for the operator %."""
    if _WIDE_FORMAT.search(text):
        raise TemplateLimitError("a format has a number of more than 4 digits, or a width that an argument sets")


def check_braces(text: str) -> None:
    """Check a text for str.format."""
    for _, _, spec, _ in Formatter().parse(text):
        if spec and ("{" in spec or _WIDE_FORMAT.search(spec)):
            raise TemplateLimitError("a format has a width of more than 4 digits, or one that an argument sets")


def charge_replace(text: Any, old: Any, new: Any) -> None:
    """Charge for the text that a replacement adds."""
    charge(str(text).count(str(old)) * len(str(new)) // CHARACTERS_PER_UNIT)


def _passed(function: Callable[..., Any], context: Context) -> tuple[Any, ...]:
    """First arguments that Jinja passes to a filter or test in addition to those of the template."""
    passed = getattr(function, "jinja_pass_arg", None)
    if passed is None:
        return ()
    values = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
    return (values[passed.name],)


def limit_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that it is charged; with the context, so that the compiler does not evaluate it."""

    @pass_context
    def limited_filter(context: Context, value: Any, *args: Any, **options: Any) -> Any:
        arguments = (*args, *options.values())
        for argument in arguments:
            check_width(argument)
        charge(FILTER_COST)
        if name in _SHALLOW_FILTERS:
            charge(length(value))
        elif name in _LAZY_FILTERS:
            charge(FILTER_COST * length(value))
        elif name not in _CONSTANT_FILTERS:
            value = items(value)
            for each in (value, *arguments):
                charge_value(each)
            _charge_growth(name, value, arguments)
        result = function(*_passed(function, context), value, *args, **options)
        return charge_value(result) if isinstance(result, str) else result

    return limited_filter


def _charge_growth(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    """Charge filters whose result can be larger than everything they read."""
    if name in _SORTING_FILTERS:
        charge(16 * length(value))
    elif name == "join" and arguments:
        charge(length(value) * len(str(arguments[0])) // CHARACTERS_PER_UNIT)
    elif name == "replace" and len(arguments) >= 2:
        charge_replace(value, arguments[0], arguments[1])
    elif name == "indent":
        width = max([4, *(each if isinstance(each, int) else length(each) for each in arguments)])
        charge(str(value).count("\n") * width // CHARACTERS_PER_UNIT)
    elif name == "tojson":
        width = sum(each if isinstance(each, int) else length(each) for each in arguments)
        if width > 2 * CHARACTERS_PER_UNIT:
            raise TemplateLimitError("tojson has an indent or separators of more than 16 characters")
        # Each line is indented by the depth of its value.
        _charge_indented(value)
    elif name == "sum" and any(not isinstance(each, (str, int, float, NoneType)) for each in arguments):
        raise TemplateLimitError("sum only adds numbers")
    elif name == "format":
        check_format(str(value))


def _charge_indented(value: Any, depth: int = 1) -> None:
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for part in parts:
        charge(2 * depth)
        _charge_indented(part, depth + 1)


def limit_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a test so that it is charged."""

    @pass_context
    def limited_test(context: Context, value: Any, *args: Any) -> Any:
        charge(FILTER_COST)
        # Comparisons, and tests of the value's text.
        if args or name in ("lower", "upper"):
            for each in (value, *args):
                charge_value(each)
        return function(*_passed(function, context), value, *args)

    return limited_test
