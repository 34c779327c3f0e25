"""Recipes of docs/recipes: their GPU commands are valid configs, and the figures of a run are read correctly."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from maxhydra.config.compose.composer import compose
from tests.support.cli import ROOT, bench_script
from tests.support.run_folders import write_run

gpu = bench_script("recipes_gpu", folder="scripts")
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))


@pytest.mark.slow
@pytest.mark.default_cases("continue", "grpo")
@pytest.mark.parametrize("recipe", gpu.TRAINING)
def test_the_command_of_every_recipe_is_valid(recipe: str, tmp_path: Path) -> None:
    args = gpu.parse(["--steps", "3", "--out", str(tmp_path), "model.num_layers=2"])
    config = compose(gpu.training_overrides(recipe, args, gpu.write_data(tmp_path / "data"))).config
    assert config.train.steps == 3 and config.model.num_layers == 2 and config.run.name == recipe
    # The form of the experiment, which the figures are about.
    assert config.model.vocab_size == 128256 and config.train.seq_len >= 512


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_name_experiments_that_name_them(page: Path) -> None:
    command = re.search(r"^maxhydra experiment=([\w.-]+)", page.read_text(), re.MULTILINE)
    if command is None:
        assert page.stem in ("serve", "evaluate")
    else:
        experiment = ROOT / "conf" / "experiment" / f"{command[1]}.yaml"
        assert f"docs/recipes/{page.name}" in experiment.read_text()


def test_figures_of_a_run() -> None:
    """Throughput is the median after the first third of the steps, which has the compilation."""
    rows = [{"step": step, "loss": 4.0 - step, "tokens_per_second": 100.0 * step, "mfu": 0.5} for step in range(1, 4)]
    rows[1]["system/device_memory_peak_gib"] = 7.25
    rows.append({"step": 3, "eval/loss": 9.0})
    expected = "250 tokens/s | MFU 50.0% | peak 7.2 GiB | loss 3.000 to 1.000"
    assert gpu.describe_training(rows, "loss") == expected


def test_curves_become_an_svg_file(tmp_path: Path) -> None:
    curves = bench_script("curve_svg", folder="scripts")
    run = write_run(tmp_path / "run", steps=30)
    assert curves.main([str(tmp_path / "x.svg"), f"{run}:loss", f"{run}:eval/loss"]) == 0
    root = ET.parse(tmp_path / "x.svg").getroot()
    (line, *_) = root.findall("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
    # A falling loss: later points are further right and lower, and all are inside the picture.
    assert len(points) == 30 and points[0][0] < points[-1][0] and points[0][1] < points[-1][1]
    assert all(0 < x < curves.WIDTH and 0 < y < curves.HEIGHT for x, y in points)
