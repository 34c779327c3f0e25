"""Statistics of layers in the report, on the command line, and across the sessions of a run."""

import json
from pathlib import Path

import numpy as np
import pytest

from maxhydra.cli.main import run as maxhydra
from maxhydra.config.schema.model import Model
from maxhydra.record import MetricsWriter, RunDirectory, read_metrics
from maxhydra.record.facts import STATISTICS
from maxhydra.runs.report import write_report
from maxhydra.runs.statistics import layer_grids, read_statistics, summary_rows
from maxhydra.train.statistics import StatisticsLogger
from maxhydra.train.trainer import _statistics_writer
from tests.support.run_folders import write_run

LAYERS = 70


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with 100 records of 70 layers, of which one has a NaN."""
    folder = tmp_path / "outputs" / "deep"
    write_run(folder)
    writer = MetricsWriter(folder / STATISTICS)
    for step in range(50, 5001, 50):
        values = {f"grad_norm/mlp/{layer}": 10.0 ** (layer % 7) * step for layer in range(LAYERS)}
        values |= {"loss/position/0": 5.0, "loss/position/15": float("nan") if step == 5000 else 4.0}
        writer.write(step, {**values, "grad_norm/embedding": 1.0})
    writer.close()
    return folder


def test_grids_and_summary(run: Path) -> None:
    rows = read_statistics(run)
    grids = layer_grids(rows)
    assert set(grids) == {("grad_norm", "mlp"), ("loss", "position")}
    assert list(grids["grad_norm", "mlp"]) == list(range(LAYERS)) and grids["grad_norm", "mlp"][1][:2] == [500, 1000]
    assert summary_rows(rows[0]) == [
        ("grad_norm", "mlp", "50.00", "0", "50,000", "50,000,000", "69"),
        ("loss", "position", "4.000", "15", "4.500", "5.000", "0"),
    ]
    assert summary_rows(rows[-1])[1] == ("loss", "position", "5.000", "0", "5.000", "1 not finite", "0")


@pytest.mark.slow
def test_the_report_and_the_command_show_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = write_report(RunDirectory(run)).read_text()
    assert "grad_norm mlp: 50.00 to 5e+09, logarithmic" in page and 'class="levelbad"' in page
    assert 'viewBox="0 0 60 64"' in page and len(page) < 300_000
    outputs = ["-o", str(run.parent)]
    assert maxhydra(["runs", "statistics", "deep", "--step", "100", *outputs]) == 0
    assert "100,000" in capsys.readouterr().out
    assert maxhydra(["runs", "statistics", "deep", "--json", *outputs]) == 0
    assert json.loads(capsys.readouterr().out)["grad_norm/embedding"] == 1
    assert maxhydra(["runs", "statistics", "deep", "--step", "7", *outputs]) == 2
    assert "50 to 5000, 100 records" in capsys.readouterr().err
    write_run(run.parent / "plain")
    assert maxhydra(["runs", "statistics", "plain", *outputs]) == 2
    assert "statistics.every=50" in capsys.readouterr().err
    assert "Layers" not in write_report(RunDirectory(run.parent / "plain")).read_text()


def test_a_resumed_session_writes_its_records_again(run: Path) -> None:
    arrays = {"square": np.array([4.0]), "max": np.array([1.5])}
    tree = {
        "grad": {"pattern/0/mlp": arrays},
        "weight": {"embedding": {name: x[0] for name, x in arrays.items()}},
        "update": {},
        "aux": {},
    }

    def recording_step(state: str, batch: str) -> tuple[str, dict]:
        return state, {"loss": 1.0, "statistics": tree}

    logger = StatisticsLogger(
        50, recording_step, lambda: _statistics_writer(RunDirectory(run), start=4000, is_main=True), Model(num_layers=1)
    )
    for step in range(4040, 4111):
        _, metrics = logger.choose(step, lambda state, batch: (state, {"loss": 2.0}))("state", "batch")
        logger.log(step, metrics)
        assert metrics == {"loss": 2.0 if step % 50 else 1.0}
    logger.close()
    rows = read_metrics(run / STATISTICS)
    assert [row["step"] for row in rows[-3:]] == [4000, 4050, 4100]
    assert rows[-1] == {
        "step": 4100,
        **{"grad_norm/mlp/0": 2.0, "grad_max/mlp/0": 1.5, "weight_norm/embedding": 2.0, "weight_max/embedding": 1.5},
    }
