"""Record types: loss, rows and rejected records of each, alone and through the whole pipeline."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.schema.data import Data, LossOn, OnError, Overlong, Packing, Thinking
from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.data import BatchSpec, RowSpec, host_loader, load_tokenizer, train_loader
from maxhydra.data.record_types import RecordType, Rejected, build_record_type
from maxhydra.data.record_types.labeled import with_mismatched
from maxhydra.data.records import Record
from maxhydra.data.rows import Document
from maxhydra.sharding import Sharder, build_mesh
from tests.support.skips import import_optional
from tests.support.vocabularies import MARKS, family_folder, template

BOS, EOS, PAD = 256, 257, 258


def record_type(data: Data, seq_len: int = 64) -> RecordType:
    return build_record_type(data, data, RowSpec(seq_len=seq_len, vocab_size=320, seed=0))


def encode(data: Data, record: Record, seq_len: int = 64) -> Any:
    (example,) = record_type(data, seq_len).encode([record])
    return example


def rejection(data: Data, record: Record, seq_len: int = 64) -> str:
    example = encode(data, record, seq_len)
    assert isinstance(example, Rejected), example
    return example.reason


def row(data: Data, record: Record, seq_len: int = 64) -> dict[str, np.ndarray]:
    made = record_type(data, seq_len)
    (example,) = made.encode([record])
    assert not isinstance(example, Rejected), example
    return made.row(example, seq_len)


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return Config(kind="hf", path=str(family_folder("chatml", tmp_path_factory.mktemp("tokenizer") / "chatml")))


def jsonl(folder: Path, records: list[dict[str, Any]], **values: Any) -> Data:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Data(source="grain", path=str(path), **values)


def spec(seq_len: int, batch: int = 2) -> BatchSpec:
    sharding = Sharder(build_mesh(Mesh(data=1), jax.devices()[:1]), RULES).sharding(("act_batch", "act_length"))
    return BatchSpec(rows=RowSpec(seq_len=seq_len, vocab_size=700, seed=0), batch=batch, sharding=sharding)


class TestChat:
    def test_documents(self, chatml: Config) -> None:
        data = Data(source="hf", name="x", record_type="chat", tokenizer=chatml, columns={"messages": "talk"})
        document = encode(data, {"talk": conversation("Who?", "I.", "Why?", "So.")})
        assert isinstance(document, Document)
        assert document.weights is not None
        tokenizer = load_tokenizer(data)
        trained = document.tokens[document.weights > 0].tolist()
        end = tokenizer.special_token_ids[MARKS["chatml"][2]]
        assert trained == [*tokenizer.encode("I."), end, *tokenizer.encode("So."), end]

    def test_bytes_with_a_template(self, tmp_path: Path) -> None:
        (tmp_path / "t.jinja").write_text(template("chatml", marked=False))
        tokenizer = Config(chat_template=str(tmp_path / "t.jinja"))
        document = encode(
            Data(source="hf", name="x", record_type="chat", tokenizer=tokenizer), {"messages": conversation("q", "né")}
        )
        assert bytes(document.tokens[document.weights > 0].tolist()) == "né<|im_end|>".encode()
        with pytest.raises(ConfigError, match="no such file"):
            record_type(
                Data(
                    source="hf", name="x", record_type="chat", tokenizer=Config(chat_template=str(tmp_path / "u.jinja"))
                )
            )

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({}, "<think>A</think>I.<|im_end|>|<think>B</think>So.<|im_end|>"),
            ({"loss_on": LossOn.last_turn}, "<think>B</think>So.<|im_end|>"),
            ({"thinking": Thinking.mask}, "I.<|im_end|>|So.<|im_end|>"),
            ({"thinking": Thinking.drop}, "I.<|im_end|>|So.<|im_end|>"),
            ({"thinking": Thinking.mask, "loss_on": LossOn.last_turn}, "So.<|im_end|>"),
        ],
    )
    def test_turns_with_loss(self, tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
        (tmp_path / "t.jinja").write_text(template("chatml", marked=False))
        tokenizer = Config(chat_template=str(tmp_path / "t.jinja"))
        data = Data(source="hf", name="x", record_type="chat", tokenizer=tokenizer, **settings)
        talk = conversation("Who?", "<think>A</think>I.", "Why?", "<think>B</think>So.")
        document = encode(data, {"messages": talk})
        runs = np.split(document.tokens, np.flatnonzero(np.diff(document.weights)) + 1)
        weights = np.split(document.weights, np.flatnonzero(np.diff(document.weights)) + 1)
        trained = [bytes(run.tolist()).decode() for run, weight in zip(runs, weights, strict=True) if weight[0]]
        assert "|".join(trained) == expected
        text = bytes(document.tokens.tolist()).decode()
        assert ("<think>" in text) == (settings.get("thinking") is not Thinking.drop)
        whole = encode(dataclasses.replace(data, loss_on=LossOn.all, thinking=Thinking.keep), {"messages": talk})
        assert whole.weights.all()

    @pytest.mark.parametrize("is_text", [False, True])
    def test_tools_and_tool_calls(self, is_text: bool) -> None:
        """The schemas are in the prompt, without loss; the call and the answer have loss, the tool's reply has none."""
        data = Data(source="hf", name="x", record_type="chat", tokenizer=Config(chat_template="qwen3"))
        tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        turns += [{"role": "tool", "content": "two"}, {"role": "assistant", "content": "It is 2."}]
        document = encode(data, {"messages": turns, "tools": json.dumps(tools) if is_text else tools})
        text, trained = (bytes(document.tokens[mask].tolist()).decode() for mask in (slice(None), document.weights > 0))
        assert "Adds." in text and "two" in text and "Adds." not in trained and "two" not in trained
        assert '{"name": "add", "arguments": {"a": 1}}' in trained and "It is 2." in trained
        bare = encode(data, {"messages": turns, "tools": None})
        assert "Adds." not in bytes(bare.tokens.tolist()).decode()
        assert "not valid JSON" in rejection(data, {"messages": turns, "tools": "[{"})
        assert "expected a list" in rejection(data, {"messages": turns, "tools": {"a": 1}})

    def test_settings_of_conversations_without_conversations(self) -> None:
        problems = Data(thinking=Thinking.mask, loss_on=LossOn.all).check()
        assert [problem.path for problem in problems] == ["loss_on", "thinking"]

    def test_rejected(self, chatml: Config) -> None:
        data = Data(source="hf", name="x", record_type="chat", tokenizer=chatml, max_characters=100)
        assert "has no column 'messages', only 'text'" in rejection(data, {"text": "x"})
        assert "expected a list of messages, found str" in rejection(data, {"messages": "x"})
        assert "more than data.max_characters=100" in rejection(data, {"messages": conversation("x" * 100, "y")})
        assert "is not valid Unicode" in rejection(data, {"messages": conversation("x", "\ud800")})
        assert "expected a list of messages, found ndarray" in rejection(data, {"messages": np.arange(3)})

    def test_a_tokenizer_without_a_template(self) -> None:
        with pytest.raises(ConfigError, match=r"data\.tokenizer\.chat_template"):
            record_type(Data(source="hf", name="x", record_type="chat"))

    def test_batches(self, tmp_path: Path, chatml: Config) -> None:
        """Packed rows: each conversation in its own segment, with loss in the right places."""
        talks = [conversation("Who?" * k, "I am." * (k + 1)) for k in range(12)]
        data = jsonl(
            tmp_path, [{"messages": talk} for talk in talks], record_type="chat", tokenizer=chatml, eval_fraction=0.01
        )
        tokenizer = load_tokenizer(data)
        loader = train_loader(data, spec(256))
        batch = {name: np.asarray(array) for name, array in next(loader).items()}
        loader.close()
        assert batch["segments"].max() > 1
        trained = batch["targets"][batch["weights"] > 0]
        responses = {talk[1]["content"] for talk in talks}
        end = tokenizer.special_token_ids["<|im_end|>"]
        parts = np.split(trained, np.flatnonzero(trained == end) + 1)[:-1]
        assert len(parts) > 3
        assert {tokenizer.decode(part.tolist()) for part in parts} <= responses
        assert (batch["segments"][batch["weights"] > 0] > 0).all()


