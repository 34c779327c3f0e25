"""Multi-token prediction against equations 21 to 25 of DeepSeek-V3, for each document separately."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra import optim
from maxhydra.config.compose.composer import compose
from maxhydra.config.registry import task_schemas
from maxhydra.config.schema import model as config
from maxhydra.config.schema.metrics import LOGGED
from maxhydra.config.schema.run import Train
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build, flops_per_token, parameter_count
from maxhydra.sharding import Sharder
from maxhydra.train import next_token_loss
from maxhydra.train.path_rules import path_rules

SINGLE, WIDTH, VOCAB, LENGTH = Sharder.single(), 16, 23, 6
DEPTH, WEIGHT = 2, 0.4


def make_model(**changes) -> config.Model:
    sizes = {"num_layers": 2, "emb_dim": WIDTH, "mlp_dim": 24, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    fields = {**sizes, "vocab_size": VOCAB, "context_length": 64, "kinds": {"layer": config.Kind()}}
    fields["mtp"] = config.Mtp(depth=DEPTH, loss_weight=WEIGHT)
    return config.Model(**{**fields, "dtypes": config.Dtypes(compute=config.Dtype.float32), **changes})


def make_params(model: ModelDef):
    """Random weights, norm scales included."""
    leaves, structure = jax.tree.flatten(model.shapes)
    rng = np.random.default_rng(0)
    drawn = [jnp.asarray(rng.normal(size=leaf.shape) * 0.3 + (len(leaf.shape) < 2), jnp.float32) for leaf in leaves]
    return jax.tree.unflatten(structure, drawn)


def hidden(run: Callable, params, tokens) -> np.ndarray:
    """Of one document; `run` is a model's `hidden`."""
    positions = jnp.arange(len(tokens))[None]
    ctx = Context(positions=positions, segments=None, sharder=SINGLE, cache=None, dropout_key=None)
    return np.asarray(run(params, jnp.asarray(tokens)[None], ctx)[0][0], np.float64)


def nll(hidden: np.ndarray, head: np.ndarray, targets) -> np.ndarray:
    logits = hidden @ head
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(targets)), targets]


def rms(x: np.ndarray, scale) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * np.asarray(scale, np.float64)


def alone(model: ModelDef, count: int) -> Callable:
    """A model of one layer, whose embedding is the input of its block."""
    return jax.jit(build(dataclasses.replace(model.config, num_layers=1, vocab_size=count, mtp=config.Mtp())).hidden)


def further(runs: list[Callable], params, tokens: np.ndarray) -> list[np.ndarray]:
    """For one document, -log p of the token k after the next by depth. `runs`: the main model and its MTP blocks."""
    table, head = (np.asarray(x, np.float64) for x in (params["embedding"]["table"], params["head"]["kernel"]))
    h, found = hidden(runs[0], params, tokens[:-1]), []
    for k in range(1, DEPTH + 1):
        own = params["mtp"][str(k - 1)]
        count = len(tokens) - 1 - k
        parts = [rms(table[tokens[k : k + count]], own["embedding_norm"]["scale"])]
        parts.append(rms(h[:count], own["hidden_norm"]["scale"]))
        joined = np.concatenate(parts, axis=-1) @ np.asarray(own["join"]["kernel"], np.float64)
        block = {name: part for name, part in own.items() if name.startswith(("attention", "mlp"))}
        weights = {"prefix": {}, "pattern": {"0": jax.tree.map(lambda leaf: leaf[None], block)}, "remainder": {}}
        weights |= {"embedding": {"table": jnp.asarray(joined, jnp.float32)}, "final_norm": own["norm"]}
        weights["head"] = {"kernel": jnp.zeros((WIDTH, count))}
        h = hidden(runs[k], weights, np.arange(count))
        found.append(nll(h, head, tokens[k + 1 : k + 1 + count]))
    return found


