"""A draft model: completions are those of plain decoding, and its own are those of decoding with it alone."""

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema import model as config
from maxhydra.config.schema.decode import Speculation, SpeculationMethod
from maxhydra.decode.engine import Engine
from maxhydra.decode.open_draft import open_draft_model
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder
from tests.decode.test_engine import make_request, shared_programs, tiny
from tests.decode.test_engine import start as start_engine
from tests.decode.test_speculation import (
    ENGINES,
    always_drafts,
    batches,
    check_equal,
    complete,
    cyclic,
    plain_completions,
    sampled,
    speculative,
)
from tests.support.cli import ROOT, SMALL, run_ok

__all__ = ["always_drafts", "shared_programs"]
SPECULATION = Speculation(method=SpeculationMethod.model, weights="unused", tokens=3)


@functools.cache
def smaller() -> tuple[ModelDef, dict]:
    """A model of one layer of another width, with a smaller vocabulary, and random weights."""
    own = dataclasses.replace(tiny()[0].config, num_layers=1, emb_dim=16, vocab_size=262, pattern=["global"])
    model = build(dataclasses.replace(own, kinds={"global": config.Kind()}))
    rng = np.random.default_rng(0)
    return model, jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), model.shapes)


def start(draft: tuple[ModelDef, dict], **changes) -> Engine:
    sizes = {"max_batch": 2, "deterministic": True, "speculation": SPECULATION}
    return start_engine(params=cyclic(), draft=draft, **{**sizes, **changes})


