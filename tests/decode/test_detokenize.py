"""Streamed text: never retracted, never half a character, never part of a stop string."""

import random

import pytest
import tokenizers

from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.detokenize import Detokenizer, StopMatcher

TEXT = "Grüße, 世界! 🦙🦙 naïve — end"


class Counting:
    """A byte tokenizer that counts the tokens it decodes."""

    def __init__(self, *, is_byte_level: bool = False):
        self.inner, self.special, self.decoded = ByteTokenizer(), ByteTokenizer.special, 0
        self.is_byte_level = is_byte_level

    def decode(self, ids):
        self.decoded += len(ids)
        return self.inner.decode(ids)


def streamed(ids: list[int], prompt: list[int], tokenizer=None, *, size: int = 1) -> list[str]:
    """Detokenize `size` tokens at a time."""
    detokenizer = Detokenizer(tokenizer or ByteTokenizer(), prompt)
    return [*(detokenizer.add(ids[start : start + size]) for start in range(0, len(ids), size)), detokenizer.flush()]


def test_characters_split_over_tokens_are_emitted_whole():
    parts = streamed(list(TEXT.encode()), list(b"Prompt: "))
    assert "".join(parts) == TEXT
    assert not any("�" in part for part in parts)
    assert parts[:5] == ["G", "r", "", "ü", ""]
    for size in (2, 5, 8, 30):
        parts = streamed(list(TEXT.encode()), list(b"Prompt: "), size=size)
        assert "".join(parts) == TEXT and not any("�" in part for part in parts)


def test_a_character_that_starts_in_the_prompt_is_completed():
    whole = "🦙".encode()
    assert "".join(streamed(list(whole[2:]) + list(b"!"), list(b"a" + whole[:2]))) == "🦙!"


@pytest.mark.parametrize("seed", range(5))
def test_invalid_bytes_are_shown_as_by_the_tokenizer(seed):
    """Random bytes mixed with complete characters."""
    rng = random.Random(seed)
    pieces = [rng.choice([bytes([rng.randrange(128, 256)]), "🦙".encode(), b"a", "é".encode()[:1]]) for _ in range(200)]
    ids = list(b"".join(pieces))
    for size in (1, 3, 8, 20):
        for tokenizer in (Counting(), Counting(is_byte_level=True)):
            assert "".join(streamed(ids, list(b"x"), tokenizer, size=size)) == ByteTokenizer().decode(ids)


@pytest.mark.parametrize("unit", [b"\x80", b"\xf0\x9f\xa6", b"word ", "🦙".encode()], ids=str)
def test_the_cost_per_token_is_constant(unit):
    short, long = Counting(), Counting()
    streamed(list(unit * 60), [], short)
    streamed(list(unit * 600), [], long)
    assert long.decoded < 11 * short.decoded
    chunked = Counting()
    streamed(list(unit * 600), [], chunked, size=8)
    assert chunked.decoded < 1.2 * long.decoded


def test_a_byte_level_tokenizer_decodes_each_token_once():
    ids = list(("word " * 8 + "🦙🦙").encode())
    window, once = Counting(), Counting(is_byte_level=True)
    texts = [streamed(ids, list(b"Prompt: "), tokenizer, size=8) for tokenizer in (window, once)]
    assert texts[0] == texts[1] and once.decoded < window.decoded / 2


def test_eos_tokens_have_no_text():
    assert streamed([65, ByteTokenizer.eos, 66], []) == ["A", "", "B", ""]


def cut_at_stop(text: str, stop: list[str], size: int) -> str:
    matcher, texts = StopMatcher(stop), []
    for start in range(0, len(text), size):
        texts.append(matcher.add(text[start : start + size]))
        if matcher.is_stopped:
            break
    return "".join([*texts, matcher.flush()])


CASES = [
    ("one two three", ["two"], "one "),
    ("one two three", ["three", "two"], "one "),
    ("aaab and more", ["aab"], "a"),
    ("abcabd", ["abd"], "abc"),
    ("abcd", ["abcd", "c"], "ab"),
    ("no stop here, almos", ["almost"], "no stop here, almos"),
    ("\n\nUser: hi", ["\nUser:"], "\n"),
    ("anything", [], "anything"),
    ("x", ["x"], ""),
]


@pytest.mark.parametrize(("text", "stop", "expected"), CASES)
def test_stop_strings_are_found_across_token_boundaries(text, stop, expected):
    for size in range(1, len(text) + 1):
        assert cut_at_stop(text, stop, size) == expected


def test_text_is_held_back_only_while_it_may_be_a_stop_string():
    matcher = StopMatcher(["###", "END"])
    assert [matcher.add(part) for part in ("a#", "#", "b", "EN", "T", "##", "#")] == ["a", "", "##b", "", "ENT", "", ""]
    assert matcher.is_stopped and matcher.flush() == ""


def test_words_of_sentencepiece_tokenizers_keep_their_spaces():
    """SentencePiece decoders write a space before a word only if something precedes it."""
    vocabulary = [
        "▁The",
        "▁capital",
        "▁of",
        "▁France",
        "▁is",
        "▁Paris",
        "s",
        "ian",
        "▁",
        ".",
        "<0xF0>",
        "<0x9F>",
        "<0xA6>",
    ]
    vocabulary += ["<0x99>", "<unk>"]
    ids = {word: id for id, word in enumerate(vocabulary)}
    model = tokenizers.models.BPE(ids, [], unk_token="<unk>", byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    library.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])

    class Decoder:
        special = frozenset({14})
        is_byte_level = False

        def decode(self, ids):
            return library.decode(list(ids), skip_special_tokens=False)

    prompt, completion = [0, 1, 2, 3, 4], [5, 7, 8, 9, *2 * [10, 11, 12, 13], 0, 6]
    parts = streamed(completion, prompt, Decoder())
    assert (
        "".join(parts) == library.decode(prompt + completion)[len(library.decode(prompt)) :] == " Parisian .🦙🦙 Thes"
    )
    assert not any("�" in part for part in parts)


@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_characters_survive_a_decoder_that_invalidates_whole_runs_of_bytes(size):
    """SentencePiece's byte fallback shows a whole run of bytes as replacement characters if one of them is invalid."""
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), "one", "two"]
    library = tokenizers.Tokenizer(tokenizers.models.BPE({word: id for id, word in enumerate(vocabulary)}, []))
    library.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])

    class Decoder:
        special = frozenset()
        is_byte_level = False

        def decode(self, ids):
            return library.decode(list(ids), skip_special_tokens=False)

    rng = random.Random(size)
    pieces = [[256], [257], *(list(text.encode()) for text in ("🦙", "世", "é", "\n"))]
    for _ in range(300):
        prompt, completion = ([id for piece in rng.choices(pieces, k=count) for id in piece] for count in (5, 12))
        text = "".join(streamed(completion, prompt, Decoder(), size=size))
        assert text == library.decode(prompt + completion)[len(library.decode(prompt)) :]
