"""Router replay: training uses the experts that were chosen in sampling, whatever the trainer's router would choose."""

import dataclasses
import functools
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema import model as config
from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import Speculation, SpeculationMethod
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.config.schema.tasks.training import GrpoTask
from maxhydra.data.tokenizers.byte import ByteTokenizer
from maxhydra.decode import draft_policy
from maxhydra.decode.sampling_params import make_requests
from maxhydra.layers.context import EXPERTS
from maxhydra.model import ModelDef, build
from maxhydra.rl.episodes import Episode
from maxhydra.rl.policy_engine import PolicyEngine
from maxhydra.rl.reward_pool import RewardResult
from maxhydra.rl.rollout import Group, columns, unfiltered_sampling
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import Scorer

SEQ, LAYERS, TOP_K = 48, 4, 2
PROMPTS = [tuple(b"a long prompt of two chunks"), tuple(b"short")]
TASK = GrpoTask(name="grpo", router_replay=True, mask_degenerate=False)


@functools.cache
def moe_model() -> ModelDef:
    """One dense layer, and three with experts whose choice a bias shifts without an effect on the gates."""
    moe = config.Moe(experts=8, top_k=TOP_K, router=config.Router(bias_rate=0.001))
    kinds = {"dense": config.Kind(), "experts": config.Kind(feed_forward=config.FeedForward.moe, moe=moe)}
    sizes = {"num_layers": LAYERS, "emb_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return build(
        config.Model(
            **sizes,
            vocab_size=264,
            context_length=64,
            kinds=kinds,
            prefix=["dense"],
            pattern=["experts"],
            dtypes=config.Dtypes(compute=config.Dtype.float32),
        )
    )


def random_weights(model: ModelDef) -> Any:
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * random.normal(size=x.shape), x.dtype), model.shapes)


def with_other_choices(weights: Any) -> Any:
    """The same weights, with which routers choose other experts."""
    router = weights["pattern"]["0"]["mlp"]["router"]
    shifted = router["correction"] + jnp.asarray(np.random.default_rng(1).normal(size=router["correction"].shape))
    moe = {**weights["pattern"]["0"]["mlp"], "router": {**router, "correction": shifted.astype(jnp.float32)}}
    return {**weights, "pattern": {"0": {**weights["pattern"]["0"], "mlp": moe}}}


def play(engine: Any, prompts: list[tuple[int, ...]]) -> list[Episode]:
    """Two turns of 9 tokens each, with a reply of 5 tokens between them."""
    episodes = [Episode(prompt) for prompt in prompts]
    for turn in range(2):
        requests = [
            dataclasses.replace(request, ignore_eos=True)
            for number, episode in enumerate(episodes)
            for request in make_requests(
                (*episode.prompt, *episode.tokens),
                unfiltered_sampling(9, 1.0),
                samples=1,
                seed=turn,
                number=number,
                logprobs=0,
            )
        ]
        for episode, handle in zip(episodes, engine.submit_all(requests), strict=True):
            episode.add_turn(handle.result())
            if turn == 0:
                episode.add_reply(list(b"reply"))
    return episodes


@functools.cache
def sampled_batch(devices: int, burst: int, drafted: int) -> dict[str, jax.Array]:
    model = moe_model()
    weights = random_weights(model)
    sharder = Sharder(build_mesh(Mesh(data=devices), jax.devices()[:devices]), RULES)
    method = SpeculationMethod.ngram if drafted else None
    speculation = Speculation(method=method, tokens=drafted or 4, max_ngram=1, min_ngram=1)
    settings = EngineConfig(
        max_batch=4,
        cache_tokens=512,
        page_size=8,
        prefill_chunk=16,
        burst=burst,
        speculation=speculation,
        deterministic=bool(drafted),
    )
    engine = PolicyEngine(
        model, ByteTokenizer(), settings, sharder=sharder, eos=frozenset(), seed=0, records_experts=True
    )
    with closing(engine), pytest.MonkeyPatch.context() as patch:
        # All steps verify drafts, whatever they gain.
        patch.setattr(draft_policy, "MARGIN", 0.0)
        episodes = engine.run(weights, lambda inner: play(inner, PROMPTS))
    assert [len(episode.experts) for episode in episodes] == [len(prompt) + 22 for prompt in PROMPTS]
    group = Group(episodes, [RewardResult({}, 0.0, True, 0)] * len(PROMPTS))
    return {name: jnp.asarray(column) for name, column in columns([group], TASK, SEQ + 2).items()}


@functools.cache
def compiled_scorer() -> Any:
    scorer = Scorer(moe_model(), Sharder.single(), 0)
    return jax.jit(lambda weights, batch: scorer(weights, batch, None, is_adapted=True))


def errors(weights: Any, batch: dict[str, jax.Array]) -> np.ndarray:
    """Differences between the log-probs of trainer and sampler, of the sampled tokens."""
    logprobs = compiled_scorer()(weights, batch)
    return np.abs(logprobs - batch["sampled_logprobs"])[np.asarray(batch["weights"]) > 0]


# The standard weight layout, in which layers are stacked, is that of several devices.
@pytest.mark.slow
@pytest.mark.default_cases("1-4-0")
@pytest.mark.parametrize(("devices", "burst", "drafted"), [(1, 1, 0), (1, 4, 0), (2, 1, 0), (1, 2, 3)])
def test_trainer_and_sampler_agree_although_routers_do_not(devices: int, burst: int, drafted: int) -> None:
    """Speculative decoding records the experts of accepted tokens only."""
    weights = random_weights(moe_model())
    batch = sampled_batch(devices, burst, drafted)
    assert batch[EXPERTS].shape == (2, SEQ + 2, LAYERS, TOP_K) and batch["weights"].sum() == 2 * 18
    without = {name: column for name, column in batch.items() if name != EXPERTS}
    assert errors(weights, without).max() < 1e-4
    assert errors(with_other_choices(weights), without).max() > 0.1
    assert errors(with_other_choices(weights), batch).max() < 1e-4


@pytest.mark.slow
def test_the_gradient_of_replayed_routers_is_that_of_their_own_choice() -> None:
    """It flows through the gates; dense layers and tokens without known experts are left alone."""
    weights = random_weights(moe_model())
    batch = sampled_batch(1, 4, 0)

    @jax.jit
    def gradient(weights: Any, batch: Any) -> Any:
        total = jax.grad(lambda w: jnp.sum(compiled_scorer()(w, batch) * batch["weights"]))
        return total(weights)["pattern"]["0"]["mlp"]

    own = gradient(weights, {name: column for name, column in batch.items() if name != EXPERTS})
    replayed = gradient(with_other_choices(weights), batch)
    assert np.abs(own["router"]["kernel"]).max() > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), replayed, own)
    unknown = {**batch, EXPERTS: jnp.full_like(batch[EXPERTS], -1)}
    assert errors(weights, unknown).max() < 1e-4
