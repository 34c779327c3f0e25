"""Completions follow their grammar in every batch, and other requests of the batch are not affected."""

import dataclasses
import json
import re

import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode.engine import Engine
from maxhydra.decode.grammar import (
    Constraint,
    GrammarCompiler,
    GrammarError,
    _Vocabulary,
    json_grammar,
    lark_grammar,
    regex_grammar,
)
from maxhydra.decode.request import Completion, RequestRejectedError
from maxhydra.decode.sampling_params import PromptEncoder
from tests.decode.test_engine import CONTEXT, EOS, logits_without_cache, make_request, shared_programs, start
from tests.decode.test_openai_server import HELLO, TEMPLATE
from tests.support.json_schemas import random_schema
from tests.support.polling import wait_for
from tests.support.running_server import RunningServer
from tests.support.skips import import_optional

llguidance = pytest.importorskip("llguidance", reason="needs the extra serve")
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


@pytest.mark.slow
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


@pytest.mark.exhaustive
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


def most_likely_allowed(grammar: str, max_tokens: int) -> list[int]:
    """The oracle: for every token, a full forward pass, and a matcher that has only this sequence."""
    vocabulary = llguidance.TokenizerWrapper(_Vocabulary(ByteTokenizer(), EOS, 264))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(vocabulary, eos_token=EOS), grammar)
    ids = [ord("x")]
    while len(ids) <= max_tokens:
        row = np.zeros((1, CONTEXT), np.int32)
        row[0, : len(ids)] = ids
        is_allowed = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[:264] > 0
        ids.append(int(np.argmax(np.where(is_allowed, logits_without_cache()(row)[len(ids) - 1], -np.inf))))
        assert matcher.consume_token(ids[-1])
        if ids[-1] == EOS:
            break
    return ids[1:]


@pytest.mark.slow
def test_a_greedy_completion_has_the_most_likely_tokens_that_the_grammar_allows(engine):
    grammars = [
        regex_grammar("[a-p]{3,9}[q-z]*"),
        json_grammar(random_schema(1)),
        regex_grammar("[0-9]+(,[a-f]{2,4})*"),
    ]
    completions = complete(engine, [*grammars, ""], temperature=0.0, max_tokens=24)
    for grammar, completion in zip(grammars, completions, strict=False):
        assert list(completion.tokens) == most_likely_allowed(grammar, 24)


@pytest.mark.exhaustive
def test_deltas_are_in_order_and_end_at_a_stop_string_eos_or_the_maximum(engine):
    """Tokens are emitted while later ones are computed; those sampled after the end are dropped."""
    grammar, sampled = regex_grammar("([ab]{7}c){1,3}"), {"temperature": 1.0}
    whole = complete(engine, [grammar], **sampled)[0]
    assert whole.finish == "stop" and whole.tokens[-1] == EOS
    free = make_request("free", max_tokens=30, ignore_eos=True)
    ends = {"stop": {"stop": (whole.text[2:5],)}, "length": {"max_tokens": 5}, "": {"max_tokens": 40, "logprobs": 2}}
    requests = [make_request("x", grammar=grammar, **{"max_tokens": 40, **sampled, **each}) for each in ends.values()]
    requests.append(dataclasses.replace(requests[-1], stream=False))
    deltas = [list(handle) for handle in engine.submit_all([*requests, free])]
    stopped, full, streamed, silent, other = map(Completion.from_deltas, deltas)
    assert (stopped.text, stopped.tokens, stopped.finish) == (whole.text[:2], whole.tokens[:5], "stop")
    assert (full.text, full.tokens, full.finish) == (whole.text[:5], whole.tokens[:5], "length")
    assert streamed == silent and streamed.tokens == whole.tokens and len(deltas[3]) == 1
    assert [each.token for each in streamed.logprobs] == list(whole.tokens)
    assert other == engine.submit(free).result()


@pytest.mark.slow
def test_a_sequence_that_is_cancelled_or_cannot_follow_its_grammar_leaves_the_others(engine):
    # More rules in one place than llguidance's parser may have, after the first token.
    rules = [f"a{n}" for n in range(2100)]
    broken = "start: " + " | ".join(rules) + "".join(f'\n{name}: "y" b{name}\nb{name}: "{name}"' for name in rules)
    endless, other = regex_grammar("a*"), regex_grammar("[ab]{40}c")
    alone = complete(engine, [other])[0]
    requests = [make_request("x", grammar=each, max_tokens=900) for each in (endless, lark_grammar(broken))]
    cancelled, failed = engine.submit_all(requests)
    handle = engine.submit(make_request("x", grammar=other, temperature=1.0, max_tokens=1400, seed=0))
    next(iter(cancelled))
    cancelled.cancel()
    first, *_, last = list(failed)
    assert first.text == "y" and last.finish == "error" and "grammar cannot be followed" in last.error
    assert cancelled.result().finish == "cancelled" and handle.result() == alone
    wait_for(lambda: engine.stats()["running"] == 0)
    assert engine.stats()["pages_used"] == 0


