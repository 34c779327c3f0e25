"""Read a GGUF file, the format of llama.cpp."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import THETA, build_model, to_model_values, unknown_family
from maxhydra.convert.name_table import Settings, Table, all_tables
from maxhydra.convert.source import Source
from maxhydra.layers.rope import frequencies
from maxhydra.modelfiles import GgufFile, open_gguf

# Divisors of the unscaled RoPE frequencies: how llama.cpp stores the scaling of Llama 3.1.
FREQUENCY_FACTORS = "rope_freqs.weight"
# The file has the resulting RoPE frequencies, not the scaling that gives them, and omits a sliding window.
UNSPECIFIED = ("attention.rope", "attention.window", "mlp.activation")
TOLERANCE = 1e-5


def gguf_source(key: str, location: str, path: Path) -> Source:
    """Open a GGUF file whose architecture has a table."""
    file = open_gguf(key, path)
    architecture = file.values.get("general.architecture")
    tables = {name: table for table in all_tables() if table.gguf for name in table.gguf.architectures}
    if not isinstance(architecture, str) or architecture not in tables:
        raise unknown_family(key, location, f"GGUF architecture {architecture}", list(tables))
    table = tables[architecture]
    values = to_model_values(key, location, table, _hf_settings(key, location, file, table))
    # Validated first: a damaged file may have heads of any size.
    model = build_model(key, location, values)
    file_frequencies = _frequencies(file, values["kinds"]["layer"]["attention"]["rope"]["theta"], values["head_dim"])

    def check(model: config.Model) -> Iterator[Problem]:
        for name, kind in model.kinds.items():
            expected = frequencies(kind.attention.rope, kind.attention.head_dim or model.head_dim)
            if (
                expected is None
                or len(expected) != len(file_frequencies)
                or not np.allclose(expected, file_frequencies, rtol=TOLERANCE, atol=0)
            ):
                reason = f"gives other RoPE frequencies than {location} was trained with"
                field = f"model.kinds.{name}.attention.rope"
                yield Problem(field, reason, value=f"theta {kind.attention.rope.theta:g}")

    return Source(
        key=key,
        location=location,
        table=table,
        model=model,
        shapes=file.shapes,
        read=file.read,
        is_gguf=True,
        unspecified=UNSPECIFIED,
        check=check,
    )


def _hf_settings(key: str, location: str, file: GgufFile, table: Table) -> Settings:
    """The contents of the equivalent config.json."""
    assert table.gguf is not None
    prefix = f"{file.values['general.architecture']}."
    scaling = file.values.get(f"{prefix}rope.scaling.type", "none")
    if scaling != "none":
        reason = f"has unsupported RoPE scaling {prefix}rope.scaling.type={scaling}"
        accepted = f"a file without rope.scaling.type, or with {FREQUENCY_FACTORS}"
        raise ConfigError(Problem(key, reason, value=location, accepted=accepted))
    settings: dict[str, Any] = {
        hf_key: file.values.get(prefix + gguf_key) for hf_key, gguf_key in table.gguf.settings.items()
    }
    head = next(row.gguf for row in table.non_layer if row.path == "head/kernel")
    return {
        **settings,
        "vocab_size": settings["vocab_size"] or len(file.values.get("tokenizer.ggml.tokens", ())),
        "rope_theta": settings["rope_theta"] or THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": head not in file.shapes,
    }


def _frequencies(file: GgufFile, theta: float, head_dim: int) -> np.ndarray:
    base: dict[str, Any] = {"theta": theta}
    unscaled = np.asarray(frequencies(config.Rope(**base), head_dim))
    return unscaled / file.read(FREQUENCY_FACTORS) if FREQUENCY_FACTORS in file.shapes else unscaled
