"""task=score reproduces the logits of transformers for golden models, from file to file."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.score.scorer import perplexity
from maxhydra.tasks import Job, score

GOLDEN = Path(__file__).parents[1] / "parity" / "golden" / "mistral"
FIXED = ["task=score", "model=from_hf", f"model.path={GOLDEN}", "train.seq_len=64", "model.dtypes.compute=float32"]


@pytest.fixture
def expected() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "expected.npz") as arrays:
        return {name: arrays[name] for name in ("ids", "mask", "logits")}


def run_score(source: Path, output: Path, *overrides: str) -> Any:
    config = compose([*FIXED, f"task.input={source}", f"task.output={output}", *overrides]).config
    machine: Any = type("OneProcess", (), {"process_count": 1})
    return score.run(Job(config, {}, machine, None))  # type: ignore[arg-type]


def expected_logprobs(expected: dict[str, np.ndarray], row: int) -> np.ndarray:
    """Return log-probabilities of the tokens of a row after its first."""
    real = expected["mask"][row] == 1
    logits, ids = expected["logits"][row][real].astype(np.float64)[:-1], expected["ids"][row][real][1:]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted[np.arange(len(ids)), ids] - np.log(np.exp(shifted).sum(axis=-1))


@pytest.mark.slow
def test_arrays_with_left_padding_give_the_logits_of_transformers(expected: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", ids=expected["ids"], mask=expected["mask"])
    outcome = run_score(tmp_path / "x.npz", tmp_path / "y.npz", "task.logits=true", "mesh.fsdp=4", "mesh.tensor=2")
    with np.load(tmp_path / "y.npz") as found:
        real = expected["mask"] == 1
        assert found["logits"].dtype == np.float32
        assert np.abs(found["logits"] - expected["logits"])[real].max() < 2e-4
        reference = [expected_logprobs(expected, row) for row in (0, 1)]
        for row, positions in enumerate(map(np.flatnonzero, real)):
            np.testing.assert_allclose(found["logprobs"][row, positions[1:]], reference[row], atol=1e-4)
            np.testing.assert_allclose(found["perplexity"][row], np.exp(-reference[row].mean()), rtol=1e-4)
        assert np.isnan(found["logprobs"]).sum() == (~real).sum() + 2
    overall = np.exp(-np.concatenate(reference).mean())
    np.testing.assert_allclose(outcome.metrics["perplexity"], overall, rtol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npz", "y.npz"]


@pytest.mark.slow
def test_lines_of_any_length_are_written_in_order(expected: Any, tmp_path: Path) -> None:
    ids = expected["ids"][0].tolist()
    records = [{"ids": ids[:9], "name": "a"}, {"ids": ids[:1]}, {"ids": ids[:5]}]
    (tmp_path / "x.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    run_score(tmp_path / "x.jsonl", tmp_path / "y.jsonl", "task.batch=2")
    found = [json.loads(line) for line in (tmp_path / "y.jsonl").read_text().splitlines()]
    reference = expected_logprobs(expected, 0)
    for record, line in zip(records, found, strict=True):
        assert line["ids"] == record["ids"] and line.get("name") == record.get("name")
        np.testing.assert_allclose(line["logprobs"], reference[: len(record["ids"]) - 1], atol=1e-4)
    assert found[1]["perplexity"] is None
    np.testing.assert_allclose(found[0]["perplexity"], np.exp(-reference[:8].mean()), rtol=1e-4)


@pytest.mark.slow
def test_a_score_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    """With a capacity factor, an expert would accept more tokens of a row with more padding."""
    path, ids = GOLDEN.parent / "mixtral", np.random.default_rng(0).integers(0, 64, 100).tolist()
    changes = [f"model.path={path}", "model.kinds.layer.moe.capacity_factor=1.0"]
    found = []
    for records in ([{"ids": ids[:16]}], [{"ids": ids[:16]}, {"ids": ids}]):
        (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
        run_score(tmp_path / "x.jsonl", tmp_path / "y.jsonl", *changes)
        found.append(json.loads((tmp_path / "y.jsonl").read_text().splitlines()[0])["logprobs"])
    np.testing.assert_allclose(*found, atol=1e-4)


def error_message(source: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        run_score(source, source.with_name("y.npz"))
    assert not source.with_name("y.npz").exists()
    return str(caught.value)


@pytest.mark.slow
def test_invalid_input_is_rejected_by_line_and_nothing_is_written(tmp_path: Path) -> None:
    lines = ['{"ids": [1, 64]}', "{", '{"ids": [1], "text": "a"}', '{"ids": []}', '{"ids": [1.5]}', '{"ids": [1, 2]}']
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    message = error_message(tmp_path / "x.jsonl")
    for number, reason in enumerate(
        ("contains the token 64", "Expecting", "either text or ids", "contains no tokens"), 1
    ):
        assert f"line {number}: " in message and reason in message
    assert "line 5: " in message and "line 6" not in message
    (tmp_path / "x.jsonl").write_text(json.dumps({"ids": [1] * 513}))
    assert "model.context_length is 512" in error_message(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text('{"ids": [1, 99999999999999999999]}\n{"ids": [1, 2], "name": "\\ud800"}')
    message = error_message(tmp_path / "x.jsonl")
    assert "line 1: " in message and "too large" in message and "line 2: " in message and "surrogates" in message
    (tmp_path / "x.npz").write_bytes(b"PK")
    assert "cannot be read" in error_message(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", ids=np.ones((2, 3), np.int32), mask=np.ones((2, 2), np.int32))
    assert "mask is not an array" in error_message(tmp_path / "x.npz")
    assert "is not a file" in error_message(tmp_path / "nowhere.npz")
    with pytest.raises(ConfigError) as caught:
        compose([*FIXED, "task.input=x.txt", "task.output=y.jsonl", "task.logits=true"])
    assert {problem.path for problem in caught.value.problems} == {"task.input", "task.logits"}


@pytest.mark.slow
def test_an_unwritable_output_is_rejected_before_weights_are_loaded(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"ids": [1, 2]}')
    (tmp_path / "folder.npz").mkdir()
    load = f"checkpoint.load_parameters={tmp_path}"
    for output, reason in (
        (tmp_path / "x.jsonl" / "y.npz", "cannot be written"),
        (tmp_path / "folder.npz", "a directory"),
    ):
        with pytest.raises(ConfigError, match=rf"task\.output.*{reason}"):
            run_score(tmp_path / "x.jsonl", output, load)
    assert {path.name for path in tmp_path.iterdir()} == {"x.jsonl", "folder.npz"}


@pytest.mark.slow
def test_corrupt_weights_fail_and_write_nothing(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "corrupt")
    file = tmp_path / "corrupt" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = np.nan
    save_file(weights, file)
    (tmp_path / "x.jsonl").write_text('{"ids": [1, 2]}')
    load = f"checkpoint.load_parameters={tmp_path / 'corrupt'}"
    outcome = run_score(tmp_path / "x.jsonl", tmp_path / "y.jsonl", load)
    assert outcome.status == "failed" and "NaN" in outcome.reason and not (tmp_path / "y.jsonl").exists()


def test_the_perplexity_of_impossible_tokens_is_infinite() -> None:
    assert perplexity(np.float32([-800, -900])) == perplexity(np.float32([-np.inf, -1])) == np.inf
    np.testing.assert_allclose(perplexity(np.log(np.float32([0.5, 0.125]))), 4, rtol=1e-6)
