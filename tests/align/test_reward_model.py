"""Reward models against transformers' sequence classifier and TRL's RewardTrainer formula: values and gradients."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra import model
from maxhydra.align.reward_model import completion_row, reward_loss
from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.model import Head
from maxhydra.config.schema.tasks.reward_model import RewardLoss, RewardModelTask
from maxhydra.convert.hf_write import find_family, write_hf
from maxhydra.convert.load import load_weights
from maxhydra.convert.streaming import InMemoryArrays
from maxhydra.model import ModelDef, merge_trees, parameter_counts, split_trainable
from maxhydra.sharding import Sharder
from maxhydra.train.loss import SequenceScorer
from tests.model.test_lora import lora
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")
pytestmark = pytest.mark.parity

B, S, VOCABULARY, WIDTH = 3, 9, 40, 16
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(1, VOCABULARY, (2 * B, S)).astype(np.int32)
LAST = np.array([3, 8, 5, 5, 7, 1], np.int32)
MARGIN = np.array([0.5, 0.0, 2.0], np.float32)
SIZES = {"num_hidden_layers": 2, "hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2}
SETTINGS = {**SIZES, "num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
FLOAT32 = "model.dtypes.compute=float32"


def torch_classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SETTINGS, num_labels=1, pad_token_id=0)
    return transformers.LlamaForSequenceClassification(config).float().eval()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("classifier")
    net = torch_classifier()
    net.save_pretrained(folder)
    return net, folder


def load(folder: Path, *overrides: str) -> tuple[ModelDef, Any]:
    decoder = model.build(compose(["task=inspect", "model=from_hf", f"model.path={folder}", *overrides]).config.model)
    return decoder, load_weights(str(folder), decoder, shardings=None, dtype="float32")


def pair_batch() -> dict[str, jax.Array]:
    batch: dict[str, jax.Array] = {"margin": jnp.asarray(MARGIN)}
    for role, rows in (("chosen", slice(0, B)), ("rejected", slice(B, None))):
        batch |= {f"{role}_tokens": jnp.asarray(TOKENS[rows]), f"{role}_last": jnp.asarray(LAST[rows])}
        batch[f"{role}_positions"] = jnp.tile(jnp.arange(S), (B, 1))
    return batch


def torch_scores(net: Any) -> Any:
    """The logits at the last token; transformers finds it by the padding token."""
    padded = np.where(np.arange(S) <= LAST[:, None], TOKENS, 0)
    return net(input_ids=torch.tensor(padded).long(), attention_mask=torch.tensor(padded != 0).long()).logits[:, 0]


@pytest.mark.slow
def test_scores_loss_and_gradients_equal_those_of_transformers_and_trl(classifier: tuple[Any, Path]) -> None:
    net, folder = classifier
    decoder, weights = load(folder, FLOAT32)
    assert decoder.config.head is Head.score
    task = RewardModelTask(centering=0.01)
    loss_fn = reward_loss(SequenceScorer(decoder, Sharder.single()), task)
    batch = pair_batch()
    value, gradients = jax.jit(jax.value_and_grad(lambda w: loss_fn(w, batch, None)["loss"] / B))(weights)

    scores = torch_scores(net)
    chosen, rejected = scores[:B], scores[B:]
    # TRL 1.x, RewardTrainer.compute_loss
    loss = -torch.nn.functional.logsigmoid(chosen - rejected - torch.tensor(MARGIN)).mean()
    loss = loss + 0.01 * torch.mean((chosen + rejected) ** 2)
    net.zero_grad()
    loss.backward()
    assert float(value) == pytest.approx(loss.item(), abs=1e-5)
    np.testing.assert_allclose(gradients["score"]["kernel"], net.score.weight.grad[0], atol=1e-5)
    query = net.model.layers[0].self_attn.q_proj.weight.grad.T.reshape(WIDTH, 2, WIDTH // 2)
    np.testing.assert_allclose(gradients["pattern"]["0"]["attention"]["query"]["kernel"][0], query, atol=1e-5)
    metrics = loss_fn(weights, batch, None)
    np.testing.assert_allclose(metrics["reward_margin"], (chosen - rejected).sum().item(), atol=1e-5)
    assert metrics["accuracy"] == (chosen > rejected).sum().item() and metrics["weight"] == B


@pytest.mark.slow
def test_regression_is_the_mean_squared_error_without_padding_rows(classifier: tuple[Any, Path]) -> None:
    net, folder = classifier
    decoder, weights = load(folder, FLOAT32)
    expected = RNG.normal(size=2 * B).astype(np.float32)
    batch = {
        "tokens": jnp.asarray(np.concatenate([TOKENS, np.zeros((1, S), np.int32)])),
        "positions": jnp.tile(jnp.arange(S), (2 * B + 1, 1)),
        "last": jnp.asarray([*LAST, 0]),
        "score": jnp.asarray([*expected, 5.0]),
    }
    task = RewardModelTask(loss=RewardLoss.regression)
    sums = reward_loss(SequenceScorer(decoder, Sharder.single()), task)(weights, batch, None)
    reference = torch.nn.functional.mse_loss(torch_scores(net), torch.tensor(expected))
    assert float(sums["loss"] / sums["weight"]) == pytest.approx(reference.item(), abs=1e-5)


@pytest.mark.slow
def test_an_exported_reward_model_is_a_sequence_classifier(classifier: tuple[Any, Path], tmp_path: Path) -> None:
    net, folder = classifier
    decoder, weights = load(folder)
    arrays = InMemoryArrays(weights)
    table = find_family(decoder, None)
    write_hf(tmp_path, decoder, arrays, table=table, dtype=np.dtype("float32"), extra={"pad_token_id": 0})
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForSequenceClassification"]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.num_labels == 1
    torch.testing.assert_close(torch_scores(loaded.eval()), torch_scores(net))


def test_two_labels_are_rejected(classifier: tuple[Any, Path], tmp_path: Path) -> None:
    settings = json.loads((classifier[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "id2label": {"0": "bad", "1": "good"}}))
    with pytest.raises(ConfigError, match="2 labels"):
        compose(["task=inspect", "model=from_hf", f"model.path={tmp_path}"])


@pytest.mark.slow
@pytest.mark.default_cases("True")
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_language_model_becomes_a_reward_model_with_a_head_of_zeros(is_tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SETTINGS, tie_word_embeddings=is_tied)).float()
    net.save_pretrained(tmp_path)
    _, language_model = load(tmp_path, "task=pretrain")
    decoder, weights = load(tmp_path, "model.head=score")
    assert set(weights) == set(decoder.shapes) and not weights["score"]["kernel"].any()
    del weights["score"]
    language_model.pop("head", None)
    jax.tree.map(np.testing.assert_array_equal, weights, language_model)


@pytest.mark.slow
def test_an_adapter_trains_the_score_head_too(classifier: tuple[Any, Path]) -> None:
    decoder, weights = load(classifier[1])
    adapted = model.build(decoder.config, lora())
    trained, frozen = split_trainable(jax.jit(adapted.init)(jax.random.key(0)))
    assert "score" in trained and "score" not in frozen
    # The base's own head is where training starts.
    merged = merge_trees(weights, trained)
    np.testing.assert_array_equal(merged["score"]["kernel"], weights["score"]["kernel"])
    count, num_trained = parameter_counts(adapted)
    assert count - num_trained == parameter_counts(decoder)[0] - WIDTH


def test_the_score_is_that_of_the_last_token_with_loss() -> None:
    """A template may write a line break after the end of the turn, which a sampled completion does not have."""
    row = {"tokens": np.array([5, 6, 7, 8]), "targets": np.array([6, 7, 8, 9]), "weights": np.array([0, 1.0, 1.0, 0])}
    sequence = completion_row(row)
    assert sequence["last"] == 3 and sequence["tokens"].tolist() == [5, 6, 7, 8, 0]
    padding = completion_row({name: np.zeros(4) for name in row})
    assert padding["last"] == 0
