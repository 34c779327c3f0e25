"""Text as it streams: never taken back, never half a character, never part of a stop text."""

import random

import pytest
import tokenizers

from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.detokenize import Detokenizer, Stopper

TEXT = "Grüße, 世界! 🦙🦙 naïve — end"


class Counting:
    """A byte tokenizer that counts how many tokens it was asked to decode."""

    def __init__(self):
        self.inner, self.special, self.decoded = ByteTokenizer(), ByteTokenizer.special, 0

    def decode(self, ids):
        self.decoded += len(ids)
        return self.inner.decode(ids)


def streamed(ids: list[int], prompt: list[int], tokenizer=None, *, size: int = 1) -> list[str]:
    """So many tokens at a time."""
    words = Detokenizer(tokenizer or ByteTokenizer(), prompt)
    return [*(words.add(ids[start : start + size]) for start in range(0, len(ids), size)), words.rest()]


def test_characters_split_over_tokens_come_whole():
    parts = streamed(list(TEXT.encode()), list(b"Prompt: "))
    assert "".join(parts) == TEXT
    assert not any("�" in part for part in parts)
    assert parts[:5] == ["G", "r", "", "ü", ""]
    for size in (2, 5, 8, 30):
        parts = streamed(list(TEXT.encode()), list(b"Prompt: "), size=size)
        assert "".join(parts) == TEXT and not any("�" in part for part in parts)


def test_a_character_begun_in_the_prompt_is_finished():
    whole = "🦙".encode()
    assert "".join(streamed(list(whole[2:]) + list(b"!"), list(b"a" + whole[:2]))) == "🦙!"


@pytest.mark.parametrize("seed", range(5))
def test_bytes_that_are_no_text_end_up_as_the_tokenizer_shows_them(seed):
    """Random bytes, with whole characters among them."""
    rng = random.Random(seed)
    pieces = [rng.choice([bytes([rng.randrange(128, 256)]), "🦙".encode(), b"a", "é".encode()[:1]]) for _ in range(200)]
    ids = list(b"".join(pieces))
    for size in (1, 3, 8, 20):
        assert "".join(streamed(ids, list(b"x"), size=size)) == ByteTokenizer().decode(ids)


@pytest.mark.parametrize("unit", [b"\x80", b"\xf0\x9f\xa6", b"word ", "🦙".encode()], ids=str)
def test_the_cost_of_a_token_does_not_grow(unit):
    short, long = Counting(), Counting()
    streamed(list(unit * 60), [], short)
    streamed(list(unit * 600), [], long)
    assert long.decoded < 11 * short.decoded
    together = Counting()
    streamed(list(unit * 600), [], together, size=8)
    assert together.decoded < 1.2 * long.decoded


def test_end_tokens_have_no_text():
    assert streamed([65, ByteTokenizer.eos, 66], []) == ["A", "", "B", ""]


def cut(text: str, stop: list[str], size: int) -> tuple[str, list[str]]:
    stopper, given = Stopper(stop), []
    for start in range(0, len(text), size):
        given.append(stopper.add(text[start : start + size]))
        if stopper.is_stopped:
            break
    return "".join([*given, stopper.rest()]), given


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
def test_stop_texts_are_found_wherever_the_borders_are(text, stop, expected):
    for size in range(1, len(text) + 1):
        assert cut(text, stop, size)[0] == expected


def test_text_is_held_back_only_while_it_may_be_a_stop_text():
    stopper = Stopper(["###", "END"])
    assert [stopper.add(part) for part in ("a#", "#", "b", "EN", "T", "##", "#")] == ["a", "", "##b", "", "ENT", "", ""]
    assert stopper.is_stopped and stopper.rest() == ""


def test_words_of_other_tokenizers_keep_their_spaces():
    """A tokenizer that writes a space before a word only where something stands before it, as SentencePiece's do."""
    words = ["▁The", "▁capital", "▁of", "▁France", "▁is", "▁Paris", "s", "ian", "▁", ".", "<0xF0>", "<0x9F>", "<0xA6>"]
    words += ["<0x99>", "<unk>"]
    ids = {word: id for id, word in enumerate(words)}
    model = tokenizers.models.BPE(ids, [], unk_token="<unk>", byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    steps = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    library.decoder = tokenizers.decoders.Sequence([*steps, tokenizers.decoders.Strip(" ", 1, 0)])

    class Words:
        special = frozenset({14})

        def decode(self, ids):
            return library.decode(list(ids), skip_special_tokens=False)

    prompt, answer = [0, 1, 2, 3, 4], [5, 7, 8, 9, *2 * [10, 11, 12, 13], 0, 6]
    parts = streamed(answer, prompt, Words())
    assert "".join(parts) == library.decode(prompt + answer)[len(library.decode(prompt)) :] == " Parisian .🦙🦙 Thes"
    assert not any("�" in part for part in parts)


@pytest.mark.parametrize("size", [1, 3, 5, 8])
def test_a_decoder_that_breaks_whole_runs_of_bytes_never_sees_part_of_a_character(size):
    """Bytes in a row of which one is no text are all shown as broken, as SentencePiece's way back from bytes has it."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "one", "two"]
    library = tokenizers.Tokenizer(tokenizers.models.BPE({word: id for id, word in enumerate(words)}, []))
    library.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])

    class Words:
        special = frozenset()

        def decode(self, ids):
            return library.decode(list(ids), skip_special_tokens=False)

    rng = random.Random(size)
    pieces = [[256], [257], *(list(text.encode()) for text in ("🦙", "世", "é", "\n"))]
    for _ in range(300):
        prompt, answer = ([id for piece in rng.choices(pieces, k=count) for id in piece] for count in (5, 12))
        text = "".join(streamed(answer, prompt, Words(), size=size))
        assert text == library.decode(prompt + answer)[len(library.decode(prompt)) :]