class TestPreference:
    def data(self, **values: Any) -> Data:
        return Data(source="hf", name="x", record_type="preference", **values)

    def test_texts(self) -> None:
        made = row(self.data(), {"prompt": "ab", "chosen": "cd", "rejected": "e"}, seq_len=8)
        a, b, c, d, e = b"abcde"
        assert {name: column.tolist() for name, column in made.items()} == {
            "chosen_tokens": [BOS, a, b, c, d, 0, 0, 0],
            "chosen_targets": [a, b, c, d, EOS, 0, 0, 0],
            "chosen_positions": [0, 1, 2, 3, 4, 0, 0, 0],
            "chosen_weights": [0, 0, 1, 1, 1, 0, 0, 0],
            "rejected_tokens": [BOS, a, b, e, 0, 0, 0, 0],
            "rejected_targets": [a, b, e, EOS, 0, 0, 0, 0],
            "rejected_positions": [0, 1, 2, 3, 0, 0, 0, 0],
            "rejected_weights": [0, 0, 1, 1, 0, 0, 0, 0],
        }
        assert {column.dtype for name, column in made.items() if "weights" not in name} == {np.dtype(np.int32)}

    def test_without_a_prompt_the_common_prefix_is_the_prompt(self) -> None:
        made = row(self.data(), {"chosen": "abcd", "rejected": "abe"}, seq_len=8)
        with_prompt = row(self.data(), {"prompt": "ab", "chosen": "cd", "rejected": "e"}, seq_len=8)
        for name in made:
            np.testing.assert_array_equal(made[name], with_prompt[name])

    @pytest.mark.parametrize("form", ["apart", "whole", "text after messages", "messages after text"])
    def test_messages(self, chatml: Config, form: str) -> None:
        data = self.data(tokenizer=chatml)
        prompt = conversation("Who?") if form == "messages after text" else conversation("Who?", "I.", "Why?")
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("Because.", "Be gone."))
        record: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        if form == "whole":
            record = {"chosen": [*prompt, *chosen], "rejected": [*prompt, *rejected]}
        if form == "text after messages":
            record |= {"chosen": "Because.", "rejected": "Be gone."}
        if form == "messages after text":
            record |= {"prompt": "Who?"}
        made = row(data, record)
        tokenizer = load_tokenizer(data)
        transformers = import_optional("transformers", extra="parity")
        reference = transformers.AutoTokenizer.from_pretrained(chatml.path, local_files_only=True)
        before = reference.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        for name, text in (("chosen", "Because."), ("rejected", "Be gone.")):
            response = [*tokenizer.encode(text), tokenizer.special_token_ids["<|im_end|>"]]
            trained = made[f"{name}_weights"] > 0
            assert made[f"{name}_targets"][trained].tolist() == response
            assert made[f"{name}_tokens"][: len(before)].tolist() == before
            assert np.flatnonzero(trained)[0] == len(before) - 1, "no token of the prompt, and no earlier turn"

    def test_too_long(self) -> None:
        record = {"prompt": "p" * 10, "chosen": "c" * 6, "rejected": "r" * 3}
        assert "has 11 prompt tokens, 18 with chosen, 15 with rejected" in rejection(self.data(), record, 16)
        assert row(self.data(), record, 17)["chosen_weights"].sum() == 7

        truncating = self.data(packing=Packing(overlong=Overlong.truncate))
        made = row(truncating, record, 12)
        assert bytes(made["chosen_tokens"].tolist()) == b"pppppp" + b"c" * 6, (
            "the prompt is truncated first, from the left"
        )
        assert made["chosen_weights"].sum() == 7
        assert bytes(made["rejected_tokens"][:6].tolist()) == b"pppppp"
        assert made["rejected_weights"].sum() == 4
        made = row(truncating, record, 4)
        assert bytes(made["chosen_tokens"].tolist()) == b"pccc", "then the responses, from the right"
        assert made["chosen_targets"].tolist() == [ord("c")] * 4
        assert made["rejected_targets"].tolist() == [*b"rrr", EOS]

    def test_rejected(self, chatml: Config) -> None:
        reason = rejection(self.data(), {"chosen": "x"})
        assert "has no column 'rejected'" in reason and "expected chosen and rejected" in reason
        assert "are equal" in rejection(self.data(), {"chosen": "x", "rejected": "x"})
        same = {"chosen": conversation("a", "b"), "rejected": conversation("a", "b")}
        assert "are equal" in rejection(self.data(tokenizer=chatml), same)
        assert "expected text as content, found int" in rejection(
            self.data(tokenizer=chatml), {"chosen": 3, "rejected": "x"}
        )
        ids = {"prompt": np.arange(3), "chosen": np.arange(4), "rejected": np.arange(5)}
        assert "contains an array of numbers" in rejection(self.data(tokenizer=chatml), ids)
        with pytest.raises(ConfigError, match="chat_template"):
            encode(self.data(), {"chosen": conversation("a", "b"), "rejected": conversation("a", "c")})

    def test_a_response_without_a_token_to_train_on(self) -> None:
        """Its pair would be treated like one that only pads a batch."""
        data = self.data(tokenizer=Config(add_eos=False))
        assert "chosen has no token to train on" in rejection(data, {"prompt": "a", "chosen": "", "rejected": "b"})
        assert "rejected has no token to train on" in rejection(data, {"chosen": "ab", "rejected": "a"})
        assert row(self.data(), {"prompt": "a", "chosen": "b", "rejected": ""})["rejected_weights"].sum() == 1

    def test_a_prompt_that_the_messages_repeat(self, chatml: Config) -> None:
        """As text, and with the None keys that columnar files give."""
        data = self.data(tokenizer=chatml)
        responses = {
            name: [{**turn, "name": None} for turn in conversation("Who?", name)] for name in ("chosen", "rejected")
        }
        whole, repeated = row(data, responses), row(data, {"prompt": "Who?", **responses})
        for name in whole:
            np.testing.assert_array_equal(whole[name], repeated[name])

    @pytest.mark.parametrize(
        ("prompt", "chosen", "reason"),
        [
            (conversation("q", "a"), conversation("b")[:1], "the prompt ends with a message of the assistant"),
            (conversation("q"), conversation("b"), "chosen ends with a message of the user"),
            (None, conversation("q"), "chosen ends with a message of the user"),
            (
                conversation("q"),
                conversation("other", "b"),
                "chosen starts with a message of the user that is not in the prompt",
            ),
        ],
    )
    def test_swapped_columns(self, chatml: Config, prompt: Any, chosen: Any, reason: str) -> None:
        record = {"prompt": prompt, "chosen": chosen, "rejected": "answer"}
        message = rejection(self.data(tokenizer=chatml), record)
        assert reason in message and "expected chosen and rejected" in message

    def test_batches(self, tmp_path: Path) -> None:
        records = [{"prompt": f"{k:02}", "chosen": "yes", "rejected": "no"} for k in range(20)]
        loader = train_loader(jsonl(tmp_path, records, record_type="preference"), spec(16, batch=4))
        batch = next(loader)
        metrics = loader.metrics()
        loader.close()
        assert {name: array.shape for name, array in batch.items()} == {
            f"{response}_{name}": (4, 16)
            for response in ("chosen", "rejected")
            for name in ("tokens", "targets", "positions", "weights")
        }
        # bos, 2 letters, then 3 and 2: 6 and 5 of 16 positions.
        assert metrics["data/padding"] == pytest.approx(1 - 11 / 32)
        loader = train_loader(jsonl(tmp_path, records, record_type="preference"), spec(4))
        with pytest.raises(ConfigError, match=r"records.jsonl.*more than train.seq_len=4"):
            next(loader)
        loader.close()


