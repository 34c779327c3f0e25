"""Summaries of profiles: time per operation without the operations inside it, idle time, collectives, parts."""

import gzip
import json
import re
from pathlib import Path

import pytest

from maxhydra.cli.main import run as maxhydra
from maxhydra.record import RunDirectory
from maxhydra.runs import write_report
from maxhydra.runs.profile import (
    SCOPES,
    part_of,
    profile_folders,
    shorten_source,
    summarize_events,
    summarize_profile,
)
from tests.support.run_folders import write_run

ROOT = Path(__file__).parents[2]
NAMES = {
    "fusion.1": "jit(step)/jvp(while)/body/mlp/dot_general",
    "fusion.2": "jit(step)/transpose(jvp(while))/body/mlp/x",
}


def named(kind: str, pid: int, name: str, tid: int = 0) -> dict:
    return {"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_name", "args": {"name": name}}


def event(name: str, start: float, duration: float, pid: int = 1, tid: int = 0, **args: object) -> dict:
    return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": duration, "name": name, "args": args}


def gpu_trace() -> list[dict]:
    """Two steps of 1 ms: 400 us of compute, 200 us of NCCL, half of it alone, and idle time; per step and device."""
    events = [named("process", 9, "/host:CPU")]
    for device in (1, 2):
        events += [
            named("process", device, f"/device:GPU:{device - 1}"),
            named("thread", device, "Stream #13(Compute)", 1),
        ]
        events += [named("thread", device, "Stream #14(Collectives)", 2), named("thread", device, "XLA Ops", 3)]
        for start in (0.0, 1000.0):
            at = {"pid": device}
            events += [event("kernel_a", start, 300, tid=1, hlo_op="fusion.1", **at)]
            events += [event("kernel_b", start + 300, 100, tid=1, hlo_op="fusion.2", **at)]
            events += [event("ncclDevKernel_AllReduce", start + 300, 200, tid=2, hlo_op="all-reduce-start.1", **at)]
            events += [event("fusion.1", start, 300, tid=3, hlo_op="fusion.1", **at)]
        events += [event("end", 1990, 10, pid=device, tid=1)]
    return events + [event("train", 1000 * number, 5, pid=9, step_num=str(number)) for number in range(2)]


def test_overlapping_kernels_of_a_stream_count_once() -> None:
    kernels = [event("a", 0, 10), event("b", 9, 11), event("c", 20, 20)]
    trace = [named("process", 1, "/device:GPU:0"), named("thread", 1, "Stream #1"), *kernels]
    shares = {operation.name: operation.share for operation in summarize_events(trace, {}).operations}
    assert shares == pytest.approx({"a": 9 / 40, "b": 11 / 40, "c": 20 / 40})


def test_operations_of_unrolled_layers_are_added_up() -> None:
    kernels = [event("k", 10 * layer, 10, hlo_op=f"fusion.{layer}") for layer in range(4)]
    trace = [named("process", 1, "/device:GPU:0"), named("thread", 1, "Stream #1"), *kernels]
    names = dict.fromkeys(("fusion.0", "fusion.1", "fusion.2"), "jit(step)/jvp(mlp)/dot_general")
    found = [(item.name, item.source, item.calls, item.share) for item in summarize_events(trace, names).operations]
    assert found == [("fusion (3)", "mlp/dot_general", 3, 0.75), ("fusion.3", "", 1, 0.25)]


def test_streams_of_gpus() -> None:
    summary = summarize_events(gpu_trace(), NAMES)
    assert (summary.steps, summary.devices, summary.milliseconds) == (2, 2, 1.0)
    assert summary.idle == pytest.approx(1 - (500 + 500 + 10) / 2000)
    assert summary.collectives == pytest.approx(0.2) and summary.exposed == pytest.approx(0.1)
    first = summary.operations[0]
    assert (first.name, first.source, first.calls, first.milliseconds) == ("fusion.1", "mlp/dot_general", 4, 0.3)
    assert summary.parts["mlp"] == pytest.approx(0.3) and summary.parts["backward mlp"] == pytest.approx(0.1)


