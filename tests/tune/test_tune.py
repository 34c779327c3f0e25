"""task=tune: search order, the config of a candidate, and the experiment that is written."""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

import pytest

from maxhydra import tasks
from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.analysis import Batch, TuneTask
from maxhydra.config.serialize import to_yaml
from maxhydra.runtime.detect import hardware_options
from maxhydra.tune.space import Axis, Candidate, apply_candidate, axes
from maxhydra.tune.trial import bench_config, digest, experiment
from maxhydra.tune.tuner import OutOfTime, eliminate, grid, needs_less, one_by_one
from tests.support.cli import facts, kill_when, run_ok, run_processes

SPACE = [Axis("a", ("a=0", "a=1", "a=2")), Axis("b", ("b=0", "b=1")), Axis("c", ("c=0", "c=1", "c=2"))]


ALL = [
    {key: f"{key}={value}" for key, value in zip("abc", choice, strict=True)}
    for choice in itertools.product(range(3), range(2), range(3))
]


class FakeTimer:
    """Step times from a formula, with a record of the candidates that were measured."""

    def __init__(self, limit: float = math.inf, calls: int = 10_000):
        self.measured: list[tuple[str, int]] = []
        self.limit, self.calls = limit, calls

    def __call__(self, candidate: Candidate, steps: int) -> float:
        a, b, c = (int(candidate.get(key, f"{key}=0")[2:]) for key in "abc")
        if (f"{a}{b}{c}", steps) not in self.measured:
            if len(self.measured) == self.calls:
                raise OutOfTime
            self.measured.append((f"{a}{b}{c}", steps))
        # Later values of a list need less memory; it is faster if a and b agree.
        memory = 10 - 2 * a - b - c
        return math.inf if memory > self.limit else 1 + (a - 1) ** 2 + 0.5 * (a != b) + 0.1 * (c - 1.1) ** 2


def test_coordinate_descent_finds_the_optimum_of_the_grid() -> None:
    few, many = FakeTimer(), FakeTimer()
    tried = one_by_one(SPACE, few, steps=2)
    assert min(few(item, 2) for item in tried) == min(many(item, 2) for item in ALL)
    assert len(few.measured) < 12 < len(many.measured) == 18


def test_if_nothing_runs_the_search_moves_towards_less_memory() -> None:
    """The config and any single change need too much memory; two changes together do not."""
    timer = FakeTimer(limit=5)
    tried = one_by_one(SPACE, timer, steps=1)
    assert math.isinf(timer({}, 1)) and any(math.isfinite(timer(item, 1)) for item in tried)


@pytest.mark.parametrize(("cost", "is_close"), [(1.01, True), (1.3, False)])
def test_dependent_settings_are_tried_near_the_best_and_dropped_with_their_parent(cost: float, is_close: bool) -> None:
    """Kind b is slower than a; part 2 makes it faster than a, but with x=1 kind a is the fastest."""
    space = [
        Axis("kind", ("kind=a", "kind=b")),
        Axis("part", ("part=1", "part=2"), under={"kind": "kind=b"}),
        Axis("x", ("x=0", "x=1")),
    ]
    measured: list[Candidate] = []

    def time(candidate: Candidate, steps: int) -> float:
        measured.append(candidate)
        is_b, is_2, is_x = (text in candidate.values() for text in ("kind=b", "part=2", "x=1"))
        return (cost if is_b else 1.0) - 0.1 * is_2 - is_x * (0.3 if is_b else 0.5)

    best = min(one_by_one(space, time, steps=1), key=lambda item: time(item, 1))
    assert best["x"] == "x=1" and "kind=b" not in best.values()
    assert ({"kind": "kind=b", "part": "part=2"} in measured) == is_close
    assert all(item["kind"] == "kind=b" for item in measured if "part" in item)


