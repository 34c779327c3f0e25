"""The report contains the run's values, runs no foreign script, needs no network and stays small."""

import base64
import hashlib
import html.parser
import json
import math
import random
import re
from pathlib import Path

import pytest

from maxhydra.record import MetricsWriter, RunDirectory
from maxhydra.runs import write_report
from maxhydra.runs.benchmarks import benchmarks_section
from maxhydra.runs.curves import decimate
from maxhydra.runs.settings import chosen_options, list_settings
from maxhydra.runs.summary import format_compact, format_duration, format_number, goodput

CONFIG = """
train: {steps: 300, seq_len: 1024, log_every: 10}
model: {emb_dim: 64, kinds: {layer: {attention: {window: 64, softcap: null}}}}
"""
VOID = {"meta", "input", "link", "br", "circle", "path"}


def write_run(path, steps=30, status="finished", reason="all done", rows=None, config=CONFIG, **facts):
    run = RunDirectory(path)
    run.start(config, {"task": "pretrain", "choices": {"model": "tiny"}, "devices": "1 x cpu", **facts})
    writer = MetricsWriter(run.metrics_path)
    for step in range(1, steps + 1):
        writer.write(step, rows(step) if rows else {"loss": 5 / step, "learning_rate": 1e-3, "tokens_per_second": 1e4})
        if step % 10 == 0 and rows is None:
            writer.write(step, {"eval/loss": 6 / step, "eval/tokens": 100})
    writer.close()
    if status != "running":
        run.finish(status, reason, parameters=1_234_567, timings={"compile": 2.5}, **facts)
    return run


