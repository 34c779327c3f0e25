"""`maxhydra runs` as used by people and by scripts."""

import csv
import io
import json
import re
import shlex
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from maxhydra.cli.main import run as maxhydra
from maxhydra.config.compose.composer import compose
from maxhydra.record import RunDirectory
from maxhydra.record.provenance import code
from maxhydra.runs.dashboard import Dashboard
from maxhydra.runs.registry import Registry
from maxhydra.runs.seeds import t_quantile
from tests.support import cli
from tests.support.run_folders import change_facts, write_run
from tests.support.skips import import_optional

ROOT = Path(__file__).parents[2]


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs"
    for number, rate in enumerate([1e-4, 1e-3, 3e-3]):
        created = f"2026-03-0{number + 1}T12:00:00Z"
        write_run(folder / "lr" / f"{number}_learning_rate={rate}", rate=rate, created=created)
    write_run(folder / "alone", rate=2e-3, status="failed", steps=5, created="2026-03-09T12:00:00Z")
    return folder


@pytest.fixture
def runs(outputs, capsys):
    """Exit code, stdout and stderr of `maxhydra runs ...`."""

    def call(*arguments):
        code = maxhydra(["runs", *arguments])
        return code, *capsys.readouterr()

    return call


def test_listing(runs):
    code, out, err = runs("list")
    assert code == 0 and not err
    assert [line.split()[0] for line in out.splitlines()] == [
        "run",
        "alone",
        "lr/2_learning_rate=0.003",
        "lr/1_learning_rate=0.001",
        "lr/0_learning_rate=0.0001",
    ]
    code, out, _ = runs("list", "sweep=lr", "--sort", "eval/loss", "-c", "optimizer.learning_rate", "-n", "2")
    assert "0.001  " in out.splitlines()[1] and out.splitlines()[-1] == "2 of 3 runs; -n 0 shows all"
    code, out, _ = runs("list", "--json", "status=finished", "-c", "run.seed")
    listed = json.loads(out)
    assert [run["path"][:4] for run in listed] == ["lr/2", "lr/1", "lr/0"] and listed[0]["run.seed"] == 0
    assert runs("list", "tag=none")[1] == "no run matches these conditions\n"


def test_damage_is_reported_on_stderr_only(runs, outputs):
    (outputs / "alone" / "run.json").write_text("{")
    code, out, err = runs("list", "--json")
    listed = {run["path"]: run["status"] for run in json.loads(out)}
    assert code == 0 and len(listed) == 4 and listed["alone"] == "lost"
    assert err.startswith("maxhydra: outputs/alone/run.json: is not JSON") and err.count("\n") == 1


def test_best_show_and_diff(runs):
    code, out, _ = runs("best")
    assert code == 0 and out.splitlines()[1].startswith("lr/1_")
    assert out.splitlines()[-1].endswith("maxhydra optimizer.learning_rate=0.001")
    first = json.loads(runs("best", "--json", "-n", "1")[1])
    assert [run["path"] for run in first] == ["lr/1_learning_rate=0.001"] and first[0]["rerun"].startswith("cd ")
    code, out, _ = runs("show", "alone")
    assert "status        failed" in out and "optimizer.learning_rate = 0.002" in out
    shown = json.loads(runs("show", "lr/1", "--json")[1])
    assert shown["config"]["optimizer.learning_rate"] == 0.001 and shown["metrics"]["eval/loss"] == pytest.approx(2.625)
    code, out, _ = runs("diff", "lr/0", "lr/2")
    assert "optimizer.learning_rate" in out and "code and machine: no difference" in out
    assert json.loads(runs("diff", "lr/0", "lr/2", "--json")[1])["config"]["optimizer.learning_rate"] == [0.0001, 0.003]


