"""Weights in a GGUF file, the format of llama.cpp."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import model_of, no_table, values_of
from maxhydra.convert.name_table import Settings, Table, all_tables
from maxhydra.convert.settings import THETA
from maxhydra.convert.source import Source
from maxhydra.layers.rope import frequencies
from maxhydra.modelfiles import GgufFile, open_gguf

# llama.cpp divides the plain frequencies by these, which is how it writes a stretched context.
FACTORS = "rope_freqs.weight"
# The file states the speeds at which positions turn, not why they are so. A window is left out where there is one, too.
SILENT = ("attention.rope", "attention.window", "mlp.activation")
TOLERANCE = 1e-5


def gguf_source(key: str, location: str, path: Path) -> Source:
    """A GGUF file whose architecture has a table."""
    file = open_gguf(key, path)
    architecture = file.values.get("general.architecture")
    known = {name: table for table in all_tables() if table.gguf for name in table.gguf.architectures}
    if architecture not in known:
        raise no_table(key, location, f"GGUF file of architecture {architecture}", list(known))
    table = known[architecture]
    values = values_of(key, location, table, _settings(key, location, file, table))
    speeds = _speeds(file, values["kinds"]["layer"]["attention"]["rope"]["theta"], values["head_dim"])

    def check(model: config.Model) -> Iterator[Problem]:
        for name, kind in model.kinds.items():
            own = frequencies(kind.attention.rope, kind.attention.head_dim or model.head_dim)
            if own is None or len(own) != len(speeds) or not np.allclose(own, speeds, rtol=TOLERANCE, atol=0):
                reason = f"turns positions at other speeds than {location} was trained with"
                where = f"model.kinds.{name}.attention.rope"
                yield Problem(where, reason, value=f"theta {kind.attention.rope.theta:g}")

    return Source(
        key=key,
        location=location,
        table=table,
        model=model_of(key, location, values),
        shapes=file.shapes,
        read=file.read,
        is_gguf=True,
        silent=SILENT,
        check=check,
    )


def _settings(key: str, location: str, file: GgufFile, table: Table) -> Settings:
    """What config.json would hold."""
    assert table.gguf is not None
    prefix = f"{file.values['general.architecture']}."
    kind = file.values.get(f"{prefix}rope.scaling.type", "none")
    if kind != "none":
        reason = f"stretches its context by {prefix}rope.scaling.type={kind}"
        raise ConfigError(Problem(key, reason, value=location, accepted="a file without rope scaling, or with factors"))
    stated: dict[str, Any] = {theirs: file.values.get(prefix + ours) for theirs, ours in table.gguf.settings.items()}
    head = next(row.gguf for row in table.ends if row.path == "head/kernel")
    return {
        **stated,
        "vocab_size": stated["vocab_size"] or len(file.values.get("tokenizer.ggml.tokens", ())),
        "rope_theta": stated["rope_theta"] or THETA,
        "hidden_act": "silu",
        "tie_word_embeddings": head not in file.shapes,
    }


def _speeds(file: GgufFile, theta: float, head_dim: int) -> np.ndarray:
    base: dict[str, Any] = {"theta": theta}
    plain = np.asarray(frequencies(config.Rope(**base), head_dim))
    return plain / file.read(FACTORS) if FACTORS in file.shapes else plain
