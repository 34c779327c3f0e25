"""Completions follow their grammar in every batch, and other requests of the batch are not affected."""

import json
import re

import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.grammar import GrammarError, json_grammar, lark_grammar, regex_grammar
from maxhydra.decode.openai_server import Limits
from maxhydra.decode.request import Completion, RequestRejectedError
from maxhydra.decode.sampling_params import PromptEncoder
from tests.decode.test_engine import make_request, shared_programs, start
from tests.decode.test_openai_server import HELLO, LIMITS, TEMPLATE, RunningServer
from tests.support.json_schemas import random_schema
from tests.support.skips import import_optional

pytest.importorskip("llguidance", reason="needs the extra serve")
jsonschema = import_optional("jsonschema", extra="test")
__all__ = ["shared_programs"]
# More than the model is trained for, so that a random model has space to complete its JSON.
LONG = {"max_context": 1500, "cache_tokens": 8 * 1500}


@pytest.fixture(scope="module")
def engine():
    engine = start(**LONG)
    yield engine
    engine.close()


def complete(engine: Engine, grammars: list[str], **changes) -> list[Completion]:
    sampled = {"temperature": 1.0, "max_tokens": 1400, **changes}
    requests = [make_request("x", grammar=each, seed=n, **sampled) for n, each in enumerate(grammars)]
    return [handle.result() for handle in engine.submit_all(requests)]


def check_schemas(engine: Engine, seeds: range) -> None:
    schemas = [random_schema(seed) for seed in seeds]
    for schema, completion in zip(schemas, complete(engine, [json_grammar(each) for each in schemas]), strict=True):
        assert completion.finish == "stop", completion
        jsonschema.validate(json.loads(completion.text), schema)


@pytest.mark.slow
def test_completions_validate_with_their_schemas(engine):
    check_schemas(engine, range(8))


@pytest.mark.exhaustive
def test_more_completions_validate_with_their_schemas(engine):
    """bench/structured_output.py checks a thousand."""
    check_schemas(engine, range(8, 56))


def test_regular_expressions_grammars_and_free_text_share_a_batch(engine):
    pattern, lark = r"([0-9]{3}-){2}[a-f]+!", 'start: "<" inner ">"\ninner: /[xy]{1,3}/ | "(" inner ")"'
    free = make_request("free", max_tokens=20, ignore_eos=True)
    alone = engine.submit(free).result()
    handle = engine.submit(free)
    first, second, third = complete(engine, [regex_grammar(pattern), lark_grammar(lark), regex_grammar(pattern)])
    assert handle.result() == alone
    assert re.fullmatch(pattern, first.text) and re.fullmatch(pattern, third.text) and first.text != third.text
    assert re.fullmatch(r"<\(*[xy]{1,3}\)*>", second.text) and second.text.count("(") == second.text.count(")")
    assert complete(engine, [regex_grammar(pattern)])[0] == first


@pytest.mark.slow
def test_a_grammar_is_followed_by_multi_step_engines_and_prefill_devices():
    grammars = [regex_grammar("[ab]{5}c"), "", json_grammar({"enum": ["one", "two"]})]
    for sizes in ({"burst": 4}, {"axes": {"data": 1}, "prefill_axes": {"data": 1}}):
        engine = start(**sizes)
        first, _, last = complete(engine, grammars, max_tokens=30)
        engine.close()
        assert re.fullmatch("[ab]{5}c", first.text) and json.loads(last.text) in ("one", "two")


def test_a_grammar_that_cannot_be_compiled_is_rejected_with_the_reason(engine):
    for grammar, reason in (
        (json_grammar({"type": "foo"}), "Invalid type: foo"),
        (regex_grammar("(a"), "unclosed group"),
        (lark_grammar("start: missing"), "unknown name"),
    ):
        with pytest.raises(GrammarError, match=reason):
            engine.submit(make_request("a", grammar=grammar))
    with pytest.raises(RequestRejectedError, match="ignore_eos"):
        engine.submit(make_request("a", grammar=regex_grammar("a"), ignore_eos=True))
    assert complete(engine, [regex_grammar("ab")])[0].text == "ab"


def test_token_bytes_join_to_the_text():
    tokenizer = ByteTokenizer()
    assert b"".join(map(tokenizer.token_bytes, [*tokenizer.encode("aü"), tokenizer.eos])) == "aü".encode()


@pytest.mark.slow
def test_the_server_compiles_response_formats_of_the_openai_client(tmp_path):
    openai = import_optional("openai", extra="test")
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    data = compose([f"data.tokenizer.chat_template={tmp_path / 't.jinja'}"]).config.data
    engine = start(**LONG)
    engine.max_context = 1500
    server = RunningServer(
        engine, PromptEncoder(data, vocab_size=264), key=None, max_sequences=9, limits=Limits(**LIMITS)
    )
    try:
        make = server.client().chat.completions.create
        schema = random_schema(3)
        plain = {"model": "tiny", "messages": HELLO, "temperature": 1.0, "max_tokens": 1200, "seed": 1}
        wrapped = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        done = make(**plain, n=2, response_format=wrapped)
        for choice in done.choices:
            assert choice.finish_reason == "stop"
            jsonschema.validate(json.loads(choice.message.content), schema)
        streamed = make(**plain, response_format=wrapped, stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in streamed) == done.choices[0].message.content
        for extra, pattern in (
            ({"guided_regex": "[ab]{4}"}, "[ab]{4}"),
            ({"structured_outputs": {"choice": ["yes.", "no!"]}}, "yes\\.|no!"),
            ({"guided_grammar": 'start: "x" start | "y"'}, "x*y"),
        ):
            assert re.fullmatch(pattern, make(**plain, extra_body=extra).choices[0].message.content)
        with pytest.raises(openai.BadRequestError, match="Invalid type: foo") as raised:
            make(**plain, extra_body={"guided_json": {"type": "foo"}})
        assert raised.value.param == "response_format"
        assert server.post({**plain, "response_format": {"type": "text"}})[0] == 200
    finally:
        server.end()