def test_concurrent_sequences_have_separate_lexers():
    def start_grammars(threads: int) -> GrammarCompiler:
        return GrammarCompiler(ByteTokenizer(), eos=(EOS,), vocab_size=300, threads=threads)

    grammar, one, several = json_grammar(random_schema(2)), start_grammars(1), start_grammars(2)
    alone, concurrently = ([each.constrain(grammar) for _ in range(4)] for each in (one, several))
    assert [each.lexer for each in alone] == [0] * 4 and [each.lexer for each in concurrently] == [0, 1, 2, 3]
    del concurrently[1]
    concurrently.insert(1, several.constrain(grammar))
    assert concurrently[1].lexer == 1, "the lexer of a sequence that has ended is used again"
    rng = np.random.default_rng(0)
    for _ in range(40):
        masks_BW, expected_BW = several.masks([*concurrently, None]), one.masks([None, *alone])
        np.testing.assert_array_equal(masks_BW[:4], expected_BW[1:])
        assert (masks_BW[4] == 2**32 - 1).all() and (expected_BW[0] == 2**32 - 1).all()
        is_allowed_BV = np.unpackbits(masks_BW[:4].view(np.uint8), axis=1, bitorder="little")
        assert not is_allowed_BV[:, 264:].any(), "the tokenizer does not have these tokens"
        tokens = [[int(rng.choice(np.flatnonzero(row)))] for row in is_allowed_BV]
        one.advance([None, *alone], [[], *tokens])
        several.advance([*concurrently, None], [*tokens, []])
    assert not any(each.error for each in (*alone, *concurrently))


class WordTokenizer(ByteTokenizer):
    """Bytes and a few pieces: a text has several tokenizations, and the canonical one has the longest pieces."""

    pieces = ("name", "na", "me", "address", "add", '":', ' "', '{"', "fix", "ed", "fixed", "true", "blue")
    vocab_size = ByteTokenizer.vocab_size + len(pieces)

    def token_bytes(self, id: int) -> bytes:
        number = id - ByteTokenizer.vocab_size
        return self.pieces[number].encode() if number >= 0 else super().token_bytes(id)

    def encode(self, text: str) -> list[int]:
        pieces = re.findall(
            "|".join(sorted(map(re.escape, self.pieces), key=len, reverse=True)) + "|.", text, re.DOTALL
        )
        ids = {piece: ByteTokenizer.vocab_size + number for number, piece in enumerate(self.pieces)}
        return [id for piece in pieces for id in ([ids[piece]] if piece in ids else piece.encode())]


@pytest.mark.slow
@pytest.mark.default_cases("WordTokenizer")
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WordTokenizer()], ids=lambda each: type(each).__name__)
def test_verification_accepts_just_the_tokens_of_the_mask(tokenizer: ByteTokenizer) -> None:
    """Of a text that the grammar forces, masks have the canonical tokenization only."""
    compiler = GrammarCompiler(tokenizer, eos=(EOS,), vocab_size=300, threads=1)
    forced = {"type": "object", "properties": {"address": {"const": "fixed"}, "name": {"type": "null"}}}
    rng, num_forced, required = np.random.default_rng(0), 0, {"required": ["address", "name"]}
    for schema in ({**forced, **required, "additionalProperties": False}, *map(random_schema, range(6))):
        constraint = compiler.constrain(json_grammar(schema))
        for _ in range(50):
            mask_W = compiler.masks([constraint])[0]
            allowed = np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little"))
            num_forced += len(allowed) == 1
            for token in range(tokenizer.vocab_size):
                copy = Constraint(constraint.matcher.deep_copy(), 0, mask_W)
                verification = copy.verify([token], 0, (EOS,))
                assert verification.num_accepted == (token in allowed) != verification.is_rejected, token
            if (token := int(rng.choice(allowed))) == EOS:
                break
            compiler.advance([constraint], [[token]])
    assert num_forced > 20


def test_token_bytes_join_to_the_text():
    tokenizer = ByteTokenizer()
    assert b"".join(map(tokenizer.token_bytes, [*tokenizer.encode("aü"), tokenizer.eos])) == "aü".encode()


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [0, 1])
def test_the_server_compiles_response_formats_of_the_openai_client(tmp_path, processes):
    openai = import_optional("openai", extra="test")
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    data = compose([f"data.tokenizer.chat_template={tmp_path / 't.jinja'}"]).config.data
    engine = start(**LONG)
    engine.max_context = 1500
    server = RunningServer(engine, PromptEncoder(data, vocab_size=264), processes=processes, max_sequences=9)
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