def test_finalists_are_timed_over_more_steps_and_halved() -> None:
    timer = FakeTimer()
    tried = grid(SPACE, timer, steps=3)
    first = len(timer.measured)
    eliminate(tried, timer, steps=3, finalists=4)
    later = timer.measured[first:]
    assert [steps for _, steps in later] == [6] * 4 + [12] * 2
    fastest = min(ALL, key=lambda item: timer(item, 3))
    assert "".join(text[-1] for text in fastest.values()) in {name for name, steps in later if steps == 12}


def test_an_interrupted_search_resumes() -> None:
    whole = FakeTimer()
    one_by_one(SPACE, whole, steps=2)
    interrupted = FakeTimer(calls=4)
    with pytest.raises(OutOfTime):
        one_by_one(SPACE, interrupted, steps=2)
    interrupted.calls = 10_000
    one_by_one(SPACE, interrupted, steps=2)
    assert interrupted.measured == whole.measured


@pytest.mark.slow
def test_the_global_batch_is_preserved() -> None:
    config = compose(["task=tune", "model=micro", "train.per_device_batch_size=8", "train.grad_accum=2"]).config
    assert isinstance(config.task, TuneTask)
    found = {axis.key: axis.values for axis in axes(config, config.task, hardware_options()["cpu"])}
    for override in found["train.per_device_batch_size"]:
        train = apply_candidate(config, {"train.per_device_batch_size": override}, Batch.same).train
        assert train.per_device_batch_size * train.grad_accum == 16
    odd = {"train.per_device_batch_size": "train.per_device_batch_size=3"}
    assert apply_candidate(config, odd, Batch.any).train.grad_accum == 2
    with pytest.raises(ConfigError, match="does not divide the 16 sequences"):
        apply_candidate(config, odd, Batch.same)


@pytest.mark.slow
def test_configs_that_certainly_need_less_memory() -> None:
    config = compose(["task=tune", "model=micro", "train.per_device_batch_size=8"]).config

    @functools.cache
    def variant(batch: int, policy: str, unroll: int = 2) -> Config:
        overrides = (
            f"train.per_device_batch_size={batch}",
            f"model.remat.policy={policy}",
            f"model.scan_unroll={unroll}",
        )
        return apply_candidate(config, {text.partition("=")[0]: text for text in overrides}, Batch.same)

    assert needs_less(variant(4, "minimal"), variant(8, "none")) and needs_less(
        variant(4, "full"), variant(4, "minimal")
    )
    assert not needs_less(variant(8, "full"), variant(4, "none")) and not needs_less(
        variant(4, "none"), variant(8, "full")
    )
    assert not needs_less(variant(4, "full", unroll=1), variant(8, "none"))


@pytest.mark.slow
def test_all_errors_of_a_space_are_reported() -> None:
    space = ["train.per_device_batch_size=4,5", "model.remat.polcy=none", "~model.remat", "model.scan_unroll=0,1"]
    config = compose(["task=tune", "model=micro", f"task.space={json.dumps(space)}"]).config
    assert isinstance(config.task, TuneTask)
    with pytest.raises(ConfigError) as caught:
        axes(config, config.task, hardware_options()["cpu"])
    message = str(caught.value)
    for word in ("does not divide the 64", "model.remat.polcy", "~model.remat", "model.scan_unroll=0"):
        assert word in message


@pytest.mark.slow
def test_the_experiment_composes_to_the_tuned_config(tmp_path: Path) -> None:
    given = ["task=tune", "model=llama3.2-1b", "optimizer=adafactor", "experiment=shakespeare", "train.seq_len=512",
             "+hardware.flag_sets.mine=['--xla_a=1']", "run.name=x", "task.minutes=1"]  # fmt: skip
    composed = compose(given)
    candidate = {
        "train.per_device_batch_size": "train.per_device_batch_size=4",
        "hardware.xla_flags": "hardware.xla_flags=['--xla_gpu_enable_triton_gemm=false','--xla_b=']",
        "model.remat.policy": "model.remat.policy=minimal",
    }
    tuned = apply_candidate(composed.config, candidate, Batch.any)
    text = experiment(composed.config, tuned, choices=composed.choices, overrides=given, comments=["why"])
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "fast.yaml").write_text(text)
    again = compose(["experiment=fast"], str(tmp_path))
    assert again.choices["experiment"] == "fast" and again.choices["task"] == "pretrain"
    assert to_yaml(dataclasses.replace(again.config, task=tuned.task, run=tuned.run)) == to_yaml(tuned)
    assert text.startswith("# @package _global_\n# why\n") and "minutes" not in text