class TestLabeled:
    def data(self, **values: Any) -> Data:
        return Data(source="hf", name="x", record_type="labeled", **values)

    def test_text(self) -> None:
        made = row(self.data(), {"prompt": "ab", "completion": "cd", "label": False}, 8)
        assert made["chosen_tokens"].tolist() == [BOS, *b"abcd", 0, 0, 0]
        assert made["chosen_targets"].tolist() == [*b"abcd", EOS, 0, 0, 0]
        assert made["chosen_weights"].tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
        assert (made["label"].shape, float(made["label"])) == ((), 0)

    def test_mismatched_completions_are_those_of_the_row_before(self) -> None:
        """As TRL shifts completions by one within a batch; those that do not fit are truncated."""
        records = [("ab", "cd"), ("e", "fgh"), ("ijklm", "n")]
        rows = [row(self.data(), {"prompt": p, "completion": c, "label": True}, 7) for p, c in records]
        padding = {name: np.zeros_like(column) for name, column in rows[0].items()}
        made = with_mismatched([*rows, padding])
        assert made[0]["rejected_tokens"].tolist() == [BOS, *b"abn", 0, 0, 0]
        assert made[0]["rejected_targets"].tolist() == [*b"abn", EOS, 0, 0, 0]
        assert made[1]["rejected_targets"].tolist() == [*b"ecd", EOS, 0, 0, 0]
        assert made[2]["rejected_targets"].tolist() == [*b"ijklmfg"]
        assert made[2]["rejected_weights"].tolist() == [0, 0, 0, 0, 0, 1, 1]
        assert not any(made[3][name].any() for name in made[3])
        assert {name: made[1][name].tolist() for name in rows[1]} == {name: rows[1][name].tolist() for name in rows[1]}

    def test_messages(self, chatml: Config) -> None:
        record = {"prompt": conversation("q"), "completion": [{"role": "assistant", "content": "a"}], "label": True}
        pair = {"prompt": conversation("q"), "chosen": record["completion"], "rejected": "b"}
        made = row(self.data(tokenizer=chatml), record, 64)
        expected = row(Data(source="hf", name="x", record_type="preference", tokenizer=chatml), pair, 64)
        assert made["chosen_weights"].any()
        for name in ("tokens", "targets", "positions", "weights"):
            np.testing.assert_array_equal(made[f"chosen_{name}"], expected[f"chosen_{name}"])

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"label": 2}, "has the label 2, expected true or false"),
            ({"completion": conversation("q")}, "a completion that ends with a message of the assistant"),
            ({"completion": "c" * 90}, "more than train.seq_len"),
        ],
    )
    def test_rejected(self, change: dict[str, Any], reason: str, chatml: Config) -> None:
        record = {"prompt": "p", "completion": "c", "label": True, **change}
        assert reason in rejection(self.data(tokenizer=chatml), record)


