"""Register arithmetic in NumPy; evaluating each equation with JAX would compile a program for it first."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

PLAIN: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "div": lambda a, b: (a - np.fmod(a, b)) // b if np.issubdtype(np.asarray(a).dtype, np.integer) else a / b,
    "eq": np.equal,
    "exp": np.exp,
    "exp2": np.exp2,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "log": np.log,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "rem": np.fmod,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, *cases: np.choose(np.broadcast_to(which, np.shape(cases[0])), cases),
    "sub": np.subtract,
    "tanh": np.tanh,
}


def _broadcast_in_dim(value: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    """Axis i of the value becomes axes[i]."""
    sizes = dict(zip(axes, np.shape(value), strict=True))
    return np.broadcast_to(np.reshape(value, [sizes.get(axis, 1) for axis in range(len(shape))]), shape)


WITH_PARAMS: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": lambda params, x: _broadcast_in_dim(x, params["shape"], params["broadcast_dimensions"]),
    "convert_element_type": lambda params, x: np.asarray(x),
    "iota": lambda params: np.indices(params["shape"])[params["dimension"]],
    "reduce_max": lambda params, x: np.max(x, axis=params["axes"]),
    "reduce_sum": lambda params, x: np.sum(x, axis=params["axes"]),
}


def evaluate_elementwise(equation: Any, values: list[Any]) -> np.ndarray | None:
    """The result of the equation; None if it is not in the tables."""
    name = equation.primitive.name
    if name in PLAIN:
        function = PLAIN[name]
    elif name in WITH_PARAMS:
        function = partial(WITH_PARAMS[name], equation.params)
    else:
        return None
    # NaN is detected in the results.
    with np.errstate(all="ignore"):
        return np.asarray(function(*values)).astype(equation.outvars[0].aval.dtype)
