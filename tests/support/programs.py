"""Programs that act as the worker of a job, and held jobs, for tests of launchers."""

from pathlib import Path

# Writes runs as training does, and saves on SIGTERM. Arguments: -m maxhydra job CONFIG --run-dir FOLDER.
SEARCH_WORKER = """
import signal, sys, time
import yaml
from maxhydra.record import MetricsWriter, RunDirectory

received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
rate = yaml.safe_load(open(sys.argv[4]))["optimizer"]["learning_rate"]
run = RunDirectory(sys.argv[6])
with run.session("", {}):
    metrics = MetricsWriter(run.metrics_path)
    for step in range(1, 31):
        time.sleep(0.2)
        metrics.write(step, {"eval/loss": rate + 1 / step})
        if received:
            break
    run.finish("preempted" if received else "finished", "SIGTERM" if received else "done")
"""


def write_program(path: Path, interpreter: str, text: str) -> Path:
    path.write_text(f"#!{interpreter}\n{text}")
    path.chmod(0o755)
    return path


class Released(list[str]):
    """Lines of a controller, which releases held jobs as soon as it has found `count` of them."""

    def __init__(self, folder: Path, *, count: int):
        super().__init__()
        self._folder, self._count = folder, count

    def append(self, line: str) -> None:
        super().append(line)
        if sum("found running" in line for line in self) == self._count:
            (self._folder / "go").touch()