SMALL = [
    "model=micro",
    "model.num_layers=1",
    "model.scan_unroll=1",
    "train.seq_len=16",
    "train.per_device_batch_size=2",
]


@pytest.mark.exhaustive
def test_a_search_survives_crashes_and_a_kill_and_its_experiment_runs(tmp_path: Path) -> None:
    space = "task.space=['train.per_device_batch_size=2,1','hardware.xla_flags=[],[\\'--xla_no_such_flag=1\\']']"
    given = ["task=tune", *SMALL, space, "task.steps=1", "task.finalists=1", "run.name=it", "task.save_as=fast"]
    lines = tmp_path / "outputs" / "it" / "tune.jsonl"
    kill_when(given, lines, cwd=tmp_path)
    first = lines.read_text()
    done = run_ok(*given, cwd=tmp_path)
    assert lines.read_text().startswith(first)
    trials = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [trial["status"] for trial in trials] == ["measured", "measured", "failed"]
    assert trials[1]["line"]["model"] == "micro" and trials[1]["line"]["settings"]["data"] == "synthetic"
    assert "xla_no_such_flag" in done.stdout and "tokens/s" in done.stdout
    best = max(trials[:2], key=lambda trial: trial["line"]["tokens_per_second"])
    run_facts = facts(tmp_path / "outputs" / "it")
    assert run_facts["status"] == "finished" and run_facts["best"]["key"] == best["key"]
    assert len(run_facts["sessions"]) == 2

    run_ok("--config-dir", "conf", "experiment=fast", "debug=one_step", "run.name=after", cwd=tmp_path)
    train = compose(["experiment=fast"], str(tmp_path / "conf")).config.train
    assert train.per_device_batch_size * train.grad_accum == 2 and train.seq_len == 16


@pytest.mark.exhaustive
def test_a_search_in_two_processes_times_the_candidates_on_the_devices_of_both(tmp_path: Path) -> None:
    given = ["task=tune", *SMALL, "task.space=['train.per_device_batch_size=2,1']", "task.search=grid", "task.steps=1"]
    run_processes(2, *given, "task.finalists=1", "run.name=it", cwd=tmp_path, timeout=600)
    trials = [json.loads(line) for line in (tmp_path / "outputs" / "it" / "tune.jsonl").read_text().splitlines()]
    config, key = compose(given).config, "train.per_device_batch_size"
    # A value of the config itself is the same candidate.
    candidates: list[Candidate] = [{}, {key: f"{key}=1"}]
    expected = [digest(bench_config(apply_candidate(config, item, Batch.same), 1)) for item in candidates]
    assert [(trial["status"], trial["key"]) for trial in trials] == [("measured", name) for name in expected]
    assert [trial["line"]["devices"] for trial in trials] == [2, 2]
    assert facts(tmp_path / "outputs" / "it")["status"] == "finished"


@pytest.mark.slow
def test_an_experiment_is_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "fast.yaml").write_text("mine")
    config = compose(["task=tune", *SMALL, "task.save_as=fast"]).config
    with pytest.raises(ConfigError, match="already exists"):
        tasks.run(config, choices={}, overrides=[], path=tmp_path / "it")
    assert not (tmp_path / "it").exists() and (tmp_path / "conf/experiment/fast.yaml").read_text() == "mine"
