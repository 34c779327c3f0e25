"""A document: what a shape makes of a record, ready to be packed."""

import dataclasses
from collections.abc import Mapping

import numpy as np

NOTHING: Mapping[str, np.ndarray] = {}


@dataclasses.dataclass(frozen=True)
class Document:
    """Tokens that belong together. A document of n tokens fills n - 1 places of a row: each token predicts the next."""

    tokens: np.ndarray
    """int [n]."""
    weights: np.ndarray | None = None
    """float32 [n]: what predicting token i counts for; None is 1 for each."""
    columns: Mapping[str, np.ndarray] = dataclasses.field(default_factory=lambda: NOTHING)
    """More arrays, [n - 1, ...], that lie beside the first n - 1 tokens, such as a teacher's logits after each."""

    @property
    def places(self) -> int:
        return max(0, len(self.tokens) - 1)
