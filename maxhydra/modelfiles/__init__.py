"""Model files: locating them, and reading GGUF. Does not import jax."""

from maxhydra.modelfiles.gguf import GgufFile, open_gguf
from maxhydra.modelfiles.locate import locate

__all__ = ["GgufFile", "locate", "open_gguf"]
