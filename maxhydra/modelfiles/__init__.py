"""Files that hold a model: where they lie, and what a GGUF file says. No jax."""

from maxhydra.modelfiles.gguf import GgufFile, open_gguf
from maxhydra.modelfiles.locate import locate

__all__ = ["GgufFile", "locate", "open_gguf"]
