"""Tokenizers with files, against the libraries that the files belong to."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from maxhydra.config import ConfigError
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.data import load_tokenizer, tokenizers
from maxhydra.data.tokenizers import Tokenizer, TokenizerError, count_token_bytes
from maxhydra.data.tokenizers.tiktoken import PATTERN
from tests.support.skips import import_optional
from tests.support.vocabularies import byte_level, metaspace, save, sentencepiece_file, tiktoken_file, with_token

sentencepiece = import_optional("sentencepiece", extra="data")
tiktoken = import_optional("tiktoken", extra="data")
tiktoken_load = import_optional("tiktoken.load", extra="data")
transformers = import_optional("transformers", extra="parity")

TEXTS = [
    "To be, or not to be: that is the question.",
    "",
    " leading and trailing \n\n",
    "naïve café — 日本語 🎭👩‍🚀",
    "x\n\ny\t z",
    "<s>not a mark</s><|eos|> <turn> <|im_end|>",
]
MARKS = ["<s>", "</s>", "<|eos|>"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def make(kind: str, root: Path) -> Config:
    """Config of a tokenizer of each kind with the special tokens <s>, </s> and <|eos|>."""
    path = root / kind
    names = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}}
    match kind:
        case "byte_level":
            return Config(kind="hf", path=str(save(byte_level(MARKS), path, **names)))
        case "metaspace":
            return Config(kind="hf", path=str(save(metaspace(MARKS), path, **names)))
        case "unigram":
            return Config(kind="hf", path=str(save(metaspace(MARKS, unigram=True), path, **names)))
        case "sentencepiece":
            return Config(kind=kind, path=str(sentencepiece_file(root / "x.model", control_symbols=["<|eos|>"])))
        case _:
            special = {name: 300 + number for number, name in enumerate(MARKS)}
            merges = [b"be", b" b", b" be", b"to", b"th", b"\xe6\x97", b" q"]
            return Config(
                kind=kind,
                path=str(tiktoken_file(root / "x.tiktoken", merges, special_tokens=special, bos="<s>", eos="</s>")),
            )


KINDS = ["byte_level", "metaspace", "unigram", "sentencepiece", "tiktoken"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, root: Path) -> Tokenizer:
    return load_tokenizer(Data(tokenizer=make(request.param, root)))


class TestEveryKind:
    def test_round_trip(self, tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
        # The unigram model has no byte fallback for unknown letters.
        for text in TEXTS[:2] if "unigram" in request.node.name else TEXTS:
            back = tokenizer.decode(tokenizer.encode(text))
            # Only a dummy space at the start may be added by the models.
            assert back.removeprefix(" ") == text.removeprefix(" ") if text[:1] == " " else back == text

    def test_ids_without_a_token_have_no_text(self, tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
        """A model may have more rows than there are tokens, and a tiktoken encoding may have gaps."""
        ids = tokenizer.encode("to be")
        gap = [290] if "tiktoken" in request.node.name else []
        for unused in (tokenizer.vocab_size, tokenizer.vocab_size + 1000, *gap):
            assert tokenizer.decode([unused]) == ""
            assert tokenizer.decode([ids[0], unused, *ids[1:]]) == "to be"

    def test_bytes_of_tokens_sum_to_those_of_the_text(
        self, tokenizer: Tokenizer, request: pytest.FixtureRequest
    ) -> None:
        assert tokenizer.token_widths.shape == (tokenizer.vocab_size,)
        assert not tokenizer.token_widths[sorted(tokenizer.special)].any()
        for text in TEXTS:
            ids, size = np.array(tokenizer.encode(text), np.int64), len(text.encode())
            if any(name in request.node.name for name in ("byte_level", "tiktoken")):
                assert tokenizer.token_widths[ids].sum() == size
            counts = count_token_bytes(tokenizer, ids, size)
            assert counts.sum() == size and (counts >= 0).all()
            if text == TEXTS[0]:
                # Each prefix of the tokens decodes to the text up to there, apart from a space that the model adds.
                ends = [len(tokenizer.decode(ids[: end + 1].tolist())) for end in range(len(ids))]
                assert np.abs(np.cumsum(counts) - ends).max() <= 1

    def test_text_after_a_complete_character_is_independent(
        self, tokenizer: Tokenizer, request: pytest.FixtureRequest
    ) -> None:
        assert tokenizer.is_byte_level == any(name in request.node.name for name in ("byte_level", "tiktoken"))
        for ids in map(tokenizer.encode, TEXTS if tokenizer.is_byte_level else ()):
            for end in range(len(ids)):
                if not (text := tokenizer.decode(ids[:end])).endswith("\ufffd"):
                    assert text + tokenizer.decode(ids[end:]) == tokenizer.decode(ids)

    def test_plain_text_never_becomes_a_special_token(self, tokenizer: Tokenizer) -> None:
        # The unknown token is special too, and replaces any unknown letter.
        special = tokenizer.special - {tokenizer.special_token_ids.get("<unk>")}
        for text in TEXTS:
            assert not special & set(tokenizer.encode(text)), text
            assert not special & set(tokenizer.encode_batch([text])[0].tolist())
            assert not special & set(tokenizer.encode_bytes(text.encode()).tolist())

    def test_names_become_special_tokens_in_encode_marked(self, tokenizer: Tokenizer) -> None:
        ids, spans = tokenizer.encode_with_special_tokens("<s>hi 🎭<|eos|>you</s>")
        assert (
            [ids[0], ids[-1]]
            == [tokenizer.bos, tokenizer.eos]
            == [tokenizer.special_token_ids["<s>"], tokenizer.special_token_ids["</s>"]]
        )
        assert [i for i in ids if i in tokenizer.special] == [
            tokenizer.special_token_ids[name] for name in ("<s>", "<|eos|>", "</s>")
        ]
        assert spans[0].tolist() == [0, 3]
        assert spans[ids.tolist().index(tokenizer.special_token_ids["<|eos|>"])].tolist() == [7, 14]
        assert tokenizer.decode(ids.tolist()).strip().endswith("you")

    def test_spans_cover_the_text(self, tokenizer: Tokenizer) -> None:
        """Every character belongs to a token, tokens are in order, and whitespace is not trimmed."""
        for text in ["<s> hi  there</s>\n\n ok 🎭é日本語 </s> x ", *TEXTS]:
            ids, spans = tokenizer.encode_with_special_tokens(text)
            assert len(ids) == len(spans)
            covered = np.zeros(len(text), int)
            for start, end in spans:
                covered[start:end] += 1
            assert covered.all(), (text, spans.tolist())
            assert (np.diff(spans[:, 0]) >= 0).all()
            assert all(ends >= starts for (_, ends), (starts, _) in pairwise(spans))

    def test_text_without_special_tokens_is_encoded_alike(self, tokenizer: Tokenizer) -> None:
        for text in TEXTS[:-1]:
            assert tokenizer.encode_with_special_tokens(text)[0].tolist() == tokenizer.encode(text)

    def test_batches_and_files_hold_the_same_tokens(
        self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == [tokenizer.encode(text) for text in TEXTS]
        file = "\n".join(TEXTS).encode()
        ids = tokenizer.encode_bytes(file)
        assert ids.dtype == np.uint16
        assert ids.tolist() == tokenizer.encode(file.decode())
        monkeypatch.setattr(tokenizers, "BLOCK", 20)
        assert tokenizer.decode(tokenizer.encode_bytes(file).tolist()).replace(" ", "") == tokenizer.decode(
            ids.tolist()
        ).replace(" ", "")
        with pytest.raises(UnicodeDecodeError):
            tokenizer.encode_bytes(b"\xff")

    def test_many_threads(self, tokenizer: Tokenizer) -> None:
        texts = [f"{text} {number}" for number in range(20) for text in TEXTS]
        expected = [tokenizer.encode(text) for text in texts]
        marked = [tokenizer.encode_with_special_tokens(text)[0].tolist() for text in texts]
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(tokenizer.encode, texts)) == expected
            assert [ids.tolist() for ids, _ in pool.map(tokenizer.encode_with_special_tokens, texts)] == marked

    def test_padding_defaults_to_the_end_token(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.pad == tokenizer.eos is not None


@cache
def small_description() -> str:
    return byte_level(["<s>"], 280).to_str()


def changed(change: Callable[[dict[str, Any]], None] = lambda description: None) -> str:
    """A tokenizer.json after a change."""
    description = json.loads(small_description())
    change(description)
    return json.dumps(description)


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


class TestHuggingFace:
    def library(self, folder: Path) -> Callable[[str], list[int]]:
        made = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return lambda text: made.encode(text, add_special_tokens=False)

    @pytest.mark.parametrize("kind", ["byte_level", "metaspace", "unigram"])
    def test_is_that_of_transformers(self, root: Path, kind: str) -> None:
        config = make(kind, root)
        assert config.path is not None
        tokenizer = load_tokenizer(Data(tokenizer=config))
        reference = transformers.AutoTokenizer.from_pretrained(config.path, local_files_only=True)
        for text in [*TEXTS, "<s>a</s> b<|eos|>c"]:
            assert tokenizer.encode_with_special_tokens(text)[0].tolist() == reference.encode(
                text, add_special_tokens=False
            )
        for text in TEXTS[:-1]:
            assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False)
        assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (
            reference.bos_token_id,
            reference.eos_token_id,
            len(reference),
        )

    def test_special_tokens_from_the_files(self, tmp_path: Path) -> None:
        folder = with_token(save(byte_level(MARKS), tmp_path / "t", pad_token="<|eos|>", eos_token="</s>"), "<tool>")
        tokenizer = load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(folder))))
        assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (
            None,
            tokenizer.special_token_ids["</s>"],
            tokenizer.special_token_ids["<|eos|>"],
        )
        assert tokenizer.vocab_size == max(Library.from_file(str(folder / "tokenizer.json")).get_vocab().values()) + 1
        tool = tokenizer.encode("<tool>")
        assert tool == [tokenizer.vocab_size - 1], "a token that is not special is text"
        assert tokenizer.decode(tool) == "<tool>"
        assert tokenizer.special == set(tokenizer.special_token_ids.values()) == {0, 1, 2}

    def test_the_config_overrides_the_files(self, tmp_path: Path) -> None:
        folder = with_token(save(byte_level(MARKS), tmp_path / "t", eos_token="</s>"), "<end>")
        (folder / "mine.jinja").write_text("mine")
        config = Config(
            kind="hf", path=str(folder), bos="<s>", eos="<end>", pad="</s>", chat_template=str(folder / "mine.jinja")
        )
        tokenizer = load_tokenizer(Data(tokenizer=config))
        assert (tokenizer.bos, tokenizer.pad) == (
            tokenizer.special_token_ids["<s>"],
            tokenizer.special_token_ids["</s>"],
        )
        assert tokenizer.eos == tokenizer.vocab_size - 1 == tokenizer.special_token_ids["<end>"]
        assert tokenizer.eos not in tokenizer.encode("the <end>")
        assert tokenizer.chat_template == "mine"
        with pytest.raises(ConfigError, match="is not a token of the tokenizer"):
            load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(folder), eos="<nope>")))

    def test_templates_and_special_tokens_in_neighbouring_files(self, tmp_path: Path) -> None:
        folder = save(byte_level(MARKS), tmp_path / "t", chat_template=[{"name": "default", "template": "one"}])
        file = Config(kind="hf", path=str(folder / "tokenizer.json"))
        assert load_tokenizer(Data(tokenizer=file)).chat_template == "one"
        (folder / "chat_template.jinja").write_text("two")
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
        tokenizer = load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(folder))))
        assert (tokenizer.chat_template, tokenizer.bos) == ("two", tokenizer.special_token_ids["<s>"])

    def test_tokens_that_only_the_settings_name(self, tmp_path: Path) -> None:
        folder = save(byte_level(MARKS), tmp_path / "t")
        after = len(Library.from_file(str(folder / "tokenizer.json")).get_vocab())
        added = {str(after): {"content": "<extra>", "special": True, "normalized": False}}
        settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"added_tokens_decoder": added}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(folder))))
        assert tokenizer.encode_with_special_tokens("a<extra>")[0][-1] == after == tokenizer.vocab_size - 1

    def test_truncation_in_the_files_cuts_nothing(self, tmp_path: Path) -> None:
        made = byte_level(MARKS)
        made.enable_truncation(4)
        made.enable_padding(length=64)
        tokenizer = load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(save(made, tmp_path / "t")))))
        text = "a rather long text, and not a short one"
        assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_a_folder_of_another_library(self, tmp_path: Path) -> None:
        """No tokenizer.json: transformers converts the SentencePiece model."""
        sentencepiece_file(tmp_path / "tokenizer.model")
        settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        tokenizer = load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(tmp_path))))
        reference = self.library(tmp_path)
        assert tokenizer.encode(TEXTS[0]) == reference(TEXTS[0])
        assert (tokenizer.bos, tokenizer.eos) == (
            tokenizer.special_token_ids["<s>"],
            tokenizer.special_token_ids["</s>"],
        )
        assert tokenizer.encode_with_special_tokens("<s>a</s>")[0].tolist() == reference("<s>a</s>")

    @pytest.mark.parametrize(
        ("files", "reason"),
        [
            ({}, "transformers cannot convert it"),
            ({"tokenizer.json": "{"}, "cannot be read as a tokenizer"),
            ({"tokenizer.json": "{}"}, "cannot be read as a tokenizer"),
            ({"tokenizer.json": "[]"}, "cannot be read as a tokenizer"),
            ({"tokenizer.json": "[" * 100_000}, r"tokenizer\.json: cannot be read as a tokenizer: RecursionError"),
            ({"tokenizer.json": b"\xff\xfe"}, r"tokenizer\.json: cannot be read as a tokenizer: UnicodeDecodeError"),
            ({"tokenizer.json": lambda it: it["model"]["vocab"].update(zz=-1)}, "integer `-1`"),
            ({"tokenizer.json": lambda it: it["model"]["vocab"].update(zz=10**12)}, "integer `1000000000000`"),
            ({"tokenizer.json": lambda it: it["model"]["vocab"].update(zz=10**9)}, "largest token id"),
            ({"tokenizer.json": lambda it: it.update(pre_tokenizer=split("(a"))}, "unmatched parenthesis"),
            ({"tokenizer_config.json": '{"added_tokens_decoder": [1]}'}, "does not map ids to objects"),
            ({"tokenizer_config.json": '{"chat_template": 5}'}, "must be a text, found a value of type int"),
            ({"tokenizer_config.json": "[" * 100_000}, r"tokenizer_config\.json: cannot be read"),
            ({"chat_template.jinja": b"\xff"}, r"chat_template=.*chat_template\.jinja: is not UTF-8: byte 0"),
        ],
    )
    def test_invalid_files(self, tmp_path: Path, files: dict[str, Any], reason: str) -> None:
        for name, content in ({"tokenizer.json": changed(), **files} if files else {}).items():
            text = changed(content) if callable(content) else content
            (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ConfigError, match=reason):
            load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(tmp_path))))

    @pytest.mark.slow
    def test_a_regex_that_backtracks(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text(changed(lambda it: it.update(pre_tokenizer=split("(a|aa)+$"))))
        tokenizer = load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(tmp_path))))
        for encode in (tokenizer.encode, tokenizer.encode_with_special_tokens):
            with pytest.raises(TokenizerError, match="the tokenizer failed on a text"):
                encode("a" * 60 + "!")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("made", "longest"),
        [
            (lambda: byte_level(["<s>"], 280), True),
            (lambda: metaspace(["<s>"], vocab_size=300), True),
            (lambda: metaspace(["<s>"], unigram=True, vocab_size=300), False),
        ],
    )
    def test_the_longest_token(self, tmp_path: Path, made: Callable[[], Library], longest: bool) -> None:
        """Known if every byte of a text is part of a token; a text of n bytes then has at least n / longest tokens."""
        tokenizer = load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(save(made(), tmp_path)))))
        assert (tokenizer.max_token_bytes is not None) == longest
        for text in TEXTS if longest else []:
            assert len(text.encode()) <= tokenizer.max_token_bytes * len(tokenizer.encode(text))

    def test_a_missing_path(self, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        with pytest.raises(ConfigError, match=r"it is not downloaded\n.*contains other"):
            load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(tmp_path / "x"))))


class TestSentencePiece:
    def test_is_that_of_the_library(self, root: Path) -> None:
        config = make("sentencepiece", root)
        tokenizer, reference = (
            load_tokenizer(Data(tokenizer=config)),
            sentencepiece.SentencePieceProcessor(model_file=config.path),
        )
        for text in TEXTS:
            assert tokenizer.encode(text) == reference.encode(text)
        assert (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size) == (
            reference.bos_id(),
            reference.eos_id(),
            reference.vocab_size(),
        )

    def test_no_space_after_a_special_token(self, root: Path) -> None:
        tokenizer = load_tokenizer(Data(tokenizer=make("sentencepiece", root)))
        ids, spans = tokenizer.encode_with_special_tokens("be</s>be")
        assert tokenizer.decode(ids.tolist()) == "bebe"
        assert spans[-1, 1] == 8

    def test_symbols_that_the_template_uses_are_special_tokens(self, tmp_path: Path) -> None:
        file = sentencepiece_file(tmp_path / "x.model", user_defined_symbols=["<turn>", "<table>", "\n"])
        (tmp_path / "t.jinja").write_text("<turn>{{ messages[0].content }}")
        plain = load_tokenizer(Data(tokenizer=Config(kind="sentencepiece", path=str(file))))
        assert set(plain.special_token_ids) == {"<s>", "</s>"}
        template = str(tmp_path / "t.jinja")
        tokenizer = load_tokenizer(Data(tokenizer=Config(kind="sentencepiece", path=str(file), chat_template=template)))
        assert set(tokenizer.special_token_ids) == {"<s>", "</s>", "<turn>"}
        turn, table = (
            sentencepiece.SentencePieceProcessor(model_file=str(file)).piece_to_id(n) for n in ("<turn>", "<table>")
        )
        assert turn in plain.encode("a<turn>")
        assert turn not in tokenizer.encode("a<turn>")
        assert turn in tokenizer.encode_with_special_tokens("a<turn>")[0]
        assert table in tokenizer.encode("a<table>")

    def test_an_invalid_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.model").write_bytes(b"not a model at all")
        with pytest.raises(ConfigError, match="is not a SentencePiece model"):
            load_tokenizer(Data(tokenizer=Config(kind="sentencepiece", path=str(tmp_path / "x.model"))))
        with pytest.raises(ConfigError, match="no such file"):
            load_tokenizer(Data(tokenizer=Config(kind="sentencepiece", path=str(tmp_path / "y.model"))))


class TestTiktoken:
    def test_is_that_of_the_library(self, root: Path) -> None:
        config = make("tiktoken", root)
        assert config.path is not None
        ranks = tiktoken_load.load_tiktoken_bpe(config.path)
        special = {name: 300 + number for number, name in enumerate(MARKS)}
        reference = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)
        tokenizer = load_tokenizer(Data(tokenizer=config))
        for text in TEXTS:
            assert tokenizer.encode(text) == reference.encode_ordinary(text)
            ids, spans = tokenizer.encode_with_special_tokens(text)
            assert ids.tolist() == reference.encode(text, allowed_special="all")
            assert spans[:, 0].tolist() == reference.decode_with_offsets(ids.tolist())[1]
        assert tokenizer.vocab_size == reference.n_vocab

    def test_without_a_settings_file(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(
            Data(tokenizer=Config(kind="tiktoken", path=str(tiktoken_file(tmp_path / "a.tiktoken", [b"be"]))))
        )
        assert (tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.vocab_size) == (None, None, 0, 257)
        assert tokenizer.encode("be") == [256]

    def test_bad_files(self, tmp_path: Path) -> None:
        def reason(path: Path) -> str:
            with pytest.raises(ConfigError) as error:
                load_tokenizer(Data(tokenizer=Config(kind="tiktoken", path=str(path))))
            return str(error.value)

        (tmp_path / "a").write_text("not base64 ranks")
        assert "is not a file of base64" in reason(tmp_path / "a")
        (tmp_path / "b").write_text("YQ== 0")
        assert "has no token for 255 of the 256 bytes" in reason(tmp_path / "b")
        assert "has unknown keys pat_str" in reason(tiktoken_file(tmp_path / "c", [], pat_str="x"))
        assert "cl100k_base" in reason(tmp_path / "nothing")

    def test_a_name_without_a_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.setitem(os.environ, name, "http://127.0.0.1:9")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
        with pytest.raises(ConfigError, match="cannot be downloaded"):
            load_tokenizer(Data(tokenizer=Config(kind="tiktoken", path="r50k_base")))
