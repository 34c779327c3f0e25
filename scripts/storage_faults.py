"""Train to an S3 server whose requests fail and are slow, with kills, and compare with an undisturbed local run.

    python scripts/storage_faults.py [--trials N] [--kills N] [--share 0.05] [--latency 2] [FOLDER]

The server is moto on loopback. In each trial a run is killed with SIGKILL at random moments, each time continued by the
same host or by a new one without a local copy, until it ends. Prints a table in Markdown, and exits with 1 if a trial
ended with other losses, other weights, or objects that differ from the local files.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from maxhydra.record.storage import Store, complete_steps  # noqa: E402
from tests.support.cli import SMALL, environment, losses, parameter_hash  # noqa: E402
from tests.support.object_store import BUCKET, S3Server  # noqa: E402

STEPS = 60
RUN = [*SMALL, f"train.steps={STEPS}", "checkpoint.every=10", "optimizer/schedule=constant"]


class Trial:
    """One run in the store, and the hosts on which it is continued."""

    def __init__(self, number: int, folder: Path, server: S3Server):
        self.name, self._folder, self._variables = f"trial{number}", folder / f"trial{number}", server.variables
        self._rng, self._hosts = random.Random(number), 0
        self.kills = self.moves = 0
        self._new_host()

    def _new_host(self) -> None:
        self._hosts += 1
        self.home = self._folder / f"host{self._hosts}"
        self.home.mkdir(parents=True)

    @property
    def working_copy(self) -> Path:
        return self.home / ".cache/maxhydra/staging/s3" / BUCKET / "runs" / self.name

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "maxhydra", *RUN, f"run.name={self.name}", f"run.outputs=s3://{BUCKET}/runs"]
        variables = environment(**self._variables, HOME=str(self.home))
        with open(self._folder / "console", "ab") as console:
            return subprocess.Popen(command, cwd=self.home, env=variables, stdout=console, stderr=console)

    def run(self, kills: int) -> None:
        """Start the run, kill it at random moments, and continue it until it ends."""
        while True:
            process, metrics = self._start(), self.working_copy / "metrics.jsonl"
            before = metrics.stat().st_size if metrics.exists() else 0
            while self.kills < kills and process.poll() is None:
                time.sleep(0.05)
                if metrics.exists() and metrics.stat().st_size > before:
                    time.sleep(self._rng.uniform(0, 12))
                    process.kill()
                    self.kills += 1
            if process.wait() != -9:
                assert process.returncode == 0, (self._folder / "console").read_text()
                return
            if self._rng.random() < 0.5:
                # The host and its disk are lost. Its lease would expire after a minute.
                Store(f"s3://{BUCKET}/runs/{self.name}").delete([".lease.json"])
                self._new_host()
                self.moves += 1

    def differences(self, whole: Path) -> list[str]:
        """What differs from the undisturbed run, or between the store and the local copy."""
        store, found = Store(f"s3://{BUCKET}/runs/{self.name}"), []
        if losses(self.working_copy) != losses(whole):
            found.append("losses")
        if parameter_hash(self.working_copy, STEPS) != parameter_hash(whole, STEPS):
            found.append("weights")
        if max(complete_steps(store.find()), default=0) != STEPS:
            found.append("checkpoints in the store")
        local = {path.relative_to(self.working_copy).as_posix(): path for path in self.working_copy.rglob("*")}
        objects = [name for name in store.find() if name in local]
        found += [name for name in objects if store.read(name) != local[name].read_bytes()]
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--kills", type=int, default=2, help="kills in each trial")
    parser.add_argument("--share", type=float, default=0.05, help="share of the requests that fail")
    parser.add_argument("--latency", type=float, default=2.0, help="seconds of delay of each request")
    parser.add_argument("folder", nargs="?", type=Path)
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="storage-faults-"))
    server = S3Server()
    server.create_bucket()
    os.environ.update(server.variables)
    command = [sys.executable, "-m", "maxhydra", *RUN, "run.name=whole"]
    subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True)
    print(
        "| trial | kills | hosts lost | requests | failed requests | seconds | equal |\n|---|---|---|---|---|---|---|"
    )
    is_equal = True
    for number in range(1, args.trials + 1):
        server.faults.share, server.faults.seconds = args.share, args.latency
        requests, failed, start = server.faults.requests, server.faults.failed, time.monotonic()
        trial = Trial(number, folder, server)
        trial.run(args.kills)
        counts = f"{server.faults.requests - requests} | {server.faults.failed - failed}"
        seconds = time.monotonic() - start
        server.faults.share = server.faults.seconds = 0.0
        found = trial.differences(folder / "outputs" / "whole")
        is_equal &= not found
        text = "yes" if not found else f"no: {', '.join(found)}"
        print(f"| {number} | {trial.kills} | {trial.moves} | {counts} | {seconds:.0f} | {text} |", flush=True)
    server.close()
    if args.folder is None and is_equal:
        shutil.rmtree(folder)
    return not is_equal


if __name__ == "__main__":
    sys.exit(main())
