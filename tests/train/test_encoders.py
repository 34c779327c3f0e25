"""Images and audio in one sequence: gradients of both encoders, and parts that are frozen or slower by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.layers import Context
from maxhydra.model import build
from maxhydra.optim import build as build_optimizer
from maxhydra.sharding import Sharder
from maxhydra.train.path_rules import path_rules

SIZES = {"num_layers": 1, "num_bands": 8, "conv_dim": 2, "emb_dim": 8, "mlp_dim": 8, "num_heads": 2}
AUDIO = [f"model.audio.{name}={value}" for name, value in {**SIZES, "placeholder_id": 261}.items()]
COMMAND = ["task=sft", "model=micro-vision", "data=shapes", "train.seq_len=48", "optimizer=adamw", *AUDIO]
RULES = [
    'optimizer.trainable=["^vision/projector/", "^audio/", "^pattern/"]',
    "+optimizer.rate_ratios={audio/: 0.1}",
    *("optimizer.weight_decay=0", "optimizer.schedule.warmup_steps=0"),
]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_parts_of_both_encoders_train_by_name() -> None:
    config = compose([*COMMAND, *RULES]).config
    model, vision, audio = build(config.model), config.model.vision, config.model.audio
    image, clip = [vision.placeholder_id] * vision.projector.tokens, [audio.placeholder_id] * audio.num_tokens(30)
    tokens = jnp.array([[1, *image, 2, *clip, 3]])
    generator = np.random.default_rng(0)
    batch = {
        "positions": jnp.arange(tokens.shape[1])[None],
        "images": jnp.asarray(generator.normal(size=(1, 1, vision.image_size, vision.image_size, 3))),
        "audio": jnp.asarray(generator.normal(size=(1, 1, 30, audio.num_bands))),
        "audio_lengths": jnp.array([[30]]),
    }
    params = jax.jit(model.init)(jax.random.key(0))
    target = jnp.asarray(generator.normal(size=config.model.emb_dim))

    @jax.jit
    def gradient(params: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.sum(model.hidden(params, tokens, Context.of_batch(batch, Sharder.single(), None))[0] @ target)

        return jax.grad(loss)(params)

    grads = gradient(params)
    for part in ("vision", "audio"):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads[part]))
        assert np.abs(grads[part]["projector"]["out"]["kernel"]).max() > 1e-4
    rules = path_rules(config, model)
    optimizer = build_optimizer(config.optimizer, steps=10, shapes=model.shapes, axes=model.axes, rules=rules)
    transform = optimizer.transform
    updates = jax.jit(lambda grads, params: transform.update(grads, transform.init(params), params)[0])(grads, params)
    largest = jax.tree.map(lambda update: float(np.abs(update).max()), updates)
    rate = config.optimizer.learning_rate
    assert largest["vision"]["projector"]["out"]["kernel"] == pytest.approx(rate, rel=1e-2)
    assert largest["audio"]["projector"]["out"]["kernel"] == pytest.approx(0.1 * rate, rel=1e-2)
    assert largest["audio"]["convolutions"]["0"]["kernel"] == pytest.approx(0.1 * rate, rel=1e-2)
    assert max(jax.tree.leaves(largest["vision"]["layers"])) == largest["vision"]["patches"]["kernel"] == 0
    assert max(jax.tree.leaves(largest["embedding"])) == 0 < max(jax.tree.leaves(largest["pattern"]))
    assert jax.tree.structure(optax.apply_updates(params, updates)) == jax.tree.structure(params)
