"""The turn of a process on the GPU: bench/one_gpu.sh starts a row, which imports, before the previous one ends."""

import os
import time
from pathlib import Path

VARIABLE = "GPU_TURN"
POLL_SECONDS = 0.02


def wait_for_turn() -> None:
    """Return as soon as the file that GPU_TURN names exists; at once without the variable."""
    file = os.environ.get(VARIABLE)
    while file and not Path(file).exists():
        time.sleep(POLL_SECONDS)
