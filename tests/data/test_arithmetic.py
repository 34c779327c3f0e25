"""The arithmetic source: answers are right, splits are disjoint, and every record type can read the records."""

import ast

import numpy as np
import pytest

from maxhydra.config.schema.data import Data
from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.data import RowSpec, load_tokenizer
from maxhydra.data.chat import compile_chat_template
from maxhydra.data.sources import RecordSource, open_source
from maxhydra.data.tokenizers.byte import ByteTokenizer

SPEC = RowSpec(seq_len=32, vocab_size=320, seed=0)


def opened(**values: object) -> RecordSource:
    data = Data(source="arithmetic", record_type="chat", **values)  # type: ignore[arg-type]
    assert not list(data.check())
    source = open_source(data, data, SPEC)
    assert isinstance(source, RecordSource)
    return source


def pair(record: dict) -> tuple[str, frozenset[str]]:
    question = record["prompt"][0]["content"][:-1]
    symbol = next(operator for operator in "+-*" if operator in question[1:])
    return symbol, frozenset(question.split(symbol, 1))


def value(text: str) -> int:
    """Python's own arithmetic."""
    tree = ast.parse(text, mode="eval")
    return int(eval(compile(tree, "", "eval"), {"__builtins__": {}}))


@pytest.mark.parametrize("values", [{}, {"digits": 1, "operators": ["*"]}, {"digits": 3, "operators": ["+", "-", "*"]}])
def test_answers_are_right_and_rejected_ones_wrong(values: dict) -> None:
    source = opened(**values)
    for split in (source.train, source.evaluation):
        for record in split.read(np.linspace(0, len(split) - 1, 200).astype(int).tolist()):
            assert isinstance(record, dict)
            (prompt,), (chosen,), (rejected,) = record["prompt"], record["chosen"], record["rejected"]
            assert record["answer"] == str(value(prompt["content"].removesuffix("="))) == chosen["content"]
            assert rejected["content"] != record["answer"] and int(rejected["content"]) is not None
            assert record["messages"] == [prompt, chosen]
            assert record["text"] == prompt["content"] + record["answer"]


@pytest.mark.slow
def test_held_out_problems_are_not_trained_on_in_either_order() -> None:
    values = {"operators": ["+", "-", "*"], "digits": 1, "eval_fraction": 0.3}
    source = opened(**values)
    parts = [part.read(range(len(part))) for part in (source.train, source.evaluation)]
    trained, held_out = ({pair(record) for record in part} for part in parts)  # type: ignore[arg-type]
    assert not trained & held_out and len(trained) + len(held_out) == 3 * 10 * 11 // 2
    few = opened(**values, problems=100)
    assert few.evaluation.read(range(50)) == source.evaluation.read(range(50))
    assert few.train.read(range(len(few.train))) == parts[0][:100]


def test_unknown_and_repeated_operators_are_rejected() -> None:
    for operators in ([], ["/"], ["+", "+"]):
        (problem,) = Data(source="arithmetic", record_type="chat", operators=operators).check()
        assert problem.path == "operators" and problem.accepted == "a subset of + - *"


def test_the_template_that_ships_teaches_the_answer_and_its_end() -> None:
    tokenizer = load_tokenizer(Data(tokenizer=Config(chat_template="lines")))
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3"}]
    document = compile_chat_template(tokenizer).encode(messages)
    bos, eos = ByteTokenizer.bos, ByteTokenizer.eos
    assert document.tokens.tolist() == [bos, *b"1+2=\n", *b"3", eos]  # type: ignore[union-attr]
    assert document.weights.tolist() == [0] * 6 + [1, 1]  # type: ignore[union-attr]


def test_the_byte_tokenizer_recognizes_special_tokens_only_in_templates() -> None:
    tokenizer = ByteTokenizer()
    ids, spans = tokenizer.encode_with_special_tokens("é<|end|>\n")
    assert ids.tolist() == [*"é".encode(), tokenizer.eos, 10] and spans.tolist() == [[0, 1], [0, 1], [1, 8], [8, 9]]
    assert tokenizer.encode("<|end|>") == list(b"<|end|>")
