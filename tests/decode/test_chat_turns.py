"""Tool calls and reasoning of every format, as OpenAI's client reads them, complete and streamed."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.data.turn_parser import TurnParser
from maxhydra.decode.detokenize import Detokenizer
from maxhydra.decode.request import Delta, Handle, Request
from maxhydra.decode.sampling_params import PromptEncoder
from tests.decode.test_openai_server import HELLO
from tests.support.running_server import RunningServer
from tests.support.skips import import_optional

openai = import_optional("openai", extra="test")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": PARAMETERS}}
    for name in ("weather", "time")
]
CALLS = [("weather", {"city": "Köln"}), ("time", {"city": "Rom"})]
FIRST, SECOND = (json.dumps(arguments, ensure_ascii=False) for _, arguments in CALLS)
# Turns as the models write them: reasoning where the format has it, then two calls (one in harmony).
TURNS = {
    "llama3": ("", f'{{"name": "weather", "parameters": {FIRST}}}; {{"name": "time", "parameters": {SECOND}}}'),
    "qwen3": (
        "<think>\nWhich city?\n</think>\n\n",
        f'<tool_call>\n{{"name": "weather", "arguments": {FIRST}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "time", "arguments": {SECOND}}}\n</tool_call>',
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant",
        f" to=functions.weather<|channel|>commentary json<|message|>{FIRST}",
    ),
    "deepseek3": (
        "<think>Which city?</think>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{FIRST}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n"
        f"```json\n{SECOND}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "mistral": (
        "[THINK]Which city?[/THINK]",
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {FIRST}}}, {{"name": "time", "arguments": {SECOND}}}]',
    ),
}
ANSWERS = {
    "gpt-oss": "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is <b> 5.",
    "llama3": "It is <b> 5.",
}


class ScriptedEngine:
    """Completes every prompt with one text, a few characters per delta."""

    max_context = 4096

    def __init__(self) -> None:
        self.text, self.size = "", 3
        self.requests: list[Request] = []
        self.server: RunningServer

    def submit(self, request: Request) -> Handle:
        self.requests.append(request)
        handle, size = Handle(), self.size if request.stream else len(self.text)
        pieces = [self.text[at : at + size] for at in range(0, len(self.text), size)]
        for number, piece in enumerate(pieces):
            handle.put(Delta(piece, (1,), finish="stop" if number == len(pieces) - 1 else None))
        return handle

    def add_flush(self, flush: Any) -> None:
        """All deltas are queued before anyone listens."""

    def stats(self) -> dict[str, float]:
        return {"running": 0, "waiting": 0}

    def close(self) -> None:
        pass


@contextlib.contextmanager
def running(template: str) -> Iterator[tuple[ScriptedEngine, Any]]:
    data = compose([f"data.tokenizer.chat_template={template}"]).config.data
    engine = ScriptedEngine()
    server = RunningServer(
        engine,
        PromptEncoder(data, vocab_size=320),
        max_sequences=20,
    )
    try:
        engine.server = server
        yield engine, server.client().chat.completions.create
    finally:
        server.end()


def collect(stream: Any) -> dict[str, Any]:
    """Join the deltas of a stream as clients do."""
    joined: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    for chunk in stream:
        (choice,) = chunk.choices
        joined["content"] += choice.delta.content or ""
        joined["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
        joined["finish"] = choice.finish_reason or joined["finish"]
        for call in choice.delta.tool_calls or []:
            known = joined["calls"].setdefault(call.index, ["", ""])
            known[0] += call.function.name or ""
            known[1] += call.function.arguments or ""
            assert call.id and call.type == "function"
    return joined


@pytest.mark.parametrize("template", TURNS)
def test_tool_calls_and_reasoning(template: str) -> None:
    reasoning, calls = TURNS[template]
    expected = CALLS[:1] if template == "gpt-oss" else CALLS
    with running(template) as (engine, make):
        engine.text = reasoning + calls
        settings: Any = {"model": "tiny", "messages": HELLO, "tools": TOOLS}
        choice = make(**settings).choices[0]
        assert engine.requests[-1].names_special and choice.finish_reason == "tool_calls"
        made = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert made == expected and len({call.id for call in choice.message.tool_calls}) == len(expected)
        assert choice.message.content is None
        assert getattr(choice.message, "reasoning_content", "") == ("Which city?" if reasoning else "")
        for engine.size in (1, 4, 1000):
            joined = collect(make(**settings, stream=True))
            assert [(name, json.loads(text)) for name, text in joined["calls"].values()] == expected
            assert joined["reasoning"] == ("Which city?" if reasoning else "") and not joined["content"].strip()
            assert joined["finish"] == "tool_calls"
        single = make(**settings, parallel_tool_calls=False).choices[0].message
        assert [call.function.name for call in single.tool_calls] == ["weather"]
        # The calls and their results go back to the model.
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": FIRST}}
        turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        turns += [{"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"}]
        make(**{**settings, "messages": [*HELLO, *turns]})
        prompt = bytes(token for token in engine.requests[-1].prompt if token < 256).decode()
        assert "rain" in prompt and "Köln" in prompt and "weather" in prompt


@pytest.mark.parametrize("template", ANSWERS)
def test_an_answer_without_calls(template: str) -> None:
    with running(template) as (engine, make):
        engine.text = ANSWERS[template]
        for settings in ({"tools": TOOLS}, {}):
            message = make(model="tiny", messages=HELLO, **settings).choices[0].message
            assert message.content == "It is <b> 5." and not message.tool_calls
            joined = collect(make(model="tiny", messages=HELLO, stream=True, **settings))
            assert joined["content"] == "It is <b> 5." and joined["finish"] == "stop"
            assert joined["reasoning"] == ("Easy." if template == "gpt-oss" else "")
        # A JSON answer, and calls that cannot be parsed, are content.
        for engine.text in ('{"answer": 5}',) if template == "llama3" else ():
            assert make(model="tiny", messages=HELLO, tools=TOOLS).choices[0].message.content == engine.text


def test_required_calls_come_from_a_grammar() -> None:
    pytest.importorskip("llguidance", reason="needs the extra serve")
    with running("qwen3") as (engine, make):
        engine.text = json.dumps([{"name": name, "arguments": arguments} for name, arguments in CALLS])
        done = make(model="tiny", messages=HELLO, tools=TOOLS, tool_choice="required")
        assert [call.function.name for call in done.choices[0].message.tool_calls] == ["weather", "time"]
        assert "weather" in engine.requests[-1].grammar and done.choices[0].finish_reason == "tool_calls"
        named = {"type": "function", "function": {"name": "time"}}
        make(model="tiny", messages=HELLO, tools=TOOLS, tool_choice=named)
        assert "weather" not in engine.requests[-1].grammar and '"maxItems"' in engine.requests[-1].grammar
        for choice in ({"type": "function", "function": {"name": "none"}}, "always"):
            with pytest.raises(openai.BadRequestError, match="accepted"):
                make(model="tiny", messages=HELLO, tools=TOOLS, tool_choice=choice)
        make(model="tiny", messages=HELLO, tools=TOOLS, tool_choice="none")
        assert b"weather" not in bytes(token for token in engine.requests[-1].prompt if token < 256)


def test_a_prompt_that_opens_reasoning() -> None:
    parser = TurnParser("hermes", has_tools=False, prompt_end="<|im_start|>assistant\n<think>\n")
    pieces = [piece for text in ("a <", "/thi", "nk>\n\n", "b <think", "> c") for piece in parser.add(text)]
    pieces += parser.add("", is_last=True)
    joined = {kind: "".join(text for each, text, _ in pieces if each == kind) for kind in ("reasoning", "content")}
    assert joined == {"reasoning": "a", "content": "b <think> c"}


def test_names_of_special_tokens_are_part_of_the_text() -> None:
    tokens = [*b"a\xc3", *b"\xbc", ByteTokenizer.pad, *b"b"]
    for size in (1, 2, 5):
        detokenizer = Detokenizer(ByteTokenizer(), [1, 2], names_special=True)
        parts = [detokenizer.add(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        assert "".join(parts) + detokenizer.flush() == "aü<|pad|>b"


@pytest.mark.slow
def test_responses_with_text_and_function_calls() -> None:
    with running("qwen3") as (engine, _):
        make = engine.server.client().responses.create
        engine.text = "It is 5."
        done = make(model="tiny", input="hello", instructions="Be brief.", max_output_tokens=30)
        assert done.output_text == "It is 5." and done.status == "completed" and done.usage.output_tokens == 1
        prompt = bytes(token for token in engine.requests[-1].prompt if token < 256).decode()
        assert "Be brief." in prompt and "hello" in prompt and engine.requests[-1].max_tokens == 30
        engine.text = "".join(TURNS["qwen3"])
        tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        done = make(model="tiny", input=[{"role": "user", "content": "hello"}], tools=tools)
        calls = [item for item in done.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS
        again = [{"role": "user", "content": "hello"}, calls[0].model_dump(exclude={"status", "id"})]
        again += [{"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"}]
        make(model="tiny", input=again, tools=tools)
        assert "rain" in bytes(token for token in engine.requests[-1].prompt if token < 256).decode()
        for change, param in (
            ({"background": True}, "background"),
            ({"input": []}, "input"),
            ({"previous_response_id": "a"}, "previous_response_id"),
        ):
            status, body = engine.server.post({"model": "tiny", "input": "a", **change}, "/v1/responses")
            assert status == 400 and body["error"]["param"] == param
