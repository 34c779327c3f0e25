"""Write the parity table of docs/models.md: python scripts/parity_table.py [FAMILY...], all families by default.

The errors are those of the golden models in tests/parity/golden; see tests/support/golden_models.py.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "models.md"
GOLDEN = ROOT / "tests" / "parity" / "golden"
BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"
HEADER = "| family | max logit error | max KL | max relative gradient error |\n|---|---|---|---|"


def families() -> list[str]:
    return sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir())


def read_table() -> dict[str, str]:
    """Family -> its row."""
    table = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return {line.split("|")[1].strip(): line for line in table.strip().splitlines()[2:]}


def measure(family: str) -> str:
    """The row of a family."""
    # jax, which the test of the table does not need.
    from tests.support.golden_models import Golden  # noqa: PLC0415

    distance = Golden(GOLDEN / family).distance()[0]
    return f"| {family} | {distance.logits:.1e} | {distance.kl:.1e} | {distance.gradients:.1e} |"


def main(chosen: list[str]) -> None:
    sys.path.insert(0, str(ROOT))
    rows = read_table()
    for family in chosen or families():
        rows[family] = measure(family)
        print(rows[family], flush=True)
    body = "\n".join([BEGIN, HEADER, *(rows[family] for family in families() if family in rows), END])
    text = DOCS.read_text(encoding="utf-8")
    DOCS.write_text(re.sub(f"{BEGIN}.*{END}", body, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
