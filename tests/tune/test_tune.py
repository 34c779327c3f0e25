"""task=tune: what is tried in which order, what a candidate means, and that its experiment is what it says."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest

from maxhydra import tasks
from maxhydra.config import Config, ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.tune import Batch, TuneTask
from maxhydra.config.serialize import to_yaml
from maxhydra.runtime.hardware_options import hardware_options
from maxhydra.tune.experiment import experiment
from maxhydra.tune.search import OutOfTime, eliminate, grid, one_by_one
from maxhydra.tune.space import Axis, Candidate, axes, settled
from maxhydra.tune.tuner import needs_less
from tests.support.cli import facts, finished, kill_when

SPACE = [Axis("a", ("a=0", "a=1", "a=2")), Axis("b", ("b=0", "b=1")), Axis("c", ("c=0", "c=1", "c=2"))]


ALL = [
    {key: f"{key}={value}" for key, value in zip("abc", choice, strict=True)}
    for choice in itertools.product(range(3), range(2), range(3))
]


class Oven:
    """Times by a formula of the test's own, with a record of what was asked."""

    def __init__(self, limit: float = math.inf, calls: int = 10_000):
        self.asked: list[tuple[str, int]] = []
        self.limit, self.calls = limit, calls

    def __call__(self, candidate: Candidate, steps: int) -> float:
        a, b, c = (int(candidate.get(key, f"{key}=0")[2:]) for key in "abc")
        if (f"{a}{b}{c}", steps) not in self.asked:
            if len(self.asked) == self.calls:
                raise OutOfTime
            self.asked.append((f"{a}{b}{c}", steps))
        # What is later in a list needs less memory; a and b would rather agree.
        memory = 10 - 2 * a - b - c
        return math.inf if memory > self.limit else 1 + (a - 1) ** 2 + 0.5 * (a != b) + 0.1 * (c - 1.1) ** 2


def test_one_setting_at_a_time_finds_what_all_combinations_find() -> None:
    few, many = Oven(), Oven()
    tried = one_by_one(SPACE, few, steps=2)
    assert min(few(one, 2) for one in tried) == min(many(one, 2) for one in ALL)
    assert len(few.asked) < 12 < len(many.asked) == 18


def test_where_nothing_runs_the_search_goes_towards_less_memory() -> None:
    """As given, and any single change of it, needs too much; two changes together do not."""
    oven = Oven(limit=5)
    tried = one_by_one(SPACE, oven, steps=1)
    assert math.isinf(oven({}, 1)) and any(math.isfinite(oven(one, 1)) for one in tried)


@pytest.mark.parametrize(("cost", "is_close"), [(1.01, True), (1.3, False)])
def test_parts_of_a_setting_are_tried_where_it_is_close_and_fall_with_it(cost: float, is_close: bool) -> None:
    """Kind b costs more than a; its part 2 makes it better than a, until x comes, with which a is the best of all."""
    space = [
        Axis("kind", ("kind=a", "kind=b")),
        Axis("part", ("part=1", "part=2"), under={"kind": "kind=b"}),
        Axis("x", ("x=0", "x=1")),
    ]
    asked: list[Candidate] = []

    def time(candidate: Candidate, steps: int) -> float:
        asked.append(candidate)
        is_b, is_2, is_x = (one in candidate.values() for one in ("kind=b", "part=2", "x=1"))
        return (cost if is_b else 1.0) - 0.1 * is_2 - is_x * (0.3 if is_b else 0.5)

    best = min(one_by_one(space, time, steps=1), key=lambda one: time(one, 1))
    assert best["x"] == "x=1" and "kind=b" not in best.values()
    assert ({"kind": "kind=b", "part": "part=2"} in asked) == is_close
    assert all(one["kind"] == "kind=b" for one in asked if "part" in one)


def test_finalists_are_timed_over_more_steps_and_halved() -> None:
    oven = Oven()
    tried = grid(SPACE, oven, steps=3)
    first = len(oven.asked)
    eliminate(tried, oven, steps=3, finalists=4)
    later = oven.asked[first:]
    assert [steps for _, steps in later] == [6] * 4 + [12] * 2
    fastest = min(ALL, key=lambda one: oven(one, 3))
    assert "".join(text[-1] for text in fastest.values()) in {name for name, steps in later if steps == 12}


def test_a_search_that_was_cut_short_goes_on_where_it_was() -> None:
    whole = Oven()
    one_by_one(SPACE, whole, steps=2)
    cut = Oven(calls=4)
    with pytest.raises(OutOfTime):
        one_by_one(SPACE, cut, steps=2)
    cut.calls = 10_000
    one_by_one(SPACE, cut, steps=2)
    assert cut.asked == whole.asked