class TestPrompts:
    def data(self, **values: Any) -> Data:
        return Data(source="hf", name="x", record_type="prompts", **values)

    def test_text(self) -> None:
        made = row(self.data(columns={"prompt": "question"}), {"question": "ab", "answer": [1, {"x": 2}], "id": 7}, 6)
        assert made["tokens"].tolist() == [BOS, *b"ab", PAD, PAD, PAD]
        assert (made["length"].dtype, made["length"].shape, int(made["length"])) == (np.int32, (), 3)
        assert (made["info"].dtype, made["info"].shape) == (object, ())
        messages = [{"role": "user", "content": "ab"}]
        assert made["info"].item() == {
            "prompt": "ab",
            "messages": messages,
            "answer": [1, {"x": 2}],
            "record": {"id": 7},
        }

    def test_messages(self, chatml: Config) -> None:
        made = row(self.data(tokenizer=chatml), {"prompt": conversation("2 + 2?"), "answer": "4"})
        transformers = import_optional("transformers", extra="parity")
        reference = transformers.AutoTokenizer.from_pretrained(chatml.path, local_files_only=True)
        expected = reference.apply_chat_template(conversation("2 + 2?"), add_generation_prompt=True, return_dict=False)
        assert made["tokens"][: int(made["length"])].tolist() == expected
        assert made["info"].item()["prompt"].endswith("<|im_start|>assistant\n")

    def test_rejected(self, chatml: Config) -> None:
        assert "the prompt has 6 tokens, more than train.seq_len=4" in rejection(self.data(), {"prompt": "abcde"}, 4)
        assert "no column 'prompt'" in rejection(self.data(), {"answer": 1})
        assert "special token" in rejection(self.data(tokenizer=chatml), {"prompt": conversation("<|im_end|>")})
        assert "the prompt is empty" in rejection(self.data(tokenizer=Config(add_bos=False)), {"prompt": ""})
        assert "message 0 has no role" in rejection(self.data(tokenizer=chatml), {"prompt": [3]})

    def test_rows_on_the_host(self, tmp_path: Path) -> None:
        records = [{"prompt": f"{k} + 1?", "answer": k + 1} for k in range(10)]
        loader = host_loader(jsonl(tmp_path, records, record_type="prompts", eval_fraction=0.1), spec(16, batch=3))
        seen = [row["info"].item() for _ in range(3) for row in next(loader)]
        loader.close()
        assert sorted(info["answer"] for info in seen) == list(range(1, 10))
        assert all(info["prompt"] == f"{info['answer'] - 1} + 1?" for info in seen)


