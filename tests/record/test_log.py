"""Texts of runs do not control the terminal that shows them."""

from pathlib import Path

import pytest

from maxhydra.cli.runs._common import print_table, say
from maxhydra.record import logging_to
from maxhydra.record.log import printable

ATTACK = "a\x1b]0;owned\x07\x1b[2J\x9b31m\u202eb\r"


def test_control_characters_are_escaped() -> None:
    shown = printable(ATTACK + "\n")
    assert shown == "a\\u001b]0;owned\\u0007\\u001b[2J\\u009b31m\\u202eb\\u000d\n"
    assert printable("ä 中 🙂\tx\ny") == "ä 中 🙂\tx\ny"
    assert printable("a\nb", keep="") == "a\\u000ab"


def test_tables_lines_and_logs_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["run", ATTACK], [[f"x\n{ATTACK}", "1"]])
    say(ATTACK)
    with logging_to(tmp_path / "log.txt", console=True) as log:
        log.info("%s key=%s", ATTACK, "hf_abcdefghijklmnopqrstuvwxyz012345")
    output = "".join(capsys.readouterr()) + (tmp_path / "log.txt").read_text()
    assert output.count("\\u001b[2J") == 5 and "hf_abc" not in output
    assert not set(output) & set("\x1b\x07\x9b\u202e\r")


def test_the_file_is_created_with_the_first_record(tmp_path: Path) -> None:
    """A command that is rejected before it logs leaves neither a file nor a folder."""
    path = tmp_path / "run" / "log.txt"
    with logging_to(path, console=False):
        pass
    assert not path.parent.exists()
    with logging_to(path, console=False) as log:
        log.info("begin")
    assert path.read_text().endswith("INFO begin\n")