def test_best_averages_over_seeds(runs, outputs):
    """Margins are Student's: t = 4.303 for three values and 95 % (compared with a table of quantiles)."""
    for seed, loss in enumerate([2.0, 2.2, 2.7], start=1):
        folder = write_run(outputs / "seeds" / f"{seed}", rate=5e-3, seed=seed)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 40, "eval/loss": loss}) + "\n")
    code, out, _ = runs("best", "--seeds", "--json", "-n", "1", "optimizer.learning_rate=5e-3")
    (group,) = json.loads(out)
    assert code == 0 and group["mean"] == pytest.approx(2.3) and len(group["runs"]) == 3
    assert group["margin"] == pytest.approx(4.302653 * statistics.stdev([2.0, 2.2, 2.7]) / 3**0.5)
    lines = runs("best", "--seeds")[1].splitlines()
    assert lines[0].split() == ["optimizer.learning_rate", "eval/loss", "seeds", "best", "run"]
    assert lines[1].split()[:5] == ["0.005", "2.300", "±", "0.9", "3"] and lines[-1].startswith("again: ")
    degrees = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 10: 2.2281, 30: 2.0423, 200: 1.9719}
    assert {n: round(t_quantile(n), 4) for n in degrees} == degrees


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lst"], "did you mean 'list'?"),
        (["show", "lr/9"], "is not a known run"),
        (["show", "lr/"], "is ambiguous: 3 runs match"),
        (["show", "alune"], "did you mean 'alone'?"),
        (["list", "--sort", "eval/los"], "did you mean 'eval/loss'?"),
        (["list", "--sorted"], "unrecognized arguments"),
        (["best", "--metric", "reward"], "is not a setting or a metric of any run"),
        (["best", "sweep=nothing"], "runs best=sweep=nothing: no run matches these conditions"),
        (["list", "eval/loss << 2"], "eval/loss << 2: has two operators"),
        (["list", "optimizer.learning_rate>abc"], "compares numbers with 'abc'"),
        (["diff", "alone", "alone"], "needs two different runs"),
        (["export", "x.xls"], "accepted: .csv, .parquet"),
        (["gc"], "needs a rule"),
        (["gc", "--status", "finishd", "--older", "5x"], "no such status"),
        (["gc", "--older", "5x"], "30m, 12h, 7d, 2w"),
        (["gc", "sweep=lr"], "stdin is not a terminal"),
        (["tag", "alone", "-r", "x"], "the run has no such tag"),
        (["list", "-o", "nowhere"], "is not a folder"),
        (["rerun", "alone"], "the code has changed"),
        (["serve", "--port", "99999"], "cannot listen on this port"),
    ],
)
def test_mistakes_give_one_clear_message(runs, outputs, arguments, message, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, _, err = runs(*arguments)
    assert code == 2 and message in err and "Traceback" not in err
    assert len(list(outputs.rglob("run.json"))) == 4


@pytest.mark.slow
def test_labels_of_a_running_run_are_preserved(runs, outputs):
    live = RunDirectory(outputs / "live")
    live.start("", {"tags": ["first", "second"]})
    assert runs("tag", "live", "keep", "-r", "first")[1] == "live: second keep\n"
    runs("note", "live", "why not")
    live.update(timings={"compile": 1.0})
    assert runs("note", "live")[1] == "live: why not\n"
    live.finish("finished")
    again = RunDirectory(outputs / "live")
    again.start("", {"tags": ["first", "second"]})
    assert again.read()["tags"] == ["second", "keep"] and again.read()["notes"] == "why not"
    again.finish("finished")
    assert [run["path"] for run in json.loads(runs("list", "tag=keep", "--json")[1])] == ["live"]


def test_concurrent_labels_are_all_stored(outputs):
    folder = outputs / "alone"
    threads = [threading.Thread(target=RunDirectory(folder).label, kwargs={"add": [f"t{i}"]}) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(RunDirectory(folder).read()["tags"]) == [f"t{i}" for i in range(8)]


@pytest.mark.parametrize("damage", ["{", "[]", '{"tags": 3}'])
def test_unreadable_labels_are_ignored_and_not_overwritten(runs, outputs, damage):
    labels = outputs / "lr" / "1_learning_rate=0.001" / "labels.json"
    labels.write_text(damage)
    for arguments in (
        ["best", "sweep=lr"],
        ["show", "lr/1"],
        ["report", "lr"],
        ["report", "lr/1"],
        ["diff", "lr/0", "lr/1"],
    ):
        assert runs(*arguments)[0] == 0
    for arguments in (["tag", "lr/1", "x"], ["note", "lr/1", "y"]):
        code, _, err = runs(*arguments)
        assert code == 2 and "labels.json: cannot be read" in err and labels.read_text() == damage


def test_export(runs, outputs):
    assert runs("export", "all.csv", "sweep=lr")[0] == 0
    with open("all.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["optimizer.learning_rate"]) for row in rows] == [0.003, 0.001, 0.0001]
    parquet = import_optional("pyarrow.parquet", extra="data")
    assert runs("export", "all.parquet")[0] == 0
    table = parquet.read_table("all.parquet").to_pydict()
    assert table["metric:eval/loss"][2] == pytest.approx(2.625) and table["value"][0] is None


def test_gc_deletes_exactly_what_the_rules_allow(runs, outputs):
    for folder in outputs.rglob("run.json"):
        (folder.parent / "checkpoints" / "20").mkdir(parents=True)
    live = RunDirectory(outputs / "live")
    live.start("", {})
    code, out, _ = runs("gc", "sweep=lr", "--keep-best", "1", "--checkpoints", "--yes")
    assert code == 0 and "the checkpoints of 2 runs" in out
    remaining = sorted(path.parent.relative_to(outputs).as_posix() for path in outputs.rglob("checkpoints"))
    assert remaining == ["alone", "lr/1_learning_rate=0.001"]
    assert runs("gc", "--status", "failed", "--older", "1d", "--yes")[0] == 0
    assert runs("gc", "path~l", "--status", "finished", "--older", "52000w", "--yes")[1] == "no runs to delete\n"
    assert runs("gc", "path~l", "--keep-best", "1", "-m", "eval/loss", "--yes")[0] == 0
    assert sorted(path.parent.name for path in outputs.rglob("run.json")) == ["1_learning_rate=0.001", "live"]
    live.finish("finished")


@pytest.mark.parametrize("flags", [["--checkpoints"], []])
def test_gc_keeps_a_run_that_was_resumed_meanwhile(runs, outputs, flags):
    """run.json may say lost for a run whose host was silent for long, or may be read before the run was resumed."""
    folders = sorted((outputs / "lr").iterdir())
    for folder in folders:
        (folder / "checkpoints" / "20").mkdir(parents=True)
    holder = "import fcntl, os, sys; h = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.lockf(h, fcntl.LOCK_EX); "
    holder += "print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(folders[1] / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        _, out, err = runs("gc", "sweep=lr", "--yes", *flags)
        other.stdin.close()
    assert "1_learning_rate=0.001 was not deleted" in err and "2 runs" in out.splitlines()[-1]
    assert [folder for folder in folders if (folder / "checkpoints" / "20").exists()] == folders[1:2]


def test_report(runs, outputs):
    assert runs("report", "lr")[1] == "outputs/lr/sweep.html\n"
    assert runs("report", "alone")[1] == "outputs/alone/report.html\n"
    assert runs("report", "--metric", "loss", "--max", "--to", "all.html")[1] == "all.html\n"
    page = Path("all.html").read_text()
    assert "loss, larger is better" in page and "Settings varied" in page
    for metrics in outputs.rglob("metrics.jsonl"):
        metrics.unlink()
    assert runs("report", "lr")[0] == 0 and "No metrics were written." in (outputs / "lr" / "sweep.html").read_text()


def test_a_report_with_an_infinite_result_is_still_written(runs, outputs):
    """As strict JSON, the only kind that browsers parse, and with a scale that excludes that run."""
    for metrics in (outputs / "lr").rglob("metrics.jsonl"):
        value = '"Infinity"' if "1_" in metrics.parent.name else "2.5"
        metrics.write_text(f'{{"step": 1, "loss": 3.0, "eval/loss": {value}}}\n')
    assert runs("report", "lr", "-m", "eval/loss")[0] == 0
    page = (outputs / "lr" / "sweep.html").read_text()
    text = page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    data = json.loads(text, parse_constant=pytest.fail)
    names = [line["run"] for line in data["lines"]]
    assert names and all(not name.startswith("1_") for name in names)
    assert "∞" in page


def test_tail(runs, outputs):
    _, out, _ = runs("tail", "lr/1", "-n", "1", "-f")
    assert out.splitlines() == [
        "2026-03-04 12:01:00 INFO end of 1_learning_rate=0.001",
        "outputs/lr/1_learning_rate=0.001: finished: all done",
    ]


@pytest.mark.slow
def test_rerun_and_resume_use_the_original_overrides(runs, outputs):
    git, _ = code()
    folder = outputs / "lr" / "1_learning_rate=0.001"
    change_facts(folder, git={**git, "sha": "b" * 40}, command=["maxhydra", "-m", "-cd", "my conf", "x=1,2"])
    exit_code, _, err = runs("rerun", "lr/1")
    assert exit_code == 2 and "commit bbbbbbbb" in err and "--anyway" in err
    out = runs("rerun", "lr/1", "run.seed=1", "--anyway", "--dry-run")[1]
    command = ["maxhydra", "-cd", "my conf", "optimizer.learning_rate=0.001", "run.seed=1"]
    assert shlex.split(out) == ["cd", str(folder.parent), "&&", *command]
    change_facts(folder, command=["maxhydra", "job", "job.yaml"], config_dir="/my conf")
    out = runs("rerun", "lr/1", "--anyway", "--dry-run")[1]
    assert shlex.split(out)[3:] == ["maxhydra", "--config-dir", "/my conf", "optimizer.learning_rate=0.001"]
    out = runs("resume", "lr/1", "optimizer.learning_rate=1", "--dry-run")[1]
    assert shlex.split(out)[-3:] == [
        "optimizer.learning_rate=1",
        "run.outputs=..",
        "run.name='lr/1_learning_rate=0.001'",
    ]
    # Hydra parses the name as a single value.
    assert compose(shlex.split(out)[-1:], None).config.run.name == "lr/1_learning_rate=0.001"
    # Keys without effect, which earlier versions accepted, are left out, and those that another task does not use.
    change_facts(folder, overrides=["tracker.project=mine", "train.log_every=5"])
    assert shlex.split(runs("rerun", "lr/1", "--anyway", "--dry-run")[1])[-1] == "train.log_every=5"
    assert shlex.split(runs("rerun", "lr/1", "task=score", "--anyway", "--dry-run")[1])[-2:] == [
        "/my conf",
        "task=score",
    ]
    change_facts(folder, overrides=["tracker.api_key=***"])
    assert "is a secret, whose value was not stored" in runs("rerun", "lr/1", "--anyway", "--dry-run")[2]


def test_secrets_that_earlier_versions_stored_are_not_shown(outputs, runs):
    """In all files of a run folder; the folder itself is left as it is."""
    keys = [f"hf_{letter * 20}" for letter in "abcdefgh"]
    folders = sorted((outputs / "lr").iterdir())[:2]
    for number, folder in enumerate(folders):
        with (folder / "config.yaml").open("a") as file:
            file.write(f"tracker:\n  api_key: {number}-{keys[0]}\nformatting: {{url: 'https://me:{keys[1]}@host/'}}\n")
        session = {**json.loads((folder / "run.json").read_text())["sessions"][0], "command": ["m", "--token", keys[2]]}
        change_facts(
            folder,
            notes=f"uses {keys[3]}",
            tags=[keys[4]],
            reason=f"failed with {keys[5]}",
            command=["maxhydra", "--api-key", keys[6], f"tracker.api_key={keys[6]}"],
            overrides=[f"tracker.api_key={keys[6]}"],
            sessions=[session],
        )
        (folder / "log.txt").write_text(f"login with {keys[7]}\n")
    shown = [
        runs(*command)
        for command in (
            ["show", "lr/1"],
            ["show", "lr/1", "--all"],
            ["show", "lr/1", "--json"],
            ["list", "--json"],
            ["diff", "lr/0", "lr/1"],
            ["best", "--json"],
            ["tail", "lr/1"],
            ["note", "lr/1"],
            ["tag", "lr/1"],
            ["report", "lr"],
        )
    ]
    assert all(exit_code == 0 for exit_code, _, _ in shown), shown
    dashboard, paths = Dashboard(Registry(outputs)), [f"lr/{folder.name}" for folder in folders]
    pages = [dashboard.runs(""), dashboard.compare(paths), dashboard.log(paths[0]), dashboard.values("notes")]
    text = json.dumps([shown, pages]) + (outputs / "lr" / "sweep.html").read_text()
    assert [key for key in keys if key in text] == [] and "***" in text
    assert keys[6] in (folders[1] / "run.json").read_text()


def test_a_sweep_report_compares_trials_at_equal_steps(runs, tmp_path, monkeypatch):
    """A pruned trial has fewer steps, and a smaller loss than a finished one had by then."""
    monkeypatch.chdir(tmp_path)
    for number, (rate, steps, status) in enumerate(
        [(1e-3, 40, "finished"), (3e-3, 40, "finished"), (1e-2, 20, "pruned")]
    ):
        write_run(tmp_path / "outputs" / "s" / str(number), rate=rate, steps=steps, status=status)
    assert runs("report", "s")[0] == 0
    page = (tmp_path / "outputs" / "s" / "sweep.html").read_text()
    lines = json.loads(re.search(r'"lines": ?(\[.*?\]\}\])', page)[1])
    assert "eval/loss at step 20" in page and '<span class="status pruned">1 pruned</span>' in page
    assert [line["run"] for line in lines] == ["0", "1", "2"]
    assert lines[0]["values"][-1] == pytest.approx(2 + 5 / 20 + 0.5)
    assert [run["path"] for run in json.loads(runs("list", "status=pruned", "--json")[1])] == ["s/2"]


@pytest.mark.slow
def test_no_verb_imports_jax(outputs):
    verbs = [path.stem for path in (ROOT / "maxhydra" / "cli" / "runs").glob("[a-z]*.py")]
    check = f"""
import importlib, sys
from maxhydra.cli.main import run
run(["runs", "list"]), run(["runs", "best"]), run(["runs", "report"])
for verb in {verbs}: importlib.import_module(f"maxhydra.cli.runs.{{verb}}")
assert not {{"jax", "numpy", "hydra", "omegaconf", "pandas", "pyarrow"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", check], check=True, env=cli.environment(), stdout=subprocess.DEVNULL)


@pytest.mark.exhaustive
def test_a_job_of_a_sweep_can_be_resumed_and_rerun(tmp_path):
    """The sweep's command names all jobs; each is restarted with its own overrides."""
    small = [*cli.SMALL, "train.eval_batches=0", "optimizer/schedule=constant", "checkpoint.mode=synchronous"]
    cli.run_ok("-m", *small, "optimizer.learning_rate=1e-3", "train.steps=2", "run.name=lr", cwd=tmp_path)
    job = "lr/0"
    cli.run_ok("runs", "resume", job, "train.steps=4", cwd=tmp_path)
    folder = tmp_path / "outputs" / job
    assert sorted(cli.losses(folder)) == [1, 2, 3, 4] and len(cli.facts(folder)["sessions"]) == 2
    cli.run_ok("runs", "rerun", job, "run.name=again", cwd=tmp_path)
    assert cli.losses(tmp_path / "outputs" / "again") == cli.losses(folder)