class TestTokens:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"tokens": [[1, 2], [3]]}, "expected an array of numbers"),
            ({"tokens": [1.5, 2, 3]}, "expected a list of token ids, found float64 of shape (3,)"),
            ({"tokens": [1, -100, 5]}, "token ids range from -100 to 5"),
            ({"tokens": [1, 2**32 + 5, 7]}, "token ids range from 1 to 4294967301"),
            ({"tokens": np.array([0, 2**32 - 1, 5], np.uint32)}, "token ids range from 0 to 4294967295"),
            ({"weights": [1, 1]}, "has weights of shape (2,) for 3 tokens"),
            ({"weights": [[1], [1, 2], [1]]}, "expected an array of numbers"),
            ({"weights": ["a", "b", "c"]}, "has weights that are not finite numbers"),
            ({"weights": [1, float("nan"), 1]}, "has weights that are not finite numbers"),
        ],
    )
    def test_rejected(self, change: dict[str, Any], reason: str) -> None:
        """Each would train on another token, give a NaN loss, or stop the run without naming the record."""
        assert reason in rejection(Data(source="hf", name="x", record_type="tokens"), {"tokens": [1, 2, 3]} | change)

    def test_documents(self) -> None:
        for weights in (None, [0, 1, 1], [False, True, True], np.array([0, 1, 1], np.uint8)):
            document = encode(
                Data(source="hf", name="x", record_type="tokens"), {"tokens": [1, 2, 3], "weights": weights}
            )
            assert document.tokens.tolist() == [1, 2, 3]
            assert document.weights is None if weights is None else document.weights.tolist() == [0, 1, 1]


