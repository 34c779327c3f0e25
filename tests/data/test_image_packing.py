"""Packed conversations with images against the same conversations in separate rows."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config import Config
from maxhydra.config.compose.composer import compose
from maxhydra.data.packing import plan_rows
from maxhydra.data.pipeline import Pipeline
from maxhydra.data.rows import Document, Row, RowSpec, packing_sizes
from maxhydra.layers import Context
from maxhydra.model import build
from maxhydra.sharding import Sharder
from tests.support.pictures import picture

SINGLE = Sharder.single()
SEQ_LEN, MAX_IMAGES = 96, 3
# Images of each conversation: best fit puts several into a row, but never more than MAX_IMAGES images.
COUNTS = (1, 0, 2, 1, 1, 0)


def write_conversations(folder: Path) -> Path:
    lines = []
    for number, count in enumerate(COUNTS):
        parts: list[dict[str, str]] = [{"type": "text", "text": "abcdef"[number]}, *[{"type": "image"}] * count]
        urls = []
        for index in range(count):
            buffer = io.BytesIO()
            picture(11, 17, phase=40 * number + 9 * index).save(buffer, "PNG")
            urls.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes" * (number % 2 + 1)}]
        lines.append(json.dumps({"messages": messages, "images": urls}))
    path = folder / "x.jsonl"
    path.write_text("\n".join(lines))
    return path


def rows_of(path: Path, method: str) -> tuple[list[Row], Config]:
    command = ["task=sft", "model=micro-vision", "data=grain", "data.record_type=image_chat", f"data.path={path}"]
    command += ["data.tokenizer.chat_template=lines", f"train.seq_len={SEQ_LEN}", f"data.max_images={MAX_IMAGES}"]
    command += ["data.shuffle=false", "data.eval_fraction=0.01", f"data.packing.method={method}"]
    config = compose(command).config
    return Pipeline(config.data, RowSpec.of(config)).first_rows(2 if method == "best_fit" else 5), config


@pytest.mark.slow
def test_log_probs_equal_those_of_unpacked_rows(tmp_path: Path) -> None:
    path = write_conversations(tmp_path)
    (packed, config), (single, _) = rows_of(path, "best_fit"), rows_of(path, "none")
    model = build(config.model)
    weights = jax.jit(model.init)(jax.random.key(0))
    # Large enough for completions to depend on the images.
    weights["vision"] = jax.tree.map(lambda weight: 3 * weight, weights["vision"])

    @jax.jit
    def logprobs(batch: dict[str, jax.Array]) -> jax.Array:
        hidden = model.hidden(weights, batch["tokens"], Context.of_batch(batch, SINGLE, None))[0]
        logits = jax.nn.log_softmax(model.logits(weights, hidden, SINGLE))
        return jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]

    def by_conversation(rows: list[Row]) -> dict[tuple[int, ...], np.ndarray]:
        """Log-probs of the targets with loss, by the tokens of the conversation."""
        batch: Any = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
        found = {}
        for row, values in zip(rows, np.asarray(logprobs(batch)), strict=True):
            segments = row.get("segments", np.ones(SEQ_LEN, np.int32))
            for segment in range(1, segments.max() + 1):
                inside = segments == segment
                tokens = row["tokens"][inside][: int(row["positions"][inside].max()) + 1]
                found[tuple(tokens.tolist())] = values[inside & (row["weights"] > 0)]
        return found

    together, alone = by_conversation(packed), by_conversation(single)
    assert any(row["segments"].max() > 1 and row["images"].any(axis=(1, 2, 3)).sum() > 1 for row in packed)
    assert len(together) >= 4 and together.keys() <= alone.keys()
    for tokens, values in together.items():
        np.testing.assert_allclose(values, alone[tokens], atol=1e-4)


def test_rows_have_at_most_max_images() -> None:
    """Short documents with many images: images limit the rows; long ones without: tokens do."""
    config = compose(["task=sft", "model=micro-vision", "data=shapes", "train.seq_len=48"]).config
    rng = np.random.default_rng(0)
    documents = [
        Document(np.zeros(rng.integers(2, 40)), images=np.zeros((rng.integers(0, 4), 1)), max_images=3)
        for _ in range(200)
    ]
    lengths = np.array([document.num_targets for document in documents])
    plan = plan_rows(lengths, 40, config.data.packing, sizes=packing_sizes(documents, 40))
    images = np.array([len(document.images) for document in documents if document.images is not None])
    assert sorted(plan.document) == list(range(200)) and (plan.count == lengths[plan.document]).all()
    assert np.bincount(plan.row, images[plan.document]).max() == 3 and np.bincount(plan.row, plan.count).max() <= 40
    assert plan.rows < 200
