"""Tools that a model may call: functions with a JSON schema, built in or of the user."""

import ast
import inspect
import json
import operator
import typing
from collections.abc import Callable, Mapping
from typing import Any

from maxhydra.config.plug_ins import load_object
from maxhydra.rl.sandbox import Sandbox

# Characters of a result that the model gets to read.
MAX_RESULT = 4096
# Digits of the largest number that the calculator handles.
MAX_DIGITS = 1000
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


class Tool:
    """A function that a model may call; errors become results, which the model can react to."""

    def __init__(self, function: Callable[..., Any]):
        self.name = function.__name__
        self.schema = json_schema(function)
        self._function = function

    def __call__(self, arguments: Mapping[str, Any]) -> str:
        try:
            result = self._function(**arguments)
        except MemoryError:
            raise
        except Exception as error:  # the model may pass anything
            return f"error: {type(error).__name__}: {error}"[:MAX_RESULT]
        return (result if isinstance(result, str) else json.dumps(result, default=str))[:MAX_RESULT]


def load_tool(name: str, *, timeout: float, memory_limit_gib: float | None) -> Tool:
    """A built-in tool or `package.module:function`; `timeout` is that of a step of the environment."""
    if name == "calculator":
        return Tool(calculator)
    if name == "python":
        # A program that runs out of time is an error that the model reads; the episode continues.
        sandbox = Sandbox(timeout=0.8 * timeout, memory_limit_gib=memory_limit_gib)

        def python(code: str) -> str:
            """Runs a Python program and returns its output."""
            return sandbox.run(code)

        return Tool(python)
    return Tool(load_object(name, key="environment.tools"))


def json_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The description of a function for a chat template: first paragraph of the docstring, annotated parameters."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    if unannotated := [parameter.name for parameter in parameters if parameter.name not in hints]:
        raise TypeError(f"the tool {function.__name__} has parameters without annotation: {', '.join(unannotated)}")
    properties = {}
    for parameter in parameters:
        hint = hints[parameter.name]
        kind = JSON_TYPES.get(typing.get_origin(hint) or hint)
        if kind is None:
            accepted = ", ".join(type.__name__ for type in JSON_TYPES)
            raise TypeError(f"the tool {function.__name__} has a parameter of type {hint}; accepted: {accepted}")
        properties[parameter.name] = {"type": kind}
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    description = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    schema = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": description, "parameters": schema},
    }


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression with + - * / // % ** and brackets."""
    value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _evaluate(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=bool() | complex()):
            pass
        case ast.Constant(value=int() | float()):
            return _bounded(node.value)  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd()):
            operand = _evaluate(node.operand)
            return -operand if isinstance(node.op, ast.USub) else operand
        case ast.BinOp() if type(node.op) in OPERATORS:
            left, right = _evaluate(node.left), _evaluate(node.right)
            # The number of bits of a power of integers, before it is computed; floats overflow by themselves.
            bits = left.bit_length() if isinstance(left, int) and abs(left) > 1 and isinstance(right, int) else 0
            if isinstance(node.op, ast.Pow) and right * bits > 4 * MAX_DIGITS:
                raise OverflowError(f"the result has more than {MAX_DIGITS} digits")
            value = OPERATORS[type(node.op)](left, right)
            if isinstance(value, complex):
                raise ValueError("the result is not a real number")
            return _bounded(value)
    raise ValueError(f"{ast.unparse(node)[:100]} is not arithmetic")


def _bounded(value: int | float) -> int | float:
    if isinstance(value, int) and value.bit_length() > 4 * MAX_DIGITS:
        raise OverflowError(f"a number has more than {MAX_DIGITS} digits")
    return value


OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
