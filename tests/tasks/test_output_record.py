"""task=convert repeated: a complete output of the same command is verified, anything else is an error."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.convert.orbax_io import write_checkpoint
from maxhydra.convert.streaming import InMemoryArrays
from maxhydra.model import build
from maxhydra.record.checkpoint_manifest import verify_files
from maxhydra.tasks import Job, convert
from maxhydra.tasks._output_record import RECORD

MODEL = ["model=llama3-tiny", "model.num_layers=1", "model.vocab_size=300"]


def write_weights(folder: Path, seed: int) -> Path:
    model = build(compose(MODEL).config.model)
    folder.mkdir()
    arrays = InMemoryArrays(jax.tree.map(lambda leaf: np.full(leaf.shape, seed, np.float32), model.shapes))
    write_checkpoint(folder, model, arrays, dtype=np.dtype("float32"))
    return folder


def convert_again(source: Path, *overrides: str) -> str:
    config = compose(
        [
            *MODEL,
            "task=convert",
            f"checkpoint.load_parameters={source}",
            f"task.output={source.parent / 'out'}",
            *overrides,
        ]
    ).config
    job: Any = Job(config, {}, None, None)  # type: ignore[arg-type]
    return convert.run(job).reason


@pytest.mark.slow
@pytest.mark.default_cases("maxhydra")
@pytest.mark.parametrize("kind", ["hf", "maxhydra"])
def test_a_repeated_command_ends_like_the_first(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, out, command = write_weights(tmp_path / "in", 0), tmp_path / "out", f"task.format={kind}"
    assert convert_again(source, command) == "written"
    if kind == "maxhydra":
        assert verify_files(out) is None
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    # A command that was killed after the rename, or repeated with another run.name.
    assert convert_again(source, command, "run.name=other") == "already complete"
    assert "is already complete: written by the same command, files verified" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == files
    with pytest.raises(ConfigError, match="already exists, and was written from other weights or with other settings"):
        convert_again(source, command, "task.dtype=bfloat16")
    other = write_weights(tmp_path / "other", 1)
    with pytest.raises(ConfigError, match="already exists, and was written from other weights"):
        convert_again(other, command)


@pytest.mark.slow
def test_an_output_that_is_not_intact_is_an_error(tmp_path: Path) -> None:
    source, out = write_weights(tmp_path / "in", 0), tmp_path / "out"
    convert_again(source)
    weights = next(out.glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ConfigError, match=f"already exists, and has changed since it was written: {weights.name}"):
        convert_again(source)
    weights.write_bytes(content)
    (out / "more.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has changed since it was written: more\.bin"):
        convert_again(source)
    (out / "more.bin").unlink()
    record = json.loads((out / RECORD).read_text())
    for damaged in ("{", "[]", json.dumps({**record, "format": 99}), json.dumps({**record, "files": 5})):
        (out / RECORD).write_text(damaged)
        with pytest.raises(ConfigError, match=r"already exists, and has a damaged \.conversion\.json"):
            convert_again(source)
    (out / RECORD).unlink()
    with pytest.raises(ConfigError, match="already exists, and was not written by task=convert"):
        convert_again(source)