class TestTeacher:
    def record(self, count: int, k: int = 3, kind: type = np.float16) -> dict[str, Any]:
        random = np.random.default_rng(count)
        return {
            "tokens": random.integers(1, 200, count).tolist(),
            "teacher_ids": random.integers(200, size=(count - 1, k)).tolist(),
            "teacher_logits": random.normal(size=(count - 1, k)).astype(kind),
        }

    @pytest.mark.parametrize("kind", [np.float16, np.float32])
    def test_documents(self, kind: type) -> None:
        record = self.record(5, kind=kind)
        document = encode(Data(source="hf", name="x", record_type="teacher"), record)
        assert document.tokens.tolist() == record["tokens"]
        assert document.columns["teacher_ids"].dtype == np.int32
        assert document.columns["teacher_logits"].dtype == kind
        np.testing.assert_array_equal(document.columns["teacher_logits"], record["teacher_logits"])

    def test_columns_stay_aligned_with_their_tokens(self, tmp_path: Path) -> None:
        records = [
            {**self.record(5 + k), "teacher_logits": self.record(5 + k)["teacher_logits"].tolist()} for k in range(8)
        ]
        loader = train_loader(jsonl(tmp_path, records, record_type="teacher", eval_fraction=0.01), spec(16))
        batch = {name: np.asarray(array) for name, array in next(loader).items()}
        loader.close()
        assert batch["teacher_ids"].shape == batch["teacher_logits"].shape == (2, 16, 3)
        known = {
            (before, after): (ids, logits)
            for record in records
            for before, after, ids, logits in zip(
                record["tokens"], record["tokens"][1:], record["teacher_ids"], record["teacher_logits"], strict=False
            )
        }
        checked = 0
        for position in zip(*np.nonzero(batch["segments"]), strict=True):
            ids, logits = known[int(batch["tokens"][position]), int(batch["targets"][position])]
            assert batch["teacher_ids"][position].tolist() == ids
            np.testing.assert_allclose(batch["teacher_logits"][position], logits, rtol=1e-6)
            checked += 1
        assert checked > 16

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"teacher_ids": [[1, 2, 3]]}, "both must be [4, k]"),
            ({"teacher_logits": [[1.0]] * 4}, "both must be [4, k]"),
            ({"teacher_logits": [[1.0, 2.0], [1.0]]}, "expected an array of numbers"),
            ({"teacher_logits": [[float("nan")] * 3] * 4}, "are not all finite"),
            ({"teacher_ids": [["a"] * 3] * 4}, "expected integers and numbers"),
            ({"tokens": "text"}, "tokens: expected a list of ids"),
            ({"tokens": [1]}, "at least 2 are needed"),
            ({"tokens": [1, 2, 3, -100, 5]}, "token ids range from -100 to 5"),
            ({"teacher_ids": [[1, 2, -1]] * 4}, "token ids range from -1 to 2"),
            ({"weights": [1, 1, 1, 1, float("nan")]}, "has weights that are not finite numbers"),
        ],
    )
    def test_rejected(self, change: dict[str, Any], reason: str) -> None:
        assert reason in rejection(Data(source="hf", name="x", record_type="teacher"), self.record(5) | change)


