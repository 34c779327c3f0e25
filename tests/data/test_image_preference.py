"""Preference pairs about images: their rows, their log-probs, and records that are rejected."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.align.loss import PairScorer
from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.data.record_types import Rejected, build_record_type
from maxhydra.data.rows import RowSpec
from maxhydra.layers import Context
from maxhydra.model import build
from maxhydra.sharding import Sharder
from tests.support.pictures import picture

SINGLE = Sharder.single()
COMMAND = ["task=dpo", "model=micro-vision", "data=grain", "data.record_type=image_preference", "train.seq_len=48"]
COMMAND += ["data.tokenizer.chat_template=lines", "data.max_images=2"]
PROMPT = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]


def record_type(tmp_path: Path, *overrides: str) -> Any:
    (tmp_path / "x.jsonl").write_text("{}\n")
    config = compose([*COMMAND, f"data.path={tmp_path}/x.jsonl", *overrides]).config
    return build_record_type(config.data, config.data, RowSpec.of(config)), config.model


def record(phase: int, **changes: Any) -> dict[str, Any]:
    pixels = np.asarray(picture(20, 9, phase=phase))
    return {"prompt": PROMPT, "chosen": "yes", "rejected": "no", "images": [pixels], **changes}


@pytest.mark.exhaustive
def test_log_probs_of_a_pair_are_those_of_its_completions_with_the_image(tmp_path: Path) -> None:
    """Two pairs with different images in one batch, against one forward pass per completion."""
    made, config = record_type(tmp_path)
    rows = [made.row(example, 48) for example in made.encode([record(0), record(50, chosen="maybe")])]
    batch = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
    model = build(config)
    weights = jax.jit(model.init)(jax.random.key(0))
    weights["vision"] = jax.tree.map(lambda weight: 3 * weight, weights["vision"])
    logprobs = jax.jit(lambda: PairScorer(model, SINGLE, 16)(weights, batch, None, is_adapted=True))()

    @jax.jit
    def expected(tokens: jax.Array, targets: jax.Array, images: jax.Array) -> jax.Array:
        ctx = Context.of_batch({"positions": jnp.arange(48)[None], "images": images[None]}, SINGLE, None)
        logits = model.logits(weights, model.hidden(weights, tokens[None], ctx)[0], SINGLE)[0]
        return jax.nn.log_softmax(logits)[jnp.arange(48), targets]

    singles = [
        [
            np.dot(row[f"{role}_weights"], expected(row[f"{role}_tokens"], row[f"{role}_targets"], row["images"]))
            for role in ("chosen", "rejected")
        ]
        for row in rows
    ]
    np.testing.assert_allclose(logprobs, singles, rtol=1e-4)
    assert abs(singles[0][1] - singles[1][1]) > 1e-2, "equal completions about different images"


def test_rows_have_the_images_of_the_prompt(tmp_path: Path) -> None:
    made, model = record_type(tmp_path)
    row = made.row(made.encode([record(0)])[0], 48)
    image = [model.vision.placeholder_id] * model.vision.projector.tokens
    for role, text in (("chosen", b"yes"), ("rejected", b"no")):
        expected = [256, *image, *b"a\n", *text, 257]
        assert row[f"{role}_tokens"][: len(expected) - 1].tolist() == expected[:-1]
        assert row[f"{role}_targets"][row[f"{role}_weights"] > 0].tolist() == [*text, 257]
    assert row["images"].shape == (2, 32, 32, 3) and row["images"][0].any() and not row["images"][1].any()


def test_invalid_records(tmp_path: Path) -> None:
    made, _ = record_type(tmp_path, "data.packing.overlong=truncate")
    cases = [
        ({"images": []}, "has 0 images, but 1 image parts"),
        ({"images": record(0)["images"] * 3}, "more than data.max_images=2"),
        ({"images": ["/nowhere.png"]}, "no such file"),
        ({"prompt": "a"}, "has 1 images, but 0 image parts"),
        ({"chosen": "b" * 60}, "more than train.seq_len=48"),
        ({"chosen": "no"}, "are equal"),
    ]
    for rejected, (_, reason) in zip(made.encode([record(0, **changes) for changes, _ in cases]), cases, strict=True):
        assert isinstance(rejected, Rejected) and reason in rejected.reason, (rejected, reason)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["model=micro"], "needs a model that takes images"),
        (["task=sft"], "is not supported by task=sft"),
        (["task=reward_model"], "is not supported by task=reward_model"),
    ],
)
def test_combinations_that_are_not_supported(tmp_path: Path, overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        record_type(tmp_path, *overrides)
