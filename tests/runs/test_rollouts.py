"""Rollouts in the command, the report and the dashboard."""

import json
from pathlib import Path

import pytest

from maxhydra.cli.main import run as maxhydra
from maxhydra.record import RunDirectory
from maxhydra.record.rollout_store import RolloutWriter
from maxhydra.record.rollouts import FOLDER, TRAIN, Query
from maxhydra.runs.dashboard import Dashboard
from maxhydra.runs.registry import Registry
from maxhydra.runs.report import write_report
from maxhydra.runs.rollouts import describe, find_rollouts
from tests.support.run_folders import write_run

EVIL = "<img src=x onerror=alert(1)>"
SECRET = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "outputs" / "it")
    for kind, sign in (("train", 1), ("eval", -1)):
        writer = RolloutWriter(folder / "rollouts", kind, keep=1000)
        for step in (0, 10, 20):
            writer.append(step, [record(step, sign * number) for number in range(1, 4)])
    return folder


def record(step: int, number: int) -> dict[str, object]:
    return {
        "prompt_number": number,
        "sample": 0,
        "prompt": f"{EVIL} {number} {SECRET}",
        "completion": f"text {number} at {step}",
        "expected": "7",
        "reward": step / 10 + abs(number) / 100,
        "terms": {"exact": 1.0, "brief": 0.5},
        "tokens": 4,
        "finish": "length",
        "is_used": number > 1,
    }


def shown(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> str:
    assert maxhydra(["runs", "rollouts", "it", *arguments, "-o", str(run.parent)]) == 0
    return capsys.readouterr().out


def test_episodes_show_their_turns_without_secrets(tmp_path: Path) -> None:
    turns = [{"role": "tool", "content": SECRET}, {"role": "assistant", "content": "7"}]
    episode = {**record(1, 2), "turns": turns, "failure": "crashed its process"}
    RolloutWriter(tmp_path / FOLDER, TRAIN, keep=100).append(1, [episode])
    (found,) = find_rollouts(tmp_path, Query()).records
    assert describe(found).endswith("2 messages · truncated · environment crashed its process")
    assert found["turns"][1] == turns[1] and SECRET not in str(found)


def test_the_command_shows_what_matches(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, run, "--order", "best", "-n", "2")
    assert "step 20 · prompt 3.0 · reward 2.03 · exact 1, brief 0.5 · 4 tokens · truncated\n" in text
    assert "text 3 at 20" in text and "text 2 at 20" in text and "text 1 at 20" not in text
    assert "2 of 9 completions" in text and SECRET not in text
    assert "not used for training" in shown(capsys, run, "--prompt", "1", "--steps", "10")
    found = json.loads(shown(capsys, run, "--kind", "eval", "--prompt=-3", "--order", "oldest", "--json"))
    assert [item["completion"] for item in found["rollouts"]] == [f"text -3 at {step}" for step in (0, 10, 20)]
    assert json.loads(shown(capsys, run, "--text", "TEXT 2 AT 1", "--json"))["total"] == 1


@pytest.mark.parametrize(
    "arguments", [["--kind", "test"], ["--steps", "a:"], ["--reward", "x"], ["--order", "random"], ["--prompt", "1.5"]]
)
def test_bad_filters_are_rejected(run: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert maxhydra(["runs", "rollouts", "it", *arguments, "-o", str(run.parent)]) == 2
    assert arguments[0].lstrip("-") in capsys.readouterr().err


def test_a_run_without_rollouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "it")
    assert maxhydra(["runs", "rollouts", "it", "-o", str(tmp_path)]) == 2
    assert "has no rollouts" in capsys.readouterr().err


def test_the_report_shows_held_out_prompts_over_steps(run: Path) -> None:
    page = write_report(RunDirectory(run)).read_text()
    assert "Step 0" in page and "Step 20" in page and "text -3 at 10 (1.03)" in page
    assert EVIL not in page and SECRET not in page
    for path in (run / "rollouts").glob("eval-*"):
        path.unlink()
    assert "text 3 at 20" in write_report(RunDirectory(run)).read_text()


def test_the_dashboard_returns_pages(run: Path) -> None:
    dashboard = Dashboard(Registry(run.parent))
    dashboard.runs("")
    first = dashboard.rollouts("it", {"order": "worst", "limit": "2"})
    assert (first["kinds"], first["total"]) == (["train", "eval"], 9)
    assert [item["completion"] for item in first["records"]] == ["text 1 at 0", "text 2 at 0"]
    second = dashboard.rollouts("it", {"order": "worst", "limit": "2", "start": "2"})
    assert second["records"][0]["completion"] == "text 3 at 0" and "reward" in second["records"][0]["about"]
    with pytest.raises(KeyError):
        dashboard.rollouts("../it", {})
