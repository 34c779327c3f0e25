"""Every family against the stored outputs of transformers on a tiny model (tests/parity/golden, see zoo/make.py)."""

from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from maxhydra.config.schema.decode import Engine
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.convert.compatibility import is_same
from maxhydra.convert.hf_config import build_model
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine as DecodeEngine
from maxhydra.decode.request import Request
from maxhydra.sharding import Sharder, build_mesh
from tests.support.golden_models import Golden, family_cases

PARITY = Path(__file__).parent
FAMILIES = sorted(folder.name for folder in (PARITY / "golden").iterdir() if folder.is_dir())
# The families whose layers differ most; gradients and decoding of the others, whose layers are combinations of these,
# would compile for minutes. `scripts/parity_table.py` compares the gradients of all families.
DIFFERENTIATED = [
    "deepseek3.2",
    "deepseek4",
    "gemma2",
    "gemma4_e",
    "gpt2",
    "gpt_oss",
    "lfm2",
    "llama4_text",
    "mistral4",
]
DIFFERENTIATED += ["glm_moe_dsa_shared", "nemotron_h", "nemotron_h_moe", "qwen3_next"]


def test_every_family_of_the_zoo_has_a_golden_model() -> None:
    assert sorted(path.name.removesuffix(".json") for path in (PARITY / "zoo").glob("*.json")) == FAMILIES


@pytest.mark.slow
@pytest.mark.default_cases("deepseek3.2", "deepseek4", "gemma4_e", "gpt2", "gpt_oss", "lfm2", "llama", "nemotron_h")
@pytest.mark.parametrize("family", family_cases(FAMILIES))
def test_a_family_equals_its_reference(family: str, tmp_path: Path) -> None:
    """Loss, logits, and a round trip to the same files."""
    golden = Golden(PARITY / "golden" / family)
    distance, _ = golden.distance(has_gradients=False)
    assert distance.logits < 2e-4 and distance.kl < 1e-8, distance
    check_round_trip(golden, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", DIFFERENTIATED)
def test_gradients_equal_the_reference_and_decoding_the_forward_pass(family: str) -> None:
    golden = Golden(PARITY / "golden" / family)
    distance, logits = golden.distance()
    assert distance.gradients < 1e-3, distance
    real = np.asarray(golden.mask) == 1
    np.testing.assert_allclose(golden.decoded()[real], logits[real], atol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["glm_moe_dsa_shared", "nemotron_h_moe"])
def test_tokens_of_the_engine_are_the_likeliest_of_the_forward_pass(family: str) -> None:
    """With a paged cache and chunked prefill; the prompt is longer than the selection of an indexer."""
    golden, count = Golden(PARITY / "golden" / family), 6
    prompt = tuple(np.asarray(golden.ids[0])[np.asarray(golden.mask[0]) == 1][:40].tolist())
    sizes = Engine(max_batch=2, cache_tokens=256, page_size=8, prefill_chunk=12, deterministic=True)
    sharder = Sharder(build_mesh(Mesh(), jax.devices()[:1]), RULES)
    params = jax.device_put(golden.params, sharder.tree(golden.model.axes))
    engine = DecodeEngine(golden.model, params, ByteTokenizer(), sizes, sharder=sharder, eos=())
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    request = Request(prompt=prompt, max_tokens=count, stop=(), ignore_eos=True, **sampling)
    completion = engine.submit(request).result()
    engine.close()
    logits = golden.forward(np.array([[*prompt, *completion.tokens]], np.int32))[0]
    assert completion.tokens == tuple(np.argmax(logits, axis=-1)[len(prompt) - 1 : -1].tolist())


def check_round_trip(golden: Golden, folder: Path) -> None:
    """The exported tensors equal those of transformers bit for bit, and the settings give the same model."""
    source = golden.source
    table = golden.write(folder)
    with safe_open(folder / "model.safetensors", framework="numpy") as exported:
        names = set(exported.keys())
        assert names == {name for name in source.shapes if name in names or "inv_freq" not in name}
        for name in names:
            np.testing.assert_array_equal(exported.get_tensor(name), source.read(name), err_msg=name)
    settings = table.to_settings(source.model)
    assert settings is not None
    assert is_same(build_model("", "round trip", table.to_model(settings)), source.model)
