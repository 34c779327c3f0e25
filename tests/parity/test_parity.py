"""Families against transformers, on a random configuration from the variations in their tests/parity/zoo file.

Golden models cover every family; here a few are sampled, or all with MAXHYDRA_FULL=1.
MAXHYDRA_WRITE_DOCS=1 (with -n 0) also writes the errors of the golden models into the table of docs/models.md.
"""

import os
import re
from pathlib import Path

import numpy as np
import pytest

from maxhydra.record.atomic_io import replace_file
from tests.support import skips
from tests.support.golden_models import Distance, Golden
from tests.support.sampled_cases import sample_cases
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

from tests.parity.zoo import make  # noqa: E402

pytestmark = pytest.mark.parity

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"
# Selects the sampled families and the values of their settings.
SEED = int(os.environ.get("MAXHYDRA_PARITY_SEED", "1"))
TABLE_HEADER = "| family | max logit error | max KL | max relative gradient error |\n|---|---|---|---|\n"


@pytest.mark.slow
@pytest.mark.parametrize("family", sample_cases(make.families(), 6, seed=SEED))
def test_a_sampled_configuration_equals_transformers(family: str, tmp_path: Path) -> None:
    """Two rows of 300 tokens, the second left-padded, so that the mask matters."""
    settings = make.settings_of(family, seed=SEED)
    make.make(tmp_path, settings)
    golden = Golden(tmp_path)
    distance, logits = golden.distance()
    assert distance.logits < 2e-4 and distance.kl < 1e-8 and distance.gradients < 1e-3, (distance, settings)
    assert np.abs(logits).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("family", make.families())
def test_transformers_loads_exported_models(family: str, tmp_path: Path) -> None:
    golden = Golden(make.GOLDEN / family)
    golden.write(tmp_path)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    logits = make.run(model.eval(), np.asarray(golden.ids), np.asarray(golden.mask))[1]
    np.testing.assert_allclose(logits, golden.expected_logits, atol=2e-5)


def read_table() -> dict[str, str]:
    """Family -> its row in docs/models.md."""
    table = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    return {line.split("|")[1].strip(): line for line in table.strip().splitlines()[2:]}


@pytest.mark.skipif("MAXHYDRA_WRITE_DOCS" not in os.environ, reason=skips.WRITE_DOCS)
@pytest.mark.parametrize("family", make.families())
def test_the_table_is_written(family: str) -> None:
    """One row per test, so that one family can be measured alone. Needs -n 0: all tests write the same file."""
    rows = {**read_table(), family: _row(family, Golden(make.GOLDEN / family).distance()[0])}
    ordered = [rows[name] for name in make.families() if name in rows]
    text = DOCS.read_text(encoding="utf-8")
    body = f"{BEGIN}\n{TABLE_HEADER}" + "\n".join(ordered) + f"\n{END}"
    replace_file(DOCS, re.sub(f"{BEGIN}.*{END}", body, text, flags=re.DOTALL))


def test_the_documentation_has_a_row_for_every_family() -> None:
    assert list(read_table()) == make.families()


def _row(family: str, distance: Distance) -> str:
    return f"| {family} | {distance.logits:.1e} | {distance.kl:.1e} | {distance.gradients:.1e} |"
