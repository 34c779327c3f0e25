"""Families against transformers, on a random configuration from the variations in their tests/parity/zoo file.

Golden models cover every family; here a few are sampled, or all with MAXHYDRA_FULL=1.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from scripts import parity_table
from tests.support.golden_models import Golden, family_cases
from tests.support.sampled_cases import sample_cases
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

from tests.parity.zoo import make  # noqa: E402

pytestmark = pytest.mark.parity

# Selects the sampled families and the values of their settings.
SEED = int(os.environ.get("MAXHYDRA_PARITY_SEED", "1"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", sample_cases(make.families(), 3, seed=SEED))
def test_a_sampled_configuration_equals_transformers(family: str, tmp_path: Path) -> None:
    """Two rows of 300 tokens, the second left-padded, so that the mask matters."""
    settings = make.settings_of(family, seed=SEED)
    make.make(tmp_path, settings)
    golden = Golden(tmp_path)
    distance, logits = golden.distance()
    # Logits of transformers in float32 are up to 2e-4 from its own in float64 (Gemma 4 with per-layer embeddings).
    assert distance.logits < 5e-4 and distance.kl < 1e-8 and distance.gradients < 3e-3, (distance, settings)
    assert np.abs(logits).max() > 0.1


@pytest.mark.slow
def test_attention_and_mlp_biases_of_llama(tmp_path: Path) -> None:
    """Both are off in all published sizes of Llama, but on in models that were made from them."""
    biases = {"attention_bias": True, "mlp_bias": True}
    make.make(tmp_path / "in", {**make.settings_of("llama", seed=SEED), **biases})
    golden = Golden(tmp_path / "in")
    distance, logits = golden.distance(has_gradients=False)
    assert distance.logits < 2e-4 and np.abs(logits).max() > 0.1, distance
    (tmp_path / "out").mkdir()
    assert golden.write(tmp_path / "out").model_type == "llama"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, attn_implementation="eager"
    )
    exported = make.run(model.eval(), np.asarray(golden.ids), np.asarray(golden.mask))[1]
    np.testing.assert_allclose(exported, golden.expected_logits, atol=1e-4)
    assert model.model.layers[0].mlp.gate_proj.bias.abs().max() > 0


@pytest.mark.slow
@pytest.mark.default_cases("gpt2", "gpt_oss")
@pytest.mark.parametrize("family", family_cases(make.families()))
def test_transformers_loads_exported_models(family: str, tmp_path: Path) -> None:
    golden = Golden(make.GOLDEN / family)
    golden.write(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model, info = make.auto_class(config).from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    logits = make.run(model.eval(), np.asarray(golden.ids), np.asarray(golden.mask))[1]
    # The stored logits may come from another processor, whose matmuls round differently.
    np.testing.assert_allclose(logits, golden.expected_logits, atol=1e-4)


def test_the_documentation_has_a_row_for_every_family() -> None:
    """scripts/parity_table.py writes the table."""
    table = parity_table.read_table()
    assert list(table) == make.families()
    for family, row in table.items():
        logits, kl, gradients = map(float, row.split("|")[2:5])
        assert logits < 2e-4 and kl < 1e-8 and gradients < 1e-3, family
