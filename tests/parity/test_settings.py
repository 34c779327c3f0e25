"""Settings of Hugging Face configs, changed one at a time: each is rejected, or the logits are those of transformers.

Families, settings and values are sampled; with MAXHYDRA_FULL=1 all families are tested, with all settings and values.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra.config import ConfigError
from tests.support.media_models import forward_logits, load_float32
from tests.support.sampled_cases import sample_cases
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

from tests.parity.zoo import make  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.exhaustive]

SEED = int(os.environ.get("MAXHYDRA_PARITY_SEED", "1"))
IS_FULL = os.environ.get("MAXHYDRA_FULL") == "1"
# Changes per family.
SAMPLES = 12
ROWS, LENGTH = 2, 80

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "silu", "relu2", "quick_gelu", "sigmoid", "gelu_new")
ORIGINAL = {"original_max_position_embeddings": 32}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, "truncate": False, **ORIGINAL},
]
# Settings without an effect on logits, or without which there is no model.
OTHER = {"architectures", "dtype", "id2label", "initializer_range", "label2id", "model_type", "num_hidden_layers"}
OTHER |= {"output_router_logits", "problem_type", "router_aux_loss_coef", "use_cache", "vocab_size"}
OTHER |= {"chunk_size_feed_forward", "is_encoder_decoder", "return_dict", "tie_encoder_decoder", "transformers_version"}
# transformers gives MLA layers, whose heads have three sizes, a `head_dim` as well.
OTHER |= {"head_dim"}


def changes_of(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Other values of each setting of the transformers config."""
    whole = transformers.AutoConfig.for_model(**settings).to_dict()
    for name, value in whole.items():
        if name in OTHER or name.startswith(("_", "output_")) or name.endswith(("dropout", "pdrop", "_token_id")):
            continue
        for other in others(name, value):
            yield {name: other}


def others(name: str, value: Any) -> list[Any]:
    if name.endswith(("hidden_act", "activation", "activation_function")):
        return [other for other in ACTIVATIONS if other != value]
    if name == "rope_parameters" and value:
        by_layer_type = {key: part for key, part in value.items() if isinstance(part, dict)}
        if by_layer_type:
            return [value | {key: other} for key, part in by_layer_type.items() for other in rotations(part)]
        return list(rotations(value))
    match value:
        case bool():
            return [not value]
        case None:
            return [True, 2, 0.5]
        case int():
            return [other for other in (2 * value, value // 2, value + 1, 0) if other != value]
        case float():
            return [1.7 * value, 0.0]
        case list():
            return [value[::-1], value[1:] + value[:1]]
    return []


def rotations(parameters: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kept = {name: parameters[name] for name in ("rope_theta", "partial_rotary_factor") if name in parameters}
    yield from (kept | scaling for scaling in SCALINGS)
    yield parameters | {"rope_theta": 7 * parameters.get("rope_theta", 1e4)}
    yield parameters | {"partial_rotary_factor": 0.5}


def reference(settings: dict[str, Any], folder: Path, ids: np.ndarray) -> np.ndarray | None:
    """Logits of the model of transformers, which is saved; None if there is no such model."""
    try:
        model = make.random_model(settings)
        with torch.no_grad():
            logits = make.run(model, ids, np.ones_like(ids))[1]
        make.save(model.bfloat16(), None, folder)
    # transformers rejects sizes with errors of all kinds, or fails with them.
    except Exception:
        return None
    return logits if np.isfinite(logits).all() else None


@pytest.mark.parametrize("family", sample_cases(make.families(), 3, seed=SEED))
def test_a_changed_setting_is_rejected_or_has_the_effect_that_it_has_in_transformers(
    family: str, tmp_path: Path
) -> None:
    settings = make.settings_of(family)
    settings.pop("padding", None)
    ids = np.random.default_rng(0).integers(0, settings["vocab_size"], (ROWS, LENGTH))
    changes = list(changes_of(settings))
    if not IS_FULL:
        changes = random.Random(f"{family} {SEED}").sample(changes, SAMPLES)
    errors, equal = {}, 0
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        expected = reference(settings | change, folder, ids)
        if expected is None:
            continue
        try:
            found = forward_logits(*load_float32(folder), ids, {})
        except ConfigError:
            continue
        error = float(np.abs(found - expected).max())
        equal += error < 5e-3
        if error >= 5e-3:
            errors[str(change)] = error
    assert equal and not errors, errors