@pytest.mark.slow
def test_loss_equals_that_of_separate_documents():
    model = build(make_model())
    params, rng = make_params(model), np.random.default_rng(1)
    documents = rng.integers(0, VOCAB, (3, LENGTH + 1))
    batch = {name: np.zeros((2, 2 * LENGTH), np.int32) for name in ("tokens", "targets", "positions", "segments")}
    batch["weights"] = np.zeros((2, 2 * LENGTH), np.float32)
    for tokens, (row, start, segment) in zip(documents, ((0, 0, 1), (0, LENGTH, 2), (1, 0, 1)), strict=True):
        here = (row, slice(start, start + LENGTH))
        batch["tokens"][here], batch["targets"][here] = tokens[:-1], tokens[1:]
        batch["positions"][here], batch["segments"][here] = np.arange(LENGTH), segment
        batch["weights"][here] = 1
    batch["weights"][0, 1:3] = 0

    loss = jax.jit(next_token_loss(model, SINGLE, Train(z_loss=0.0, loss_chunk=0)))
    sums = loss(params, {name: jnp.asarray(column) for name, column in batch.items()}, None)
    runs = [jax.jit(model.hidden), *(alone(model, LENGTH - k) for k in range(1, DEPTH + 1))]
    expected = np.zeros(DEPTH)
    for number, tokens in enumerate(documents):
        weights = np.ones(LENGTH)
        weights[1:3] = number != 0
        for depth, losses in enumerate(further(runs, params, tokens)):
            expected[depth] += np.sum(weights[depth + 1 :] * losses)
    np.testing.assert_allclose(sums["mtp_loss"], expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(sums["loss"], sums["nll"] + WEIGHT * expected.mean(), rtol=1e-5)
    assert float(sums["weight"]) == 3 * LENGTH - 2


@pytest.mark.slow
def test_decoding_and_the_main_model_ignore_mtp_layers():
    model, plain = build(make_model()), build(make_model(mtp=config.Mtp()))
    params = make_params(model)
    rest = {name: part for name, part in params.items() if name != "mtp"}
    tokens = np.arange(6)
    found, expected = hidden(jax.jit(model.hidden), params, tokens), hidden(jax.jit(plain.hidden), rest, tokens)
    np.testing.assert_array_equal(found, expected)
    assert set(model.shapes) - set(plain.shapes) == {"mtp"}
    fresh, without = model.init(jax.random.key(0)), plain.init(jax.random.key(0))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, {name: fresh[name] for name in without}, without)))


def test_flops_and_parameters_of_an_mtp_layer():
    model = make_model(mtp=config.Mtp(depth=1))
    layer = parameter_count(build(model).shapes["mtp"])
    block = 2 * (16 * 16) + 2 * (16 * 8) + 3 * 16 * 24 + 2 * 16
    assert layer == block + 2 * 16 * 16 + 3 * 16
    plain = dataclasses.replace(model, mtp=config.Mtp())
    added = flops_per_token(model, 8) - flops_per_token(plain, 8)
    # Weights of the block without its norms, of the join and of the head, and attention over 4.5 keys.
    assert added == 6 * (block - 32 + 512 + 16 * VOCAB) + 12 * 16 * 4.5


@pytest.mark.slow
@pytest.mark.default_cases("grpo-False")
@pytest.mark.parametrize(("task", "is_trained"), [("sft", True), ("grpo", False)])
def test_layers_that_a_loss_does_not_use_do_not_decay(task: str, is_trained: bool) -> None:
    model = build(make_model())
    params = make_params(model)
    settings = compose([f"task={task}", "optimizer=adamw", "optimizer.weight_decay=0.1", "optimizer/schedule=constant"])
    config, rules = settings.config, path_rules(settings.config, model)
    optimizer = optim.build(config.optimizer, steps=10, shapes=model.shapes, axes=model.axes, rules=rules)
    zeros = jax.tree.map(jnp.zeros_like, params)
    first = jax.jit(lambda params: optimizer.transform.update(zeros, optimizer.transform.init(params), params))
    updates, _ = first(params)
    is_changed = {name: any(bool(leaf.any()) for leaf in jax.tree.leaves(part)) for name, part in updates.items()}
    assert is_changed.pop("mtp") is is_trained
    assert is_changed["head"] and is_changed["pattern"]


@pytest.mark.slow
def test_tasks_that_do_not_train_them() -> None:
    trained = {name: cls.trains_mtp for name, cls in task_schemas().items() if name in LOGGED}
    frozen = {name for name, is_trained in trained.items() if not is_trained}
    assert frozen == {"dpo", "reward_model", "grpo", "distill"}
    for name in (*frozen, "pretrain", "sft"):
        head = ["model.head=score"] if name == "reward_model" else []
        rules = path_rules(compose([f"task={name}", *head]).config, build(make_model()))
        assert ("^mtp/" in rules.undecayed) is (name in frozen), name