def to_messages(record: Record) -> Record:
    """A formatting function, as a user would write one."""
    return {"messages": [{"role": "user", "content": record["q"]}, {"role": "assistant", "content": record["a"]}]}


class TestFormatting:
    def test_runs_before_the_record_type(self, tmp_path: Path, chatml: Config) -> None:
        records = [{"q": f"q{k}", "a": f"answer {k}"} for k in range(9)]
        formatting = f"{__name__}:to_messages"
        data = jsonl(tmp_path, records, record_type="chat", tokenizer=chatml, formatting=formatting, eval_fraction=0.1)
        loader = train_loader(data, spec(512, batch=1))
        batch = {name: np.asarray(array) for name, array in next(loader).items()}
        loader.close()
        trained = load_tokenizer(data).decode(batch["targets"][batch["weights"] > 0].tolist())
        assert sorted(trained.split("answer ")[1:]) == [str(k) for k in range(8)]

    def test_its_errors_name_the_record(self, tmp_path: Path, chatml: Config) -> None:
        records = [{"q": "q", "a": "a"}] * 4 + [{"q": "no answer"}] + [{"q": "q", "a": "a"}] * 4
        values = {
            "record_type": "chat",
            "tokenizer": chatml,
            "formatting": f"{__name__}:to_messages",
            "eval_fraction": 0.1,
        }
        loader = train_loader(jsonl(tmp_path, records, **values), spec(64))
        with pytest.raises(ConfigError, match=r"records.jsonl.*data.formatting raised KeyError: 'a'"):
            next(loader)
        loader.close()
        loader = train_loader(jsonl(tmp_path, records, on_error=OnError["skip"], **values), spec(64))
        next(loader)
        assert loader.metrics()["data/skipped"] >= 1
        loader.close()

    @pytest.mark.parametrize("path", ["nowhere:f", f"{__name__}:nothing"])
    def test_a_missing_function(self, tmp_path: Path, path: str) -> None:
        with pytest.raises(ConfigError, match=r"data\.formatting"):
            next(train_loader(jsonl(tmp_path, [{"text": "x"}] * 9, formatting=path), spec(8)))
