"""The pipeline schedule against its definition, and the messages for batches that do not form microbatches."""

import itertools

import pytest

from maxhydra.config import ConfigError
from maxhydra.sharding import PipelineSchedule
from maxhydra.sharding.pipeline import plan_schedule

SIZES = [(stages, repeats, groups) for stages, repeats, groups in itertools.product((2, 3, 4), (1, 2, 3, 4), (1, 2))]


@pytest.mark.parametrize(("stages", "repeats", "groups"), SIZES)
def test_each_chunk_runs_one_tick_after_the_one_before_it(stages, repeats, groups):
    schedule = PipelineSchedule(stages, repeats, stages * groups)
    times = {}
    for tick, stage in itertools.product(range(schedule.ticks), range(stages)):
        group, owner, repeat = schedule.work(tick, stage)
        if 0 <= group < groups:
            times[group, owner, repeat * stages + stage] = tick
            assert schedule.tick(schedule.work(tick, stage), stage) == tick
    chunks = range(stages * repeats)
    assert set(times) == set(itertools.product(range(groups), range(stages), chunks))
    assert all(times[(*of, chunk)] == times[(*of, 0)] + chunk for *of, chunk in times)
    busy = len(times) / (stages * schedule.ticks)
    assert schedule.bubble_fraction == pytest.approx(1 - busy)


@pytest.mark.parametrize(("stages", "repeats", "groups"), SIZES)
def test_chunks_move_to_the_stages_that_run_them(stages, repeats, groups):
    schedule = PipelineSchedule(stages, repeats, stages * groups)
    arrived = {}
    for moves in schedule.chunk_moves():
        destinations = [schedule.destination(stage, index) for stage, (index, _) in enumerate(moves)]
        assert sorted(destinations) == list(range(stages))
        for stage, (index, repeat) in enumerate(moves):
            arrived[destinations[stage], repeat] = stage * repeats + index
    assert arrived == {(chunk % stages, chunk // stages): chunk for chunk in range(stages * repeats)}


@pytest.mark.parametrize(("rows", "shards", "expected"), [(8, 1, 4), (2, 1, 2), (6, 1, 2), (16, 4, 4), (8, 4, 2)])
def test_default_is_two_microbatches_per_stage_if_the_rows_divide(rows, shards, expected):
    schedule = plan_schedule(stages=2, repeats=1, microbatches=None, rows=rows, row_shards=shards)
    assert schedule.microbatches == expected


def test_rows_that_do_not_form_microbatches_are_rejected():
    with pytest.raises(ConfigError, match=r"mesh\.pipeline\.microbatches.*3(.|\n)*2, 4, 8"):
        plan_schedule(stages=2, repeats=1, microbatches=3, rows=16, row_shards=2)
    with pytest.raises(ConfigError, match=r"12 sequences(.|\n)*a multiple of 8 sequences"):
        plan_schedule(stages=4, repeats=1, microbatches=None, rows=12, row_shards=2)
