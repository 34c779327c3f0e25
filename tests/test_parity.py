"""Logits and gradients against the transformers models of the same weights, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import model as config
from maxhydra.convert.fill import fill, on_first_device
from maxhydra.convert.source import Source
from maxhydra.convert.tables.llama import TABLE
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder

torch = pytest.importorskip("torch", reason="needs the parity extra")
transformers = pytest.importorskip("transformers", reason="needs the parity extra")

pytestmark = pytest.mark.parity

LAYERS, EMB, MLP, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LENGTH, PADDING = 3, 48, 80, 6, 2, 8, 97, 300, 70
STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def their_model(kind: str, *, tied: bool = False, window: int | None = None):
    sizes = {
        "hidden_size": EMB,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }
    shared = {**sizes, "num_hidden_layers": LAYERS, "head_dim": HEAD_DIM, "vocab_size": VOCAB, "rms_norm_eps": 1e-5}
    shared |= {"max_position_embeddings": 512, "attention_dropout": 0.0, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    if kind == "mistral":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        settings = transformers.MistralConfig(**shared, sliding_window=window, rope_parameters=rope)
    elif kind == "llama3.1":
        rope = {"rope_type": "llama3", "rope_theta": 500.0, "original_max_position_embeddings": 64, **STRETCH}
        settings = transformers.LlamaConfig(**shared, rope_parameters=rope)
    else:
        settings = transformers.LlamaConfig(**shared, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    settings._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(settings).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(1.0 if weight.ndim == 1 else 0.0, 0.1 if weight.ndim == 1 else 0.15)
    return model


def our_model(kind: str, *, tied: bool = False, window: int | None = None) -> ModelDef:
    rope = config.Rope()
    if kind == "llama3.1":
        rope = config.Rope(kind=config.RopeKind.llama3, theta=500.0, original_context=64, **STRETCH)
    layer = config.Kind(attention=config.Attention(window=window, rope=rope))
    sizes = {"num_layers": LAYERS, "emb_dim": EMB, "mlp_dim": MLP, "num_heads": HEADS, "num_kv_heads": KV_HEADS}
    return build(
        config.Model(
            **sizes,
            head_dim=HEAD_DIM,
            vocab_size=VOCAB,
            context_length=512,
            kinds={"layer": layer},
            head=config.Head.tied if tied else config.Head.separate,
            dtypes=config.Dtypes(compute=config.Dtype.float32),
        )
    )


def to_ours(theirs: dict[str, np.ndarray], model: ModelDef) -> dict:
    """Their weights, or gradients of them, as our tree."""
    shapes = {name: array.shape for name, array in theirs.items()}
    source = Source("", "theirs", TABLE, model=model.config, shapes=shapes, read=theirs.__getitem__)
    return fill(source, model, shardings=on_first_device(model), dtype="float32")


CASES = {
    "llama": {"kind": "llama"},
    "llama-tied": {"kind": "llama", "tied": True},
    "llama3.1": {"kind": "llama3.1"},
    "mistral": {"kind": "mistral", "window": 23},
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_those_of_transformers(case):
    """Two rows of 300 tokens, the second with 70 tokens of padding in front, which only a mask can hide."""
    options = CASES[case]
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
    is_real = np.ones((2, LENGTH), np.int32)
    is_real[1, :PADDING] = 0
    positions = np.maximum(np.cumsum(is_real, axis=1) - 1, 0)
    counts = (is_real[:, 1:] * is_real[:, :-1]).astype(np.float32)

    theirs = their_model(**options)
    out = theirs(
        input_ids=torch.tensor(ids), attention_mask=torch.tensor(is_real), position_ids=torch.tensor(positions)
    ).logits
    scores = torch.log_softmax(out[:, :-1], dim=-1).gather(-1, torch.tensor(ids[:, 1:, None]))[..., 0]
    their_loss = -(scores * torch.tensor(counts)).sum() / counts.sum()
    their_loss.backward()

    model = our_model(**options)
    params = to_ours({name: p.detach().numpy() for name, p in theirs.named_parameters()}, model)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda x: x.shape, model.shapes)

    @jax.jit
    def loss(params):
        sharder = Sharder.single()
        ctx = Context(
            positions=jnp.asarray(positions),
            segments=jnp.asarray(is_real),
            sharder=sharder,
            cache=None,
            dropout_key=None,
        )
        logits = model.logits(params, model.hidden(params, jnp.asarray(ids), ctx)[0], sharder)
        scores = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), ids[:, 1:, None], axis=-1)[..., 0]
        return -jnp.sum(scores * counts) / counts.sum(), logits

    (our_loss, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    difference = np.abs(np.asarray(logits) - out.detach().numpy())[is_real == 1]
    assert difference.max() < 2e-4
    np.testing.assert_allclose(our_loss, their_loss.item(), rtol=1e-5)
    expected = to_ours({name: p.grad.numpy() for name, p in theirs.named_parameters()}, model)
    for path, want in jax.tree_util.tree_leaves_with_path(expected):
        got = gradients
        for key in path:
            got = got[key.key]
        scale = np.abs(want).max()
        assert np.abs(got - want).max() < 1e-3 * scale, jax.tree_util.keystr(path)