CASES: dict[str, dict[str, Any]] = {
    **ENGINES,
    "chosen multi-step": {"burst": 3},
    "another model": {"burst": 2},
    "another model, chosen": {"burst": 2},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_completions_are_those_of_plain_decoding(case: str, request: pytest.FixtureRequest) -> None:
    """Also if no draft is accepted, and if only some calls have drafts.

    A model that drafts for itself proposes the tokens that it samples, whatever prompt chunks, shared pages and plain
    steps its cache was filled after; except with penalties, which drafts ignore.
    """
    if "chosen" not in case:
        request.getfixturevalue("always_drafts")
    is_other = case.startswith("another")
    engine = start(smaller() if is_other else (tiny()[0], cyclic()), **CASES[case])
    shares = []
    try:
        for batch, expected in zip(batches(), plain_completions(), strict=True):
            before = engine.stats()
            check_equal(complete(engine, batch), expected)
            after = engine.stats()
            shares.append([after[name] - before[name] for name in ("tokens_accepted", "tokens_drafted")])
    finally:
        engine.close()
    assert after["pages_used"] == after["running"] == after["waiting"] == 0
    for (accepted, drafted), least in zip(shares, (1.0, 1.0, 0.5), strict=True):
        assert accepted < drafted / 2 if is_other else accepted >= least * drafted, shares
    assert after["tokens_drafted"] > 100 or "prefill_axes" in CASES[case]
    is_sometimes = case == "another model, chosen" or "prefill_axes" in CASES[case]
    assert (after["steps_speculative"] < after["steps"]) == is_sometimes, after


@pytest.mark.exhaustive
def test_tokens_of_plain_steps_and_shared_pages_reach_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts after them are those of a model that has seen every token."""
    from maxhydra.decode import draft_policy

    engine, plain = start((tiny()[0], cyclic()), burst=2, prefill_chunk=16), speculative(speculation=Speculation())
    choices = iter([False, False, True, True, False, True] * 20)
    monkeypatch.setattr(draft_policy.DraftPolicy, "is_worthwhile", lambda self, rows, make_key: next(choices))
    try:
        prompt = list(b"to be or not to be, that is the question")
        for seed in (1, 2):
            request = make_request([*prompt, seed], max_tokens=40, **sampled(seed))
            check_equal([engine.submit(request).result()], [plain.submit(request).result()])
        stats = engine.stats()
    finally:
        engine.close()
        plain.close()
    assert stats["tokens_accepted"] == stats["tokens_drafted"] > 30
    assert 0 < stats["steps_speculative"] < stats["steps"]
    assert stats["prompt_tokens_read"] == 41 + 41 - 40


MODEL = [item for item in SMALL if item.startswith("model")]
PATHS = f"{ROOT}:{ROOT / 'tests/support'}"
TINY = ["task=decode", "task.prompt=a", *MODEL]
DRAFTS = "task.engine.speculation"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"speculation\.weights=null: is required with method=model"),
        ([f"{DRAFTS}.weights=a", f"{DRAFTS}.min_ngram=1"], r"min_ngram=1: has no effect with method=model.*ngram"),
        ([f"{DRAFTS}.weights=a", f"{DRAFTS}.method=mtp"], r"weights=a: has no effect with method=mtp"),
        (
            [f"{DRAFTS}.weights=a", f"{DRAFTS}.overrides=['model.num_layers=2']"],
            r"overrides=.* is not a key of a model option that is set",
        ),
        (
            [f"{DRAFTS}.weights=a", "model=qwen3-next-80b-a3b"],
            r"speculation\.method=model: is not supported with recurrent layers",
        ),
    ],
)
def test_unsupported_settings_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        compose([*TINY, f"{DRAFTS}.method=model", *overrides])


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    return [f"{DRAFTS}.method=model", f"{DRAFTS}.weights=weights"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"weights=weights: is not a run folder with a config, so its model is unknown.*speculation\.model=NAME"),
        ([f"{DRAFTS}.model=lama"], r"speculation\.model=lama"),
        (
            [f"{DRAFTS}.model=tiny", f"{DRAFTS}.overrides=['model.context_length=16']"],
            r"has a context of 16 tokens, shorter than the \d+ of a sequence here.*task\.engine\.max_context=16",
        ),
        (
            [f"{DRAFTS}.model=qwen3-next-80b-a3b"],
            r"has recurrent layers, whose state cannot be reset, and cannot draft",
        ),
    ],
)
def test_models_that_cannot_draft_are_rejected(settings: list[str], overrides: list[str], message: str) -> None:
    composed = compose([*TINY, *settings, *overrides]).config
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)):
        open_draft_model(composed, composed.task.engine, Sharder.single())


@pytest.mark.exhaustive
def test_runs_and_exported_folders_draft_for_decode_and_grpo(tmp_path: Path) -> None:
    """A model that drafts for itself; rollouts are those without drafts."""
    run_ok(*SMALL, "train.steps=2", "run.name=trained", cwd=tmp_path)
    load, exact = "checkpoint.load_parameters=outputs/trained", "model.dtypes.compute=float32"
    run_ok("task=convert", *MODEL, load, "task.output=exported", cwd=tmp_path)
    decode = [*TINY, load, exact, "task.engine.max_context=64", "task.engine.deterministic=true"]
    decode += ["task.engine.burst=2", "task.sampling.max_tokens=40", "task.sampling.ignore_eos=true"]
    plain = run_ok(*decode, cwd=tmp_path).stdout
    for weights in ("outputs/trained", "exported"):
        drafts = [f"{DRAFTS}.method=model", f"{DRAFTS}.weights={weights}"]
        assert run_ok(*decode, *drafts, cwd=tmp_path).stdout == plain
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "to be"}\n{"prompt": "or not"}\n')
    files = ["task.prompt=null", "task.input=prompts.jsonl", "task.output=texts.jsonl"]
    printed = run_ok(*decode, *drafts, *files, cwd=tmp_path).stderr
    accepted, drafted = map(int, re.findall(r"(\d+) of (\d+) drafted tokens accepted", printed)[0])
    assert accepted > 0.9 * drafted > 20
    task = [
        "task=grpo",
        "data=arithmetic",
        "data.record_type=prompts",
        "task.max_tokens=8",
        "task.group_size=4",
        *SMALL,
    ]
    task += ["train.seq_len=20", "train.per_device_batch_size=16", "task.engine.max_batch=16", load, exact]
    task += ["task.engine.cache_tokens=1024", "reward=function", "reward.terms.own.function=reward_functions:vowels"]
    metrics = []
    for name, options in (("plain", []), ("drafted", drafts)):
        run_ok(*task, "train.steps=3", f"run.name={name}", *options, cwd=tmp_path, PYTHONPATH=PATHS)
        lines = map(json.loads, (tmp_path / "outputs" / name / "metrics.jsonl").read_text().splitlines())
        metrics.append([line["reward/mean"] for line in lines if "reward/mean" in line])
    assert metrics[0] == metrics[1] and len(metrics[0]) == 3


@pytest.mark.exhaustive
@pytest.mark.usefixtures("always_drafts")
def test_nothing_is_compiled_after_the_warm_up() -> None:
    """Also for prompts of several chunks, and for rows that join in different numbers."""
    sizes = {"burst": 2, "max_batch": 3, "prefill_chunk": 16, "deterministic": False, "warm_up": True}
    engine = start((tiny()[0], cyclic()), **sizes)
    try:
        compiled = engine.stats()["programs_compiled"]
        for batch, expected in zip(batches(), plain_completions(), strict=True):
            check_equal(complete(engine, batch), expected)
        stats = engine.stats()
    finally:
        engine.close()
    assert stats["programs_compiled"] == compiled
    assert stats["tokens_drafted"] > 100 and stats["steps_waiting"] == 0
