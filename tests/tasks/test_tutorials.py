"""Runs every command in the console blocks of docs/, page by page and in order, each page in a new folder."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import compile_cache as compiling
from tests.support import fork_server as warm
from tests.support.cli import ROOT, environment

BLOCK = re.compile(r"^```console(?: exit=(\d+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(page.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    commands = [
        (line.removeprefix("$ "), int(code or 0))
        for code, block in BLOCK.findall(page.read_text())
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    assert commands
    binaries = tmp_path / ".bin"
    binaries.mkdir()
    warm.write_script(binaries / "maxhydra", compiling.PREFIX)
    env = environment()
    env["PATH"] = f"{binaries}:{Path(sys.executable).parent}:{env['PATH']}"
    # The commands set the number of devices themselves.
    env["XLA_FLAGS"] = compiling.xla_flags()
    for command, code in commands:
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == code, f"$ {command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
