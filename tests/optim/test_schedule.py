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


@pytest.mark.parametrize(("fields", "points"), SHAPES.values(), ids=SHAPES)
def test_one_step_and_all_warmup_are_finite_and_positive(fields, points):
    for steps, warmup in ((1, 0), (1, 1), (20, 20)):
        rate = schedule(Schedule(warmup_steps=warmup, **fields), peak=PEAK, steps=steps)
        rates = [float(rate(step)) for step in range(steps)]
        assert all(0 < r <= PEAK for r in rates[:-1]) and math.isfinite(rates[-1])