def test_a_step_keeps_its_sequences() -> None:
    config = compose(["task=tune", "model=micro", "train.per_device_batch_size=8", "train.grad_accum=2"]).config
    assert isinstance(config.task, TuneTask)
    found = {axis.key: axis.values for axis in axes(config, config.task, hardware_options()["cpu"])}
    for override in found["train.per_device_batch_size"]:
        train = settled(config, {"train.per_device_batch_size": override}, Batch.same).train
        assert train.per_device_batch_size * train.grad_accum == 16
    odd = {"train.per_device_batch_size": "train.per_device_batch_size=3"}
    assert settled(config, odd, Batch.any).train.grad_accum == 2
    with pytest.raises(ConfigError, match="does not divide the 16 sequences"):
        settled(config, odd, Batch.same)


def test_what_surely_needs_less_memory() -> None:
    config = compose(["task=tune", "model=micro", "train.per_device_batch_size=8"]).config

    def made(batch: int, policy: str, unroll: int = 2) -> Config:
        overrides = (
            f"train.per_device_batch_size={batch}",
            f"model.remat.policy={policy}",
            f"model.scan_unroll={unroll}",
        )
        return settled(config, {text.partition("=")[0]: text for text in overrides}, Batch.same)

    assert needs_less(made(4, "minimal"), made(8, "none")) and needs_less(made(4, "full"), made(4, "minimal"))
    assert not needs_less(made(8, "full"), made(4, "none")) and not needs_less(made(4, "none"), made(8, "full"))
    assert not needs_less(made(4, "full", unroll=1), made(8, "none"))


def test_all_that_is_wrong_with_a_space_is_said_at_once() -> None:
    space = ["train.per_device_batch_size=4,5", "model.remat.polcy=none", "~model.remat", "model.scan_unroll=0,1"]
    config = compose(["task=tune", "model=micro", f"task.space={json.dumps(space)}"]).config
    assert isinstance(config.task, TuneTask)
    with pytest.raises(ConfigError) as caught:
        axes(config, config.task, hardware_options()["cpu"])
    said = str(caught.value)
    for word in ("does not divide the 64", "model.remat.polcy", "~model.remat", "model.scan_unroll=0"):
        assert word in said


def test_the_experiment_composes_to_what_was_tuned(tmp_path: Path) -> None:
    given = ["task=tune", "model=llama3.2-1b", "optimizer=adafactor", "experiment=shakespeare", "train.seq_len=512",
             "+hardware.flag_sets.mine=['--xla_a=1']", "run.name=x", "task.minutes=1"]  # fmt: skip
    composed = compose(given)
    candidate = {
        "train.per_device_batch_size": "train.per_device_batch_size=4",
        "hardware.xla_flags": "hardware.xla_flags=['--xla_gpu_enable_triton_gemm=false','--xla_b=']",
        "model.remat.policy": "model.remat.policy=minimal",
    }
    tuned = settled(composed.config, candidate, Batch.any)
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


@pytest.mark.slow
def test_a_search_survives_crashes_and_a_kill_and_its_experiment_runs(tmp_path: Path) -> None:
    space = "task.space=['train.per_device_batch_size=2,1','hardware.xla_flags=[],[\\'--xla_no_such_flag=1\\']']"
    given = ["task=tune", *SMALL, space, "task.steps=1", "task.finalists=1", "run.name=it", "task.save_as=fast"]
    lines = tmp_path / "outputs" / "it" / "tune.jsonl"
    kill_when(given, lines, cwd=tmp_path)
    first = lines.read_text()
    done = finished(*given, cwd=tmp_path)
    assert lines.read_text().startswith(first)
    trials = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [trial["status"] for trial in trials] == ["measured", "measured", "failed"]
    assert trials[1]["line"]["model"] == "micro" and trials[1]["line"]["settings"]["data"] == "synthetic"
    assert "xla_no_such_flag" in done.stdout and "tokens/s" in done.stdout
    best = max(trials[:2], key=lambda trial: trial["line"]["tokens_per_second"])
    told = facts(tmp_path / "outputs" / "it")
    assert told["status"] == "finished" and told["best"]["key"] == best["key"] and len(told["sessions"]) == 2

    finished("--config-dir", "conf", "experiment=fast", "debug=one_step", "run.name=after", cwd=tmp_path)
    train = compose(["experiment=fast"], str(tmp_path / "conf")).config.train
    assert train.per_device_batch_size * train.grad_accum == 2 and train.seq_len == 16


def test_an_experiment_is_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "fast.yaml").write_text("mine")
    config = compose(["task=tune", *SMALL, "task.save_as=fast"]).config
    with pytest.raises(ConfigError, match="is there already"):
        tasks.run(config, choices={}, overrides=[], path=tmp_path / "it")
    assert not (tmp_path / "it").exists() and (tmp_path / "conf/experiment/fast.yaml").read_text() == "mine"
