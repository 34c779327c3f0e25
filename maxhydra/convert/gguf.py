"""Weights in a GGUF file, the format of llama.cpp."""

from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config import model as config
from maxhydra.convert.facts import THETA, derived
from maxhydra.convert.source import Source, no_table
from maxhydra.convert.table import Table, all_tables
from maxhydra.layers.rope import frequencies
from maxhydra.modelfiles import GgufFile, open_gguf

# llama.cpp divides the plain frequencies by these, which is how it writes a stretched context.
FACTORS = "rope_freqs.weight"


def gguf_source(key: str, location: str, path: Path) -> Source:
    """A GGUF file whose architecture has a table."""
    file = open_gguf(key, path)
    architecture = file.values.get("general.architecture")
    known = {name: table for table in all_tables() for name in table.gguf_architectures}
    if architecture not in known:
        raise no_table(key, location, f"GGUF file of architecture {architecture}", list(known))
    table = known[architecture]
    return Source(
        key=key,
        location=location,
        table=table,
        facts=_facts(key, location, file, table),
        shapes=file.shapes,
        read=file.read,
        is_gguf=True,
    )


def _facts(key: str, location: str, file: GgufFile, table: Table) -> dict[str, Any]:
    prefix = f"{file.values['general.architecture']}."
    stated = {name: file.values.get(prefix + theirs) for name, theirs in table.gguf_facts.items()}
    facts = derived(stated | {"vocab_size": stated["vocab_size"] or len(file.values["tokenizer.ggml.tokens"])})
    if facts["window"] is None:
        del facts["window"]  # these files leave it out where there is one, too
    head = next(row.gguf for row in table.ends if row.path == "head/kernel")
    facts["head"] = config.Head.separate.value if head in file.shapes else config.Head.tied.value
    kind = file.values.get(f"{prefix}rope.scaling.type", "none")
    if kind != "none":
        reason = f"stretches its context by {prefix}rope.scaling.type={kind}"
        raise ConfigError(Problem(key, reason, value=location, accepted="a file without rope scaling, or with factors"))
    base: dict[str, Any] = {"theta": file.values.get(f"{prefix}rope.freq_base", THETA)}
    plain = frequencies(config.Rope(**base), facts["head_dim"])
    assert plain is not None
    factors = file.read(FACTORS).tolist() if FACTORS in file.shapes else [1.0] * len(plain)
    facts["frequencies"] = tuple(speed / factor for speed, factor in zip(plain, factors, strict=True))
    return facts
