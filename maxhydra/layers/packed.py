"""What weights that are kept in fewer bits than they are used in have in common."""

from flax import nnx


class Quantized(nnx.Variable):
    """An array that is used as it is kept: never cast, never trained."""
