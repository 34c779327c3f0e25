"""Live runs, stopped, resumed and cancelled with the buttons of the dashboard, which is a separate process."""

import os
from pathlib import Path

import pytest

from tests.browser.test_browser import check_clean, press, until
from tests.support import cli
from tests.support.polling import wait_for

# A callback that keeps a run alive for as long as a file exists.
PACE = """
import os, time

class Pace:
    def __init__(self, session):
        pass

    def step(self, step, metrics):
        if os.path.exists("slow"):
            time.sleep(0.1)
"""
RUN = [*cli.SMALL, "train.eval_batches=0", "optimizer/schedule=constant", "train.steps=400"]
RUN += ["+train.callbacks={pace: {function: 'pace:Pace'}}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("actions")
    (folder / "pace.py").write_text(PACE)
    (folder / "slow").touch()
    (folder / "outputs").mkdir()
    return folder


@pytest.fixture(scope="module")
def address(folder: Path):
    """URL of `maxhydra runs serve`."""
    with (folder / "serve.txt").open("w") as console, open(os.devnull) as null:
        server = cli.start("runs", "serve", "--port", "0", cwd=folder, streams=(null, console, console))
    wait_for(lambda: "http://" in (folder / "serve.txt").read_text())
    yield (folder / "serve.txt").read_text().split()[0]
    server.kill()
    server.wait()


def confirm(browser) -> str:
    """Press the button of the dialog; returns the message of the action."""
    press(browser, "#dialog-go")
    done = "(!document.querySelector('#dialog').open && document.querySelector('#toast').textContent)"
    return until(browser, f"document.querySelector('#dialog-problem').textContent || {done}")


def status(run: str) -> str:
    """Script: status of a run in the list."""
    return f"document.querySelector('tr[data-run=\"{run}\"] .status')?.textContent"


@pytest.mark.exhaustive
def test_a_run_is_stopped_and_resumed_from_the_page(window, folder, address):
    process = cli.start_silent(*RUN, "run.name=it", cwd=folder)
    run = folder / "outputs" / "it"
    wait_for(lambda: (run / "metrics.jsonl").exists())
    window.get(address)
    until(window, f"{status('it')} === 'running'")
    press(window, 'tr[data-run="it"] .run')
    until(window, "document.querySelector('[data-action=stop]')")
    press(window, "[data-action=stop]")
    assert confirm(window) == "it saves a checkpoint and stops"
    process.wait(240)
    until(window, f"{status('it')} === 'preempted' && document.querySelector('[data-action=resume]')")
    saved = cli.facts(run)["end_step"]
    assert 0 < saved < 400 and (run / "checkpoints" / str(saved)).is_dir()
    (folder / "slow").rename(folder / "fast")
    press(window, "[data-action=resume]")
    assert confirm(window).startswith(("it resumes; output: ", "it was resumed and has ended"))
    until(window, f"{status('it')} === 'finished'")
    (folder / "fast").rename(folder / "slow")
    assert sorted(cli.losses(run)) == list(range(1, 401))
    assert [session["status"] for session in cli.facts(run)["sessions"]] == ["preempted", "finished"]
    check_clean(window, address)


@pytest.mark.exhaustive
def test_a_running_sweep_is_cancelled_from_the_page(window, folder, address):
    process = cli.start_silent("-m", *RUN, "run.name=lr", "run.seed=1,2", cwd=folder)
    wait_for(lambda: any(folder.glob("outputs/lr/*/metrics.jsonl")))
    window.get("about:blank")
    window.get(address + "#sweep=lr&tab=sweep")
    until(window, "document.querySelector('#sweep-head .bad')")
    press(window, "#sweep-head .bad")
    assert "asked to stop" in confirm(window)
    process.wait(240)
    until(window, "!document.querySelector('#sweep-head .bad')")
    ended = [cli.facts(path.parent)["status"] for path in folder.glob("outputs/lr/*/run.json")]
    assert ended and set(ended) == {"preempted"}
    check_clean(window, address)
