"""Runs every command in the console blocks of docs/, page by page and in order, each page in a new folder.

Commands train and decode with short sequences and small batches. They evaluate if they run an experiment or set the
number of batches.
"""

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support import compile_cache as compiling
from tests.support import fork_server as warm
from tests.support.cli import ROOT, environment, forked_jobs

# Sizes for commands that do not set them. An experiment has its own sequence length. The sample, which takes longer to
# compile than the training step, is left out; tests/tasks/test_interrupt.py has one.
SIZES = ["train.sample.tokens=0", "train.per_device_batch_size=8", "model.scan_unroll=1"]
SIZES_OF_EXPERIMENT = ["train.eval_batches=1"]
SIZES_WITHOUT_EXPERIMENT = ["train.seq_len=32", "train.eval_batches=0"]
# Without optimizations, a step over a large cache takes longer than its compilation.
SIZES_OF_DECODE = ["task.sampling.max_tokens=8", "task.engine.cache_tokens=512"]
SIZES_OF_TOKENIZE = ["task.workers=1"]
SIZES_OF_TEACHER = ["train.seq_len=32", "train.per_device_batch_size=8"]
# Adds the sizes that the task uses to a command line of overrides, and none to one of a subcommand.
SCRIPT = """#!/bin/sh
case "$1" in -m|*=*) ;; *) exec {program} "$@" ;; esac
sizes="{sizes}"
case " $* " in *" experiment="*) sizes="$sizes {experiment}" ;; *) sizes="$sizes {without_experiment}" ;; esac
case " $* " in
  *" task=decode "*) sizes="{decode}" ;;
  *" task=tokenize "*) sizes="{tokenize}" ;;
  *" task=teacher_logits "*) sizes="{teacher}" ;;
  *" task=convert "*|*" task=eval "*|*" task=score "*|*" task=serve "*|*" task=train_tokenizer "*) sizes="" ;;
esac
for size in $sizes; do
  case " $* " in *" ${{size%%=*}}="*) ;; *) set -- "$@" "$size" ;; esac
done
exec {program} "$@"
"""
BLOCK = re.compile(r"^```console(?: exit=(\d+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(page.read_text())]


# Folders by the command that was run in them: several pages start with the same run.
FOLDERS: dict[tuple[str, int], Path] = {}


def commands_of(page: Path) -> list[tuple[str, int]]:
    """The commands of a page with their exit codes."""
    return [
        (line.removeprefix("$ "), int(code or 0))
        for code, block in BLOCK.findall(page.read_text())
        for line in block.splitlines()
        if line.startswith("$ ")
    ]


# Number of pages that start with a command.
NUM_PAGES = Counter(commands_of(page)[0] for page in PAGES)


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose `maxhydra` adds the sizes."""
    binaries = tmp_path_factory.mktemp("binaries")
    program = warm.write_script(binaries / "program", compiling.PREFIX)
    script = binaries / "maxhydra"
    sizes = {
        "sizes": SIZES,
        "experiment": SIZES_OF_EXPERIMENT,
        "without_experiment": SIZES_WITHOUT_EXPERIMENT,
        "decode": SIZES_OF_DECODE,
        "tokenize": SIZES_OF_TOKENIZE,
        "teacher": SIZES_OF_TEACHER,
    }
    script.write_text(SCRIPT.format(program=program, **{name: " ".join(each) for name, each in sizes.items()}))
    script.chmod(0o755)
    env = environment(**forked_jobs())
    env["PATH"] = f"{binaries}:{Path(sys.executable).parent}:{env['PATH']}"
    # `pip install` of a project writes to a folder of the page.
    env |= {"PIP_TARGET": "site", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONPATH": f"{env['PYTHONPATH']}:site"}
    # The commands set the number of devices themselves.
    env["XLA_FLAGS"] = f"{compiling.xla_flags()} {compiling.SINGLE_THREAD}"
    return env


@pytest.mark.slow
@pytest.mark.default_cases("quantization")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_the_page_runs(
    page: Path, tmp_path: Path, variables: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, *others = commands_of(page)
    if first in FOLDERS:
        shutil.copytree(FOLDERS[first], tmp_path, dirs_exist_ok=True)
    else:
        run_command(*first, tmp_path, variables)
        if NUM_PAGES[first] > 1:
            FOLDERS[first] = shutil.copytree(tmp_path, tmp_path_factory.mktemp("first"), dirs_exist_ok=True)
    for command, code in others:
        run_command(command, code, tmp_path, variables)


def run_command(command: str, code: int, folder: Path, variables: dict[str, str]) -> None:
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == code, f"$ {command}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
