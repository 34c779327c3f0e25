"""Schedules against closed forms at their breakpoints."""

import math

import jax
import numpy as np
import pytest

from maxhydra.config.schema.optimizer import DecayStyle, Schedule, ScheduleKind
from maxhydra.optim import schedule

PEAK, STEPS, WARMUP = 2.0, 100, 9
WSD = {"kind": ScheduleKind.wsd, "final_fraction": 0.1, "decay_steps": 20}

# Of the peak, by step; the warm-up of 9 steps is (step + 1) / 10 for each kind.
SHAPES = {
    "constant": ({"kind": ScheduleKind.constant}, {9: 1, 50: 1, 99: 1}),
    "linear": ({"kind": ScheduleKind.linear, "final_fraction": 0.1}, {9: 1, 54: 0.55, 99: 0.1, 500: 0.1}),
    "cosine": (
        {"kind": ScheduleKind.cosine, "final_fraction": 0.0},
        {9: 1, 39: 0.5 * (1 + math.cos(math.pi / 3)), 54: 0.5, 99: 0, 500: 0},
    ),
    "wsd linear": ({**WSD, "decay_style": DecayStyle.linear}, {9: 1, 79: 1, 80: 1 - 0.9 / 20, 89: 0.55, 99: 0.1}),
    "wsd cosine": (
        {**WSD, "decay_style": DecayStyle.cosine},
        {9: 1, 79: 1, 84: 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 89: 0.55, 99: 0.1, 200: 0.1},
    ),
    "wsd sqrt": ({**WSD, "decay_style": DecayStyle.sqrt}, {79: 1, 84: 0.55, 99: 0.1}),
    "wsd exponential": ({**WSD, "decay_style": DecayStyle.exponential}, {79: 1, 89: 0.1**0.5, 99: 0.1}),
    "wsd inverse": ({**WSD, "decay_style": DecayStyle.inverse}, {79: 1, 89: 2 / 11, 99: 0.1}),
    "wsd-s": (
        {**WSD, "decay_style": DecayStyle.linear, "restarts": [40, 70]},
        {19: 1, 29: 0.55, 39: 0.1, 40: 1, 49: 1, 69: 0.1, 70: 1, 79: 1, 99: 0.1},
    ),
    "cosine with restarts": (
        {"kind": ScheduleKind.cosine, "final_fraction": 0.0, "restarts": [40]},
        {9: 1, 24: 0.5, 39: 0, 40: 1, 99: 0},
    ),
    "shorter than the run": (
        {"kind": ScheduleKind.linear, "final_fraction": 0.1, "steps": 60},
        {9: 1, 34: 0.55, 59: 0.1, 99: 0.1},
    ),
    "inverse_sqrt": ({"kind": ScheduleKind.inverse_sqrt}, {9: 1, 39: 0.5, 89: 1 / 3, 999: 0.1}),
}


@pytest.mark.parametrize(("fields", "points"), SHAPES.values(), ids=SHAPES)
def test_closed_forms(fields, points):
    rate = schedule(Schedule(warmup_steps=WARMUP, **fields), peak=PEAK, steps=STEPS)
    traced = jax.jit(rate)
    for step, fraction in {0: 0.1, 4: 0.5, 8: 0.9, **points}.items():
        np.testing.assert_allclose(float(rate(step)), PEAK * fraction, rtol=1e-5, atol=1e-7, err_msg=f"step {step}")
        np.testing.assert_allclose(traced(step), rate(step), rtol=1e-6)


@pytest.mark.parametrize(("fields", "points"), SHAPES.values(), ids=SHAPES)
def test_no_warmup_starts_at_the_peak(fields, points):
    rate = schedule(Schedule(warmup_steps=0, **fields), peak=PEAK, steps=STEPS)
    assert float(rate(0)) == pytest.approx(PEAK)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"kind": ScheduleKind.constant, "restarts": [5]}, "restarts"),
        ({**WSD, "decay_style": DecayStyle.linear, "restarts": [40, 50]}, "restarts"),
        ({**WSD, "decay_style": DecayStyle.inverse, "final_fraction": 0.0}, "final_fraction"),
    ],
)
def test_impossible_schedules_are_rejected(fields, path):
    assert [problem.path for problem in Schedule(**fields).check()] == [path]


def test_a_run_shorter_than_its_schedule_is_rejected():
    restarted = Schedule(**WSD, decay_style=DecayStyle.linear, restarts=[90])
    assert [problem.path for problem in restarted.check_length(100)] == ["train.steps"]
    assert not list(restarted.check_length(110))


@pytest.mark.parametrize(("fields", "points"), SHAPES.values(), ids=SHAPES)
def test_one_step_and_all_warmup_are_finite_and_positive(fields, points):
    fields = {name: value for name, value in fields.items() if name not in ("steps", "restarts")}
    for steps, warmup in ((1, 0), (1, 1), (20, 20)):
        rate = schedule(Schedule(warmup_steps=warmup, **fields), peak=PEAK, steps=steps)
        rates = [float(rate(step)) for step in range(steps)]
        assert all(0 < r <= PEAK for r in rates[:-1]) and math.isfinite(rates[-1])
