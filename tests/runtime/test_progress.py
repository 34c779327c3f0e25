"""The progress display: readable lines, a bar on a terminal, and both in log.txt."""

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxhydra.config.schema.run import Progress as Mode
from maxhydra.record import logging_to
from maxhydra.runtime.progress import open_step_progress

ROOT = Path(__file__).parents[2]
METRICS = {"loss": 3.2144, "learning_rate": 1e-3, "grad_norm": 1.234, "tokens_per_second": 15210.0, "mfu": 0.4123}


def logged(path):
    return [line.split(" INFO ", 1)[1] for line in path.read_text().splitlines()]


def test_lines(tmp_path, capsys):
    log = logging_to(tmp_path / "log.txt", console=True)
    with log, open_step_progress(Mode.lines, total=300, start=0, shown=True) as progress:
        progress.update(10, {**METRICS, "step_time": 0.1, "moe/dropped": 0.0})
        progress.message("saved")
        progress.update(20, {"eval/loss": 2.5, "eval/tokens": 4096})
        progress.update(300, {"loss": 2.0, "moe/dropped": 15210.0})
    first, saved, second, last = capsys.readouterr().err.splitlines()
    assert first == "step    10/300  loss 3.214  lr 1.0e-03  grad 1.23  15.2k tok/s  mfu 41.2%"
    assert saved == "saved"
    assert re.fullmatch(r"step    20/300  eval/loss 2\.500  eta \d:\d\d:\d\d", second)
    assert last == "step   300/300  loss 2.000  dropped 15.2k"
    assert logged(tmp_path / "log.txt") == [first, saved, second, last]


@pytest.mark.parametrize(("mode", "shown"), [(Mode.none, True), (Mode.lines, False), (Mode.bar, False)])
def test_silence_still_reaches_the_log(tmp_path, capsys, mode, shown):
    log = logging_to(tmp_path / "log.txt", console=True)
    with log, open_step_progress(mode, total=300, start=0, shown=shown) as progress:
        progress.update(1, METRICS)
    assert capsys.readouterr().err == ""
    assert len(logged(tmp_path / "log.txt")) == 1


def test_auto_is_lines_without_a_terminal(tmp_path, capsys):
    with logging_to(None, console=True), open_step_progress(Mode.auto, total=3, start=0, shown=True) as progress:
        progress.update(1, {"loss": float("nan")})
    assert capsys.readouterr().err == "step     1/3  loss nan\n"


BAR = """
import sys
from pathlib import Path
from maxhydra.config.schema.run import Progress as Mode
from maxhydra.record import logging_to
from maxhydra.runtime.progress import open_step_progress
with logging_to(Path(sys.argv[1]), console=True) as log:
    with open_step_progress(Mode.auto, total=300, start=0, shown=True) as progress:
        progress.update(10, {"loss": 3.2144, "learning_rate": 1e-3})
        log.info("something happened")
        progress.update(20, {"eval/loss": 2.5})
"""


@pytest.mark.slow
def test_bar_on_a_terminal_keeps_text_above_it(tmp_path):
    terminal, end = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", BAR, str(tmp_path / "log.txt")]
    subprocess.run(command, env=environment, stderr=end, check=True)
    os.close(end)
    shown = b""
    with contextlib.suppress(OSError):  # Reading past the output of a closed terminal raises.
        while piece := os.read(terminal, 65536):
            shown += piece
    os.close(terminal)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "something happened\r\n" in text
    assert re.search(r"━+.* 20/300 +loss 3\.214  lr 1\.0e-03  eval/loss 2\.500 +eta", text)
    assert "step " not in text
    assert [line.split()[1] for line in logged(tmp_path / "log.txt") if "step" in line] == ["10/300", "20/300"]
