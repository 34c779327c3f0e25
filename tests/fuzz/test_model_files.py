"""Model files with random damage: each is read, or rejected with a ConfigError."""

import json
import struct
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example
from hypothesis import strategies as st

from maxhydra.convert.gguf import gguf_source
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_config import find_table, read_settings, to_model_values
from maxhydra.modelfiles import open_gguf
from maxhydra.record.atomic_io import parse_json
from tests.support.fuzzing import fuzz
from tests.support.skips import import_optional

gguf = import_optional("gguf", extra="gguf")
GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
FAMILIES = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))

VALUES = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 1, 3, 10**9, 10**30, 1e308, "", "a", [], [1], {}, {"a": 1}, ["full_attention"]]
    ),
    st.integers(),
    st.floats(),
    st.recursive(st.none() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=4),
)
# Position in a file as a fraction, bytes to write there, and whether the file ends after them.
DAMAGE = st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=9), st.booleans()), min_size=1, max_size=3)


def damaged(content: bytes, damage: list[tuple[float, bytes, bool]], *, header: int | None = None) -> bytes:
    """Overwrite bytes, of the first `header` bytes only if given."""
    for at, new, is_cut in damage:
        start = int(at * (len(content) if header is None else header))
        content = content[:start] + new + (b"" if is_cut else content[start + len(new) :])
    return content


@cache
def settings_of(family: str) -> dict[str, Any]:
    return read_settings("model.path", family, GOLDEN / family)


def changed(settings: dict[str, Any], number: int, value: Any, *, is_removed: bool) -> dict[str, Any]:
    """Replace or remove one setting, also of an inner section."""
    paths = [(key,) for key in settings]
    paths += [(key, inner) for key, item in settings.items() if isinstance(item, dict) for inner in item]
    *outer, name = paths[number % len(paths)]
    result = json.loads(json.dumps(settings))
    section = result[outer[0]] if outer else result
    section.pop(name) if is_removed else section.update({name: value})
    return result


CHANGE = {"family": st.sampled_from(FAMILIES), "number": st.integers(0, 200), "value": VALUES, "removed": st.booleans()}


@pytest.mark.exhaustive
@fuzz(cases=300, **CHANGE)
@example("gemma3", 0, {"a": [1]}, False)
def test_settings_give_a_model_section(family: str, number: int, value: Any, removed: bool) -> None:
    settings = changed(settings_of(family), number, value, is_removed=removed)
    table = find_table("model.path", family, settings)
    assert to_model_values("model.path", family, table, settings)


@pytest.mark.slow
@fuzz(cases=10, **CHANGE)
def test_a_folder_gives_a_model(family: str, number: int, value: Any, removed: bool, tmp_path: Path) -> None:
    folder = tmp_path / family
    if not folder.exists():
        folder.mkdir()
        (folder / "model.safetensors").symlink_to(GOLDEN / family / "model.safetensors")
    settings = changed(settings_of(family), number, value, is_removed=removed)
    (folder / "config.json").write_text(json.dumps(settings))
    assert hf_source("model.path", str(folder), folder).shapes


@pytest.mark.slow
@fuzz(cases=300, rejects=(ValueError,), damage=DAMAGE)
@example(damage=[(0, b"[" * 200_000, True)])
def test_json(damage: list[tuple[float, bytes, bool]]) -> None:
    value = parse_json(damaged((GOLDEN / "llama" / "config.json").read_bytes(), damage))
    assert json.loads(json.dumps(value)) == value or "NaN" in json.dumps(value)


@cache
def gguf_bytes(folder: Path) -> bytes:
    path = folder / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        getattr(writer, f"add_{add}")(32)
    writer.add_head_count(4)
    writer.add_vocab_size(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(np.ones((4, 32), np.float32), kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.mark.slow
@fuzz(cases=150, damage=DAMAGE)
@example(damage=[(8 / 800, struct.pack("<Q", 10**8), False)])
@example(damage=[(16 / 800, struct.pack("<Q", 2**63), False)])
def test_gguf(damage: list[tuple[float, bytes, bool]], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(damaged(gguf_bytes(tmp_path), damage, header=800))
    file = open_gguf("model.path", path)
    for name, shape in file.shapes.items():
        assert file.read(name).shape == tuple(shape)


@fuzz(cases=10, damage=DAMAGE)
# An embedding of 234,881,024 dimensions.
@example(damage=[(0.2158, b"\x00\x00\x00\x0e", False)])
def test_gguf_gives_a_model(damage: list[tuple[float, bytes, bool]], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(damaged(gguf_bytes(tmp_path), damage, header=800))
    assert gguf_source("model.path", str(path), path).shapes


@fuzz(cases=40, damage=DAMAGE)
def test_safetensors(damage: list[tuple[float, bytes, bool]], tmp_path: Path) -> None:
    content = (GOLDEN / "llama" / "model.safetensors").read_bytes()
    (header,) = struct.unpack("<Q", content[:8])
    (tmp_path / "model.safetensors").write_bytes(damaged(content, damage, header=8 + header))
    (tmp_path / "config.json").write_bytes((GOLDEN / "llama" / "config.json").read_bytes())
    source = hf_source("model.path", str(tmp_path), tmp_path)
    for name, shape in source.shapes.items():
        assert source.read(name).shape == tuple(shape)