def test_a_loop_does_not_count_its_operations_twice() -> None:
    """As on a CPU, whose operations are events of the host, and on a TPU."""
    operations = [("while.1", 0, 100), ("fusion.1", 10, 40), ("fusion.1", 60, 30), ("copy", 100, 20)]
    events = [named("process", 1, "/host:CPU"), event("ThreadpoolListener", 0, 1000)]
    events += [event(name, start, time, hlo_op=name, device_ordinal="0") for name, start, time in operations]
    summary = summarize_events(events, {})
    times = {item.name: item.milliseconds * 1e3 for item in summary.operations}
    assert times == pytest.approx({"fusion.1": 70, "while.1": 30, "copy": 20}) and summary.idle == 0
    assert summary.steps == 1 and summary.collectives == 0


def test_sources_name_the_scopes_of_the_model() -> None:
    assert (
        shorten_source("jit(step)/transpose(jvp(while))/body/closed_call/mlp/dot_general") == "backward mlp/dot_general"
    )
    assert part_of("jit(step)/jvp(embedding)/jit(_take)/lt") == "embedding"
    assert part_of("jit(step)/transpose(jvp())/closed_call/norm/reduce_sum") == "backward norm"
    assert part_of("reduce_sum") == part_of("") == "other"


def test_every_named_scope_is_a_part() -> None:
    files = [path for folder in ("maxhydra", "kernels") for path in (ROOT / folder).rglob("*.py")]
    used = {scope for path in files for scope in re.findall(r'named_scope\("(\w+)"\)', path.read_text())}
    assert used == SCOPES


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a profile."""
    folder = tmp_path / "outputs" / "it"
    write_run(folder)
    trace = folder / "profile" / "step_00010" / "plugins" / "profile" / "2026"
    trace.mkdir(parents=True)
    (trace / "host.trace.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": gpu_trace()}).encode()))
    (folder / "profile" / "step_00010" / "operations.json").write_text(json.dumps(NAMES))
    return folder


def test_the_command_and_the_report_show_a_summary(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = ["-o", str(run.parent)]
    assert maxhydra(["runs", "profile", "it", *outputs]) == 0
    shown = capsys.readouterr().out
    assert "2 steps of 1.00 ms on 2 devices: idle 49.5%, collectives 20.0% (not overlapped 10.0%)" in shown
    assert "mlp 30.0%, other 20.5%, backward mlp 10.0%" in shown and "mlp/dot_general" in shown
    assert maxhydra(["runs", "profile", "it", "--json", *outputs]) == 0
    assert json.loads(capsys.readouterr().out)["step_00010"]["steps"] == 2
    page = write_report(RunDirectory(run)).read_text()
    assert "idle 49.5%" in page and "all-reduce-start.1" in page


def test_a_stored_summary_is_used_for_its_own_trace_only(run: Path) -> None:
    (folder,) = profile_folders(run)
    first = summarize_profile(folder)
    trace = folder / "plugins" / "profile" / "2026" / "host.trace.json.gz"
    trace.write_bytes(b"damaged")
    assert summarize_profile(folder) == first
    trace.parent.rename(trace.parent.with_name("2027"))
    with pytest.raises(ValueError, match="cannot be read"):
        summarize_profile(folder)


def test_problems_name_what_to_do(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (profile_folders(run)[0] / "plugins/profile/2026/host.trace.json.gz").write_bytes(b"damaged")
    assert maxhydra(["runs", "profile", "it", "-o", str(run.parent)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert "cannot be read" in write_report(RunDirectory(run)).read_text()
    write_run(run.parent / "plain")
    assert maxhydra(["runs", "profile", "plain", "-o", str(run.parent)]) == 2
    assert "profile.steps=[FIRST,LAST]" in capsys.readouterr().err