class Page(html.parser.HTMLParser):
    """Elements of a page with their attributes and text; an unclosed element is an error."""

    def __init__(self, text):
        super().__init__()
        self.source, self.open, self.elements, self.texts = text, [], [], {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def report(run):
    return Page(write_report(run).read_text())


def test_values_are_shown(tmp_path):
    page = report(write_run(tmp_path / "a", sample="To be, or not", tags=["first"], notes="why not"))
    assert page.texts["h1"] == ["a"] and page.texts["pre"] == ["To be, or not"]
    values = dict(zip(page.texts["dt"], page.texts["dd"], strict=False))
    assert {"Eval loss", "Train loss", "Tokens / s", "Wall time", "Steps", "Parameters"} <= set(values)
    shown = " ".join(page.texts["dd"])
    for value in ("0.2000", "best 0.2000 at step 30", "0.1667", "10K", "1.23M", "of 300"):
        assert value in shown
    assert page.texts["h3"] == ["Loss", "Learning rate", "Tokens per second"]
    data = json.loads(page.texts["script"][0])
    train, evaluation = data["charts"][0]["lines"]
    assert train["steps"] == [1] * 30 and train["values"][:2] == [5, 2.5]
    assert evaluation["name"] == "eval" and evaluation["steps"] == [10, 10, 10] and evaluation["exact"]
    assert {"first", "finished", "Changed only"} <= {t for texts in page.texts.values() for t in texts}


def test_every_text_is_inert(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"

    def rows(step):
        return {"loss": 1.0, evil: 2.0}

    run = write_run(
        tmp_path / "a",
        rows=rows,
        name=evil,
        reason=evil,
        sample=evil,
        notes=evil,
        tags=[evil],
        devices=evil,
        config=f"train: {json.dumps({evil: evil})}",
    )
    page = report(run)
    assert page.texts["h1"] == [evil] and page.texts["title"] == [evil]
    assert [tag for tag, _ in page.elements].count("script") == 2
    assert "img" not in {tag for tag, _ in page.elements}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)


def test_the_policy_allows_only_this_script_and_style_and_no_network(tmp_path):
    page = report(write_run(tmp_path / "a"))
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for name, content in (("script", page.texts["script"][-1]), ("style", "".join(page.texts["style"]))):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    links = [a[key] for _, a in page.elements for key in ("src", "href", "srcset", "action", "data") if key in a]
    assert links and not [link for link in links if ":" in link or link.startswith("/")]
    assert not re.search(r"https?://|@import|url\(", page.source)
    assert not [a for _, a in page.elements if "style" in a]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_few_points(tmp_path, steps):
    page = report(write_run(tmp_path / "a", steps=steps))
    assert ("No metrics were written." in page.source) == (steps == 0)


def test_nan_is_null_and_reported(tmp_path):
    def rows(step):
        return {"loss": math.nan if step > 20 else 3.0, "grad_norm": math.inf}

    run = write_run(tmp_path / "a", rows=rows, status="failed", reason="step 31 is not finite")
    page = report(run)
    values = json.loads(page.texts["script"][0])["charts"][0]["lines"][0]["values"]
    assert values == [3.0] * 20 + [None] * 10
    assert "failed" in page.texts["span"] and "step 31 is not finite" in page.texts["span"]
    assert "NaN" in page.texts["dd"]
    labels = [a["aria-label"] for _, a in page.elements if a.get("role") == "img"]
    assert labels == [
        "Loss. train: 3.000 to 3.000, lowest 3.000 at step 1",
        "Gradient norm. gradient norm: never finite",
    ]


def test_a_running_run_and_one_without_config(tmp_path):
    page = report(write_run(tmp_path / "a", status="running", config=""))
    assert "running" in page.texts["span"] and "Config" not in page.texts["h2"]


@pytest.mark.slow
def test_sessions_and_resumes(tmp_path):
    write_run(tmp_path / "a", steps=10, status="preempted", reason="SIGTERM")
    run = RunDirectory(tmp_path / "a")
    run.start(CONFIG, {})
    run.update(start_step=10)
    run.finish("finished", end_step=30)
    page = report(run)
    assert json.loads(page.texts["script"][0])["resumes"] == [10]
    assert page.texts["td"].count("10 – 30") == 1 and "preempted" in page.texts["span"]


def test_metrics_of_other_tasks_are_plotted_too(tmp_path):
    page = report(write_run(tmp_path / "a", rows=lambda step: {"loss": 1.0, "reward/mean": step, "mfu": 0.4}))
    assert page.texts["h3"] == ["Loss", "Model FLOPs utilization", "reward/mean"]


def test_a_curve_ends_at_the_number_in_the_table(tmp_path):
    page = report(write_run(tmp_path / "a", rows=lambda step: {"loss": 1.9064768552780151}))
    last = json.loads(page.texts["script"][0])["charts"][0]["lines"][0]["values"][-1]
    assert "1.906" in page.texts["dd"] and f"{last:.4g}" == "1.906"


@pytest.mark.slow
def test_a_long_run_gives_a_small_page_with_its_extremes(tmp_path):
    rng = random.Random(0)
    names = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu")
    spike = {777: 1000.0, 15_001: -5.0}

    def rows(step):
        return {**{name: rng.uniform(0, 1) for name in names}, "grad_norm": spike.get(step, 0.5)}

    page = report(write_run(tmp_path / "a", steps=20_000, rows=rows))
    assert len(page.source.encode()) < 300_000
    line = json.loads(page.texts["script"][0])["charts"][2]["lines"][0]
    assert max(line["values"]) == 1000 and min(line["values"]) == -5
    assert sum(line["steps"]) == 20_000


def test_decimation_keeps_ends_extremes_and_nan():
    rng = random.Random(1)
    steps = list(range(0, 50_000, 5))
    values = [rng.gauss(0, 1) for _ in steps]
    values[4321] = math.nan
    few_steps, few = decimate(steps, values, 500)
    assert len(few) <= 510 and few_steps == sorted(few_steps)
    assert (few_steps[0], few_steps[-1]) == (steps[0], steps[-1])
    finite = [value for value in values if math.isfinite(value)]
    assert min(few) == min(finite) and max(v for v in few if math.isfinite(v)) == max(finite)
    assert steps[4321] in few_steps
    assert decimate(steps[:500], values[:500], 500) == (steps[:500], values[:500])


def test_settings_mark_what_the_command_set():
    facts = {
        "overrides": ["train.seq_len=1024", "+model.kinds.layer.attention={softcap:null}", "model=micro"],
        "choices": {"model": "micro", "optimizer": "adamw", "recipe": "micro", "experiment": "mine"},
    }
    marked = [setting.path for setting in list_settings(CONFIG, facts) if setting.changed]
    assert marked == ["train.seq_len", "model.kinds.layer.attention.window", "model.kinds.layer.attention.softcap"]
    assert chosen_options(facts) == {"model": "micro", "experiment": "mine"}


def test_settings_of_a_run_without_overrides_mark_differences_from_the_schema():
    marked = {setting.path: (setting.value, setting.changed) for setting in list_settings(CONFIG, {})}
    assert marked == {
        "train.steps": ("300", True),
        "train.seq_len": ("1024", False),
        "train.log_every": ("10", False),
        "model.emb_dim": ("64", True),
        "model.kinds.layer.attention.window": ("64", True),
        "model.kinds.layer.attention.softcap": ("null", False),
    }


def test_number_formats():
    assert [format_number(v) for v in (2.07, 0.00012, 0, 12345.6, math.nan)] == [
        "2.070",
        "0.00012",
        "0",
        "12,346",
        "NaN",
    ]
    assert [format_compact(v) for v in (12, 15_210, 999_900, 8_030_261_248)] == ["12", "15.2K", "1000K", "8.03B"]
    durations = (0.42, 42, 200, 7500, 90_000)
    assert [format_duration(v) for v in durations] == ["0.4 s", "42 s", "3 m 20 s", "2 h 5 m", "1 d 1 h"]


def session(start, end, *, seconds, **spent):
    """A session of steps after `start` up to `end` that recorded its time."""
    moment = "2026-03-04T12:00:00Z"
    return {
        "started": moment,
        "ended": moment,
        "seconds": seconds,
        "start_step": start,
        "end_step": end,
        "spent": spent,
    }


def test_goodput_excludes_steps_that_were_repeated():
    first = session(0, 100, seconds=130, init=10, compile=10, steps=100.0, save=4)
    second = session(60, 80, seconds=25, init=4, restore=1, steps=20.0)
    third = session(70, 170, seconds=145, init=4, restore=1, steps=100.0, eval=10, input_wait=20)
    found = goodput({"sessions": [first, second, third]})
    # Steps 61 to 100 of the first and 71 to 80 of the second session were lost.
    assert found.share == pytest.approx((60 + 10 + 100) / 300)
    seconds = {name: share * 300 for name, share in found.losses.items()}
    expected = {
        "lost steps": 50,
        "input wait": 20,
        "init": 18,
        "other": 16,
        "compile": 10,
        "eval": 10,
        "save": 4,
        "restore": 2,
    }
    assert seconds == pytest.approx(expected) and list(seconds)[:2] == ["lost steps", "input wait"]
    assert found.text.startswith("lost steps 16.7%, input wait 6.7%, init 6.0%")


def test_goodput_counts_sessions_that_recorded_it():
    """Sessions of older versions did not; a session that is running has no end yet."""
    old = {**session(0, 10, seconds=50), "spent": None}
    running = {**session(10, None, seconds=None, init=1, steps=6.0), "ended": None}
    killed = session(None, None, seconds=4)
    updated = "2026-03-04T12:00:08Z"
    assert goodput({"sessions": [old]}) is None and goodput({"sessions": [killed]}) is None
    assert goodput({"sessions": [old, running], "updated": updated}).share == pytest.approx(0.75)
    # A session that was killed before its first step wasted its time.
    found = goodput({"sessions": [old, killed, running], "updated": updated})
    assert found.share == pytest.approx(0.5) and found.losses["init"] == pytest.approx(5 / 12)


def test_benchmarks_have_a_table_and_a_heat_map(tmp_path: Path) -> None:
    grid = [[256, 0.0, 1.0], [256, 1.0, 0.5], [512, 0.0, 0.25], [512, 1.0, 0.0]]
    tasks = {"needle": {"metrics": {"acc": 0.4375, "acc_stderr": 0.1, "error": 0.5625}, "grid": grid}}
    (tmp_path / "eval.json").write_text(json.dumps({"100": tasks, "200": {"<b>": {"metrics": {"bpb": 2.5}}}}))
    text = str(benchmarks_section(tmp_path))
    assert "0.4375 ± 0.1000" in text and "2.5000" in text and "&lt;b&gt;" in text and "0.5625" not in text
    assert text.count('class="shade4"') == 1 and text.count('class="shade0"') == 1 and '<th scope="row">1</th>' in text
    for damaged in ("[", "[1]", '{"1": 2}', '{"1": {"a": {}}}'):
        (tmp_path / "eval.json").write_text(damaged)
        assert benchmarks_section(tmp_path) == ""
