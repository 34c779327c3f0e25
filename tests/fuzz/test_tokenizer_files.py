"""Files of tokenizers with damage: every one loads and encodes text, or is rejected with one message."""

import copy
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example
from hypothesis import strategies as st

from maxhydra.config.schema.data import Data
from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.data import tokenizers
from tests.support.fuzzing import fuzz
from tests.support.vocabularies import byte_level, metaspace, sentencepiece_file, tiktoken_file

TEXT = "Hello <s>world</s>, 日本 123\n"
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from([-1, 0, 1, 2**31, 2**32, 10**12, 1.5, "", "a", "(a", "(a|aa)+$", "\ud800", "BPE", "Regex"]),
        st.integers(-10, 10),
        st.text(max_size=5),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
# What changes: the place, as choices among the keys or items of each level, and the new value.
CHANGES = st.lists(st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=4), VALUES), min_size=1, max_size=3)
SETTINGS = st.dictionaries(
    st.sampled_from(["added_tokens_decoder", "bos_token", "eos_token", "pad_token", "chat_template"]),
    VALUES,
    max_size=3,
)


@cache
def descriptions() -> list[dict[str, Any]]:
    made = [
        byte_level(["<s>", "</s>"], 280),
        metaspace(["<s>", "</s>"], vocab_size=300),
        metaspace(["<s>"], unigram=True, vocab_size=300),
    ]
    return [json.loads(each.to_str()) for each in made]


def change(value: Any, place: list[int], new: Any) -> Any:
    """Replace, or remove if `new` is None, the part of a JSON value at a place."""
    if not place or not isinstance(value, (dict, list)) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = keys[place[0] % len(keys)]
    part = change(value[key], place[1:], new)
    if part is None:
        del value[key]
    else:
        value[key] = part
    return value


def load_and_encode(config: Config) -> None:
    tokenizers._load.cache_clear()
    tokenizer = tokenizers.load_tokenizer(Data(tokenizer=config))
    assert 0 < tokenizer.vocab_size <= tokenizers.MAX_VOCAB_SIZE
    ids = tokenizer.encode(TEXT)
    assert all(0 <= id < tokenizer.vocab_size for id in ids)
    ids_with_special, spans = tokenizer.encode_with_special_tokens(TEXT)
    assert len(ids_with_special) == len(spans)
    tokenizer.decode(ids)
    longest = tokenizer.max_token_bytes
    assert longest is None or len(TEXT.encode()) <= longest * len(ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Content of a .model and a .tiktoken file."""
    folder = tmp_path_factory.mktemp("files")
    model = sentencepiece_file(folder / "x.model", vocab_size=400, control_symbols=["<|eos|>"])
    ranks = tiktoken_file(folder / "x.tiktoken", [b"He", b"ll"])
    return {"sentencepiece": model.read_bytes(), "tiktoken": ranks.read_bytes()}


@pytest.mark.slow
@fuzz(cases=40, number=st.integers(0, 2), changes=CHANGES, settings=SETTINGS)
@example(0, [([0], -1)], {"added_tokens_decoder": [1]})
@example(0, [([1, 0, 0], -1)], {})
@example(0, [([6, 8, 0], 10**12)], {})
@example(1, [([22, 0], [])], {})
def test_hugging_face_files(folder: Path, number: int, changes: list[Any], settings: dict[str, Any]) -> None:
    description = copy.deepcopy(descriptions()[number])
    for place, new in changes:
        description = change(description, place, new)
    (folder / "tokenizer.json").write_text(json.dumps(description))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    load_and_encode(Config(kind="hf", path=str(folder)))


DAMAGE = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8), st.binary(max_size=8)), min_size=1, max_size=3)


def damaged(content: bytes, damage: list[tuple[float, int, bytes]]) -> bytes:
    for place, length, new in damage:
        start = int(place * len(content))
        content = content[:start] + new + content[start + length :]
    return content


@fuzz(cases=30, name=st.sampled_from(["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]), damage=DAMAGE)
def test_damaged_bytes(folder: Path, name: str, damage: list[tuple[float, int, bytes]]) -> None:
    content = {
        "tokenizer.json": json.dumps(descriptions()[0]).encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}"}).encode(),
        "chat_template.jinja": b"{{ messages }}",
    }
    path = folder / "bytes"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for each, data in (content | {name: damaged(content[name], damage)}).items():
        (path / each).write_bytes(data)
    load_and_encode(Config(kind="hf", path=str(path)))


@fuzz(cases=30, kind=st.sampled_from(["sentencepiece", "tiktoken"]), damage=DAMAGE)
@example("tiktoken", [(0.0, 0, b"QQ== -1\n")])
@example("tiktoken", [(1.0, 0, b"QUFB 99999999999\n")])
def test_damaged_vocabularies(folder: Path, files: dict[str, bytes], kind: str, damage: list[Any]) -> None:
    path = folder / f"x.{kind}"
    path.write_bytes(damaged(files[kind], damage))
    load_and_encode(Config(kind=kind, path=str(path)))


TIKTOKEN_SETTINGS = st.dictionaries(
    st.sampled_from(["pattern", "special_tokens", "bos", "eos", "pad"]),
    VALUES | st.dictionaries(st.text(min_size=1, max_size=5), st.integers(-1, 2**33), max_size=3),
    max_size=3,
)


@fuzz(cases=30, settings=TIKTOKEN_SETTINGS)
def test_tiktoken_settings(folder: Path, files: dict[str, bytes], settings: dict[str, Any]) -> None:
    path = folder / "y.tiktoken"
    path.write_bytes(files["tiktoken"])
    path.with_name("y.tiktoken.json").write_text(json.dumps(settings))
    load_and_encode(Config(kind="tiktoken", path=str(path)))
