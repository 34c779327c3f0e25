"""`python -m maxhydra`, the same as the command `maxhydra`."""

import codecs
import gc
import sys
from io import TextIOWrapper

from maxhydra.cli.main import run

# Allocations after which garbage is collected. With Python's 700, that takes a tenth of the time in which a config is
# composed, and finds nothing.
GC_THRESHOLD = 50_000


def main() -> None:
    gc.set_threshold(GC_THRESHOLD)
    # Generated text has characters that the locale may not be able to encode.
    if isinstance(sys.stdout, TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
