"""What a config does on this machine: speed and memory of training, decoding and kernels, as lines of JSON."""

from maxhydra.measure.line import Line, Subject
from maxhydra.measure.memory import OutOfMemoryError

__all__ = ["Line", "OutOfMemoryError", "Subject"]
