"""Sizes that kernels can divide."""

import math


def power_of_two_in(size: int) -> int:
    """The largest power of two that divides the size."""
    return math.gcd(size, 1 << 30)
