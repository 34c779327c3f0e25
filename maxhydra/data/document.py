"""Import `Document` from maxhydra.data.rows; this module goes when its last importers have moved."""

from maxhydra.data.rows import Document

__all__ = ["Document"]
