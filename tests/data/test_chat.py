"""Loss masks of conversations against those of transformers, and against token-by-token expectations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from maxhydra.config import ConfigError
from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.data.chat import ChatTemplate, ChatTemplateError, compile_chat_template, render_prompt
from maxhydra.data.record_types import Rejected
from maxhydra.data.rows import Document
from maxhydra.data.tokenizers import Tokenizer
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.data.tokenizers.hf import build
from tests.support.skips import import_optional
from tests.support.vocabularies import MARKS, family_folder, template, with_token

transformers = import_optional("transformers", extra="parity")

FAMILIES = sorted(MARKS)
# Whitespace that the family's template puts between the generation prompt and a response.
BLANK = {"mistral": " "}


def conversation(*contents: str, system: str | None = "Be brief.") -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return ([] if system is None else [{"role": "system", "content": system}]) + turns


CONVERSATIONS = {
    "three turns": conversation("To be?", "Or not to be.", "That is?", "The question.", "Whether?", "'Tis nobler."),
    "words of the template": conversation("user", "assistant", "assistant\n", "user", "model", "system\nassistant"),
    "same turns again": conversation("a", "a", "a", "a", "a", "a"),
    "nothing said": conversation("Say nothing.", "", "Again.", "", "And now?", "Something."),
    "blank edges": conversation("  hi\n", "\n\n answer \n", "\t", " x ", "y\n", "z\n\n\n"),
    "no ascii": conversation("🎭", "🎭日本語é", "naïve 🎭", "é", "🎭🎭", "—🎭"),
    "no system": conversation("Hi", "Hello.", system=None),
    "code": conversation("{{ bos_token }} {% if %}", "{% generation %} x {{ y }}", "a", "</ s>"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {family: family_folder(family, root / family, marked=True) for family in FAMILIES}


def load(folder: Path, source: str) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer = build(Config(kind="hf", path=str(folder)))
    return tokenizer, ChatTemplate(source, tokenizer)


def encode(template: ChatTemplate, messages: Any) -> Document:
    document = template.encode(messages)
    assert isinstance(document, Document), document
    return document


def reference(folder: Path, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Tokens and mask from transformers and the template's generation blocks."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # With trimmed offsets, which these files request, it would exclude whitespace in the assistant's text.
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    encoding = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    return encoding["input_ids"], encoding["assistant_masks"]


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
class TestMask:
    @pytest.mark.slow
    def test_is_that_of_transformers(self, folders: dict[str, Path], family: str, case: str) -> None:
        messages = CONVERSATIONS[case]
        tokens, mask = reference(folders[family], messages)
        assert sum(mask), "the reference mask must not be empty"
        for marked in (False, True):
            _, made = load(folders[family], template(family, marked=marked))
            document = encode(made, messages)
            assert document.tokens.tolist() == tokens
            assert document.weights is not None
            assert document.weights.tolist() == mask, f"marked={marked}"

    def test_is_the_responses_and_their_ends_token_by_token(
        self, folders: dict[str, Path], family: str, case: str
    ) -> None:
        """The loss covers exactly every response as tokenized alone, in its place."""
        messages = CONVERSATIONS[case]
        tokenizer, made = load(folders[family], template(family, marked=False))
        document = encode(made, messages)
        strips = family in ("llama3", "gemma")
        end = tokenizer.special_token_ids[MARKS[family][2]]
        expected = []
        for message in messages:
            if message["role"] == "assistant":
                content = message["content"].strip() if strips else message["content"]
                expected.append([*tokenizer.encode(BLANK.get(family, "") + content), end])
        assert document.weights is not None
        runs = np.flatnonzero(np.diff(np.concatenate([[0], document.weights, [0]]))).reshape(-1, 2)
        assert [document.tokens[start:stop].tolist() for start, stop in runs] == expected


def test_tokens_with_loss_decode_to_the_responses(folders: dict[str, Path]) -> None:
    tokenizer, made = load(folders["llama3"], template("llama3", marked=False))
    messages = CONVERSATIONS["three turns"]
    document = encode(made, messages)
    assert document.weights is not None
    trained = document.tokens[document.weights > 0]
    assert tokenizer.decode(trained.tolist()) == "".join(m["content"] for m in messages if m["role"] == "assistant")
    assert (trained == tokenizer.special_token_ids["<|eot_id|>"]).sum() == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_an_end_token_that_is_also_padding_has_loss(folders: dict[str, Path], family: str) -> None:
    tokenizer, made = load(folders[family], template(family, marked=False))
    document = encode(made, CONVERSATIONS["three turns"])
    assert tokenizer.pad == tokenizer.eos
    assert document.weights is not None
    trained = document.tokens[document.weights > 0]
    assert (trained == tokenizer.special_token_ids[MARKS[family][2]]).sum() == 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_of_a_special_token_is_rejected(folders: dict[str, Path], family: str, role: str) -> None:
    for marked in (False, True):
        tokenizer, made = load(folders[family], template(family, marked=marked))
        for mark in tokenizer.special_token_ids:
            messages = [dict(m, content=f"x{mark}y") if m["role"] == role else m for m in CONVERSATIONS["three turns"]]
            rejection = made.encode(messages)
            assert isinstance(rejection, Rejected)
            assert mark in rejection.reason
            with pytest.raises(ChatTemplateError, match="special token"):
                made.prompt(messages)


def test_a_token_across_a_boundary_counts_where_it_starts(tmp_path: Path) -> None:
    """A token that starts in the header has no loss; one that ends beyond the response has."""
    folder = with_token(with_token(family_folder("mistral", tmp_path / "m"), "T] yes"), "no!END")
    header, end = "{'user': '[', 'assistant': ' '}[m.role]", "{'user': 'NT]', 'assistant': 'END'}[m.role]"
    source = f"{{% for m in messages %}}{{{{ {header} + m.content + {end} }}}}{{% endfor %}}"
    tokenizer, made = load(folder, source)
    over_start, over_end = tokenizer.encode("T] yes")[-1], tokenizer.encode("no!END")[-1]
    document = encode(made, [*conversation("q", "yes", system=None), *conversation("q", "no!", system=None)])
    assert document.weights is not None
    weight = dict(zip(document.tokens.tolist(), document.weights.tolist(), strict=True))
    assert weight[over_start] == 0
    assert weight[over_end] == 1


class TestEnds:
    """Templates without special tokens, or with unusual ends, over bytes or a tokenizer with special tokens."""

    def loss_texts(self, source: str, messages: list[dict[str, str]], tokenizer: Tokenizer | None = None) -> list[str]:
        tokenizer = tokenizer or ByteTokenizer()
        rendered = ChatTemplate(source, tokenizer).render(messages)
        return [rendered.text[start:end] for start, end in rendered.turns]

    TWO = conversation("q", "one", "q", "two", system=None)

    def test_bytes_have_no_special_tokens_so_the_literal_end_counts(self) -> None:
        assert self.loss_texts(template("chatml", marked=False), self.TWO) == ["one<|im_end|>", "two<|im_end|>"]

    def test_a_blank_end_does_not_count(self) -> None:
        source = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}"
        assert self.loss_texts(source, self.TWO) == ["one", "two"]

    def test_the_next_header_does_not_count(self, folders: dict[str, Path]) -> None:
        tokenizer, _ = load(folders["chatml"], "")
        source = "{% for m in messages %}<|im_start|>{{ m.role + '\n' + m.content + '\n' }}{% endfor %}"
        assert self.loss_texts(source, self.TWO, tokenizer) == ["one", "two"]

    def test_an_end_only_where_the_conversation_ends(self) -> None:
        source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[end]"
        assert self.loss_texts(source, self.TWO) == ["one", "two[end]"]

    def test_a_blank_before_the_end_counts(self, folders: dict[str, Path]) -> None:
        tokenizer, _ = load(folders["mistral"], "")
        source = (
            "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}"
            "{% else %}[/INST] {{ m.content }} </s><s>{% endif %}{% endfor %}"
        )
        assert self.loss_texts(source, self.TWO, tokenizer) == ["one </s>", "two </s>"]

    def test_a_generation_prompt_without_a_header(self) -> None:
        source = (
            "{% for m in messages %}{{ m.content if m.role == 'user' else ' => ' + m.content + ';' }}{% endfor %}"
            "{% if add_generation_prompt %} =>{% endif %}"
        )
        assert self.loss_texts(source, self.TWO) == [" one;", " two;"]


class TestRejected:
    def reason(self, source: str, messages: Any) -> str:
        rejection = ChatTemplate(source, ByteTokenizer()).encode(messages)
        assert isinstance(rejection, Rejected), rejection
        return rejection.reason

    PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"

    @pytest.mark.parametrize(
        "content", ["m.content | upper", "m.content | replace('a', 'b')", "m.content + m.content", "'x'"]
    )
    def test_a_template_that_changes_contents(self, content: str) -> None:
        source = f"{{% for m in messages %}}{{{{ m.role }}}}:{{{{ {content} }}}};{{% endfor %}}"
        messages = conversation("abc", "bad", system=None)
        assert "{% generation %}" in self.reason(source, messages)
        marked = source.replace("{{ " + content, "{% generation %}{{ " + content).replace(
            "};{%", "}{% endgeneration %};{%"
        )
        assert isinstance(ChatTemplate(marked, ByteTokenizer()).encode(messages), Document)

    def test_a_template_that_looks_at_contents(self) -> None:
        source = (
            "{% for m in messages %}{{ m.role }}:"
            "{{ m.content[5:] if 'think' in m.content else m.content }};{% endfor %}"
        )
        assert isinstance(ChatTemplate(source, ByteTokenizer()).encode(conversation("a", "b")), Document)
        assert "changes the text of messages" in self.reason(source, conversation("a", "think b"))

    def test_a_conversation_that_the_template_rejects(self) -> None:
        assert "must take turns" in self.reason(template("gemma", marked=False), conversation("a", "b")[1:][::-1])

    @pytest.mark.parametrize(
        ("messages", "reason"),
        [
            ("text", "expected a list of messages, found str"),
            ([], "expected a list of messages, found nothing"),
            (None, "expected a list of messages, found nothing"),
            ([{"from": "human", "value": "x"}], "message 0 has no role: it is a mapping with from, value"),
            ([{"role": "user"}], "message 0 (user): expected text as content, found nothing"),
            ([{"role": "user", "content": 3}], "message 0 (user): expected text as content, found int"),
            (conversation("only a question"), "has no text of the assistant to train on"),
        ],
    )
    def test_invalid_conversations(self, messages: Any, reason: str) -> None:
        assert reason in self.reason(self.PLAIN, messages)

    def test_a_turn_with_more_than_text(self) -> None:
        call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
        assert "tool_calls" in self.reason(self.PLAIN, [*conversation("a"), call])
        named = [dict(message, name="n") for message in conversation("a")]
        document = ChatTemplate(self.PLAIN, ByteTokenizer()).encode([*named, {"role": "assistant", "content": "b"}])
        assert isinstance(document, Document)

    def test_keys_without_a_value_are_ignored(self) -> None:
        source = self.PLAIN.replace("{{ m.role }}", "{{ 'tools' if 'tool_calls' in m else m.role }}")
        made = ChatTemplate(source, ByteTokenizer())
        plain, filled = conversation("a", "b"), [dict(m, tool_calls=None) for m in conversation("a", "b")]
        np.testing.assert_array_equal(encode(made, filled).tokens, encode(made, plain).tokens)
        assert "expected text as content" in self.reason(source, [dict(m, content=None) for m in filled])

    def test_too_long(self) -> None:
        made = ChatTemplate(self.PLAIN, ByteTokenizer()).encode(conversation("a", "b" * 100), max_characters=50)
        assert isinstance(made, Rejected)
        assert "more than data.max_characters=50" in made.reason

    def test_no_code_runs(self) -> None:
        source = "{{ messages.__class__.__mro__ }}" + self.PLAIN
        assert "chat template raised" in self.reason(source, conversation("a", "b"))


class TestPrompt:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_is_that_of_transformers(self, folders: dict[str, Path], family: str) -> None:
        made = transformers.AutoTokenizer.from_pretrained(folders[family], local_files_only=True)
        tokenizer = build(Config(kind="hf", path=str(folders[family])))
        messages = CONVERSATIONS["three turns"][:-1]
        prompt = render_prompt(messages, tokenizer)
        assert prompt == made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert tokenizer.encode_with_special_tokens(prompt)[0].tolist() == made.encode(prompt, add_special_tokens=False)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_and_the_response_are_the_conversation(self, folders: dict[str, Path], family: str) -> None:
        """The loss covers the text after the prompt, and training tokens start with those of the prompt."""
        tokenizer, made = load(folders[family], template(family, marked=False))
        messages = CONVERSATIONS["three turns"]
        prompt = tokenizer.encode_with_special_tokens(made.prompt(messages[:-1]))[0]
        document = encode(made, messages)
        assert document.weights is not None
        np.testing.assert_array_equal(document.tokens[: len(prompt)], prompt)
        assert document.weights[len(prompt)] == 1
        assert document.weights[len(prompt) - 1] == 0

    def test_what_templates_may_call(self) -> None:
        source = (
            "{{ strftime_now('%Y-%m-%d') }} {{ {'é': '<'} | tojson }} "
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
        )
        made = ChatTemplate(source, ByteTokenizer())
        assert made.prompt(conversation("b", system="a")) == '2024-07-26 {"é": "<"} a'

    def test_no_template(self) -> None:
        with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
            compile_chat_template(ByteTokenizer())

    def test_an_invalid_template(self) -> None:
        with pytest.raises(ConfigError, match="line 2"):
            ChatTemplate("\n{% if %}", ByteTokenizer())
