"""Fine-tuning on images and audio trains the encoders, but not the bounds of their clipped projections."""

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.support.cli import losses, run_ok

RUN = [
    "task=sft",
    "train.seq_len=64",
    "train.per_device_batch_size=2",
    "train.steps=2",
    "checkpoint.every=1",
    "checkpoint.keep=2",
]
RUN += ["train.eval_batches=0", "optimizer.weight_decay=0.1", "hardware=cpu"]
# The encoder is under test: one decoder layer instead of four halves the time.
RUN += ["model.num_layers=1", "model.prefix=[]", "model.pattern=[local]"]
RUN += ["model.kinds.local_shared.attention.shares=null", "model.kinds.global_shared.attention.shares=null"]


def stored(folder: Path, step: int) -> dict[str, np.ndarray]:
    with ocp.StandardCheckpointer() as reader:
        params = reader.restore(folder / "checkpoints" / str(step) / "params")
    return {"/".join(path): np.asarray(leaf) for path, leaf in ocp.tree.to_flat_dict(params).items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("data", "encoder"), [("shapes", "vision"), pytest.param("tones", "audio", marks=pytest.mark.exhaustive)]
)
def test_bounds_are_constant_and_projections_are_trained(data: str, encoder: str, tmp_path: Path) -> None:
    run_ok(*RUN, f"data={data}", f"model=gemma4-tiny-{encoder}", "run.name=a", cwd=tmp_path)
    assert all(np.isfinite(loss) for loss in losses(tmp_path / "outputs/a").values())
    first, last = (stored(tmp_path / "outputs/a", step) for step in (1, 2))
    constant = {name for name in last if np.array_equal(first[name], last[name])}
    bounds = {name for name in last if "/bounds/" in name}
    assert bounds and {name for name in constant if name.startswith(f"{encoder}/")} == bounds
