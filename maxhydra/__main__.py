"""`python -m maxhydra`, the same as the command `maxhydra`."""

import codecs
import sys
from io import TextIOWrapper

from maxhydra.cli.main import run


def main() -> None:
    # Generated text has characters that the locale may not be able to encode.
    if isinstance(sys.stdout, TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
