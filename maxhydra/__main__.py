"""`python -m maxhydra`, the same as the command `maxhydra`."""

import sys

from maxhydra.cli.main import run


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
