"""Run the long form of the fuzz suite (tests/fuzz) in parallel processes and report the cases tried by area.

    python scripts/fuzz.py --cases 100000 --jobs 16 --report docs/lab/fuzz.md --report fuzz.json
    python scripts/fuzz.py --cases 2000 test_server_requests

The cases are divided among the tests in proportion to the `cases` of their @fuzz decorators, and each test's among
processes of --chunk cases with seeds of their own. Exit code 1 if a case failed.
"""

import argparse
import dataclasses
import itertools
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SUITE = "tests/fuzz"
PYTEST = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--no-header", "-p", "no:randomly", "-m", ""]
# A process that reports nothing for this long is ended; its cases have limits of their own (tests/support/fuzzing.py).
MAX_CHUNK_SECONDS = 3600


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The cases of one process: one test, one seed."""

    test: str
    cases: int
    seed: int


@dataclasses.dataclass
class Outcome:
    """What the cases of a chunk did, or of several chunks together."""

    cases: int = 0
    rejected: int = 0
    slowest_seconds: float = 0.0
    slowest_case: str = ""
    peak_bytes: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        self.cases += other.cases
        self.rejected += other.rejected
        if other.slowest_seconds > self.slowest_seconds:
            self.slowest_seconds, self.slowest_case = other.slowest_seconds, other.slowest_case
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        # Other seeds find the same minimal examples: the first line names the seed.
        known = {failure.partition("\n")[2] for failure in self.failures}
        self.failures += [failure for failure in other.failures if failure.partition("\n")[2] not in known]


def collect(areas: list[str]) -> dict[str, int]:
    """The tests of the suite and their shares."""
    targets = [f"{SUITE}/{Path(area).name.removesuffix('.py')}.py" for area in areas] or [SUITE]
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        variables = {**os.environ, "MAXHYDRA_FUZZ_PLAN": str(plan)}
        command = [*PYTEST, "--collect-only", *targets]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"collecting {' '.join(targets)} failed:\n{done.stdout}{done.stderr}")
        return json.loads(plan.read_text())


def divide(shares: dict[str, int], cases: int, chunk: int, seed: int) -> list[Chunk]:
    """Divide `cases` among the tests; chunks of all tests alternate, so that each has early results."""
    total = sum(shares.values())
    rows = []
    for test, share in shares.items():
        number = math.ceil(cases * share / total)
        # Slow tests have small shares, and get small chunks.
        count = math.ceil(number / max(1, min(chunk, math.ceil(chunk * share / max(shares.values())))))
        sizes = [number // count + (index < number % count) for index in range(count)]
        rows.append([(test, size) for size in sizes])
    interleaved = itertools.chain.from_iterable(itertools.zip_longest(*rows))
    return [Chunk(*entry, seed=seed + index) for index, entry in enumerate(entry for entry in interleaved if entry)]


def run_chunk(chunk: Chunk) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="maxhydra-fuzz-") as folder:
        log = Path(folder, "outcome.json")
        variables = {**os.environ, "MAXHYDRA_FUZZ_CASES": str(chunk.cases), "MAXHYDRA_FUZZ_LOG": str(log)}
        # Temporary files of the tests, removed with the folder even if the process is killed.
        variables["TMPDIR"] = folder
        command = [*PYTEST, f"--hypothesis-seed={chunk.seed}", chunk.test]
        with open(f"{folder}/output", "w+b") as output:
            try:
                code = subprocess.run(
                    command, cwd=ROOT, env=variables, stdout=output, stderr=output, timeout=MAX_CHUNK_SECONDS
                ).returncode
            except subprocess.TimeoutExpired:
                code = -9
            output.seek(0)
            text = output.read().decode(errors="replace")
        if not log.exists():
            return Outcome(failures=[_crash(chunk, code, text, log)])
        return _read_outcome(chunk, code, text, json.loads(log.read_text()))


def _read_outcome(chunk: Chunk, code: int, text: str, logged: dict[str, Any]) -> Outcome:
    stats = logged["tests"].get(chunk.test, {})
    outcome = Outcome(**stats, peak_bytes=logged["peak_bytes"])
    for failure in logged["failures"].values():
        outcome.failures.append(f"{chunk.test}, seed {chunk.seed}, {chunk.cases} cases\n{_minimal(failure)}")
    if code and not outcome.failures:
        outcome.failures.append(f"{chunk.test}, seed {chunk.seed}: pytest ended with {code}\n{text[-2000:]}")
    return outcome


def _crash(chunk: Chunk, code: int, text: str, log: Path) -> str:
    """Describe a process that died: the last output and the current case."""
    case = Path(f"{log}.case")
    shown = case.read_text(errors="replace") if case.exists() else "none was started"
    return f"{chunk.test}, seed {chunk.seed}: the process ended with {code}\nlast case: {shown}\n{text[-2000:]}"


def _minimal(failure: str) -> str:
    """The errors and minimal examples in a failure of hypothesis, without tracebacks and source listings."""
    lines = [re.sub(r"^(E|\s*[|+])\s", "", line).rstrip() for line in failure.splitlines()]
    shown: list[str] = []
    for index, line in enumerate(lines):
        if re.match(r"\s*(Falsifying|Failing)( explicit)? (example|test case): ", line):
            end = next((other for other in range(index, len(lines)) if lines[other].strip() == ")"), index)
            shown += lines[max(0, index - 3) : min(end, index + 40) + 1]
    return "\n".join(shown or lines[-40:])


def run_all(chunks: list[Chunk], jobs: int) -> dict[str, Outcome]:
    """Run chunks in parallel and print a line after each. Returns the outcomes by test."""
    outcomes: dict[str, Outcome] = {}
    started, cases, failures = time.monotonic(), 0, 0
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run_chunk, chunk): chunk for chunk in chunks}
        for count, done in enumerate(as_completed(running), 1):
            chunk, outcome = running[done], done.result()
            outcomes.setdefault(chunk.test, Outcome()).add(outcome)
            cases, failures = cases + outcome.cases, failures + len(outcome.failures)
            seconds = time.monotonic() - started
            test = chunk.test.removeprefix(f"{SUITE}/")
            print(
                f"{seconds:6.0f} s  {count}/{len(chunks)} processes  {cases} cases  {failures} failures  {test}",
                flush=True,
            )
            for failure in outcome.failures:
                print(f"FAILED {failure}\n", flush=True)
    return {chunk.test: outcomes[chunk.test] for chunk in chunks}


def by_area(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    areas: dict[str, Outcome] = {}
    for test, outcome in outcomes.items():
        areas.setdefault(Path(test.partition("::")[0]).stem.removeprefix("test_"), Outcome()).add(outcome)
    return dict(sorted(areas.items()))


def markdown(outcomes: dict[str, Outcome], seconds: float, command: str) -> str:
    areas = by_area(outcomes)
    total = Outcome()
    for outcome in areas.values():
        total.add(outcome)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    rows = [_row(area, outcome) for area, outcome in areas.items()]
    lines = [
        "# Fuzz suite",
        "",
        f"`{command}`: {total.cases:,} cases in {seconds / 60:.0f} min ({machine}), {len(total.failures)} failures.",
        "A case fails if it raises anything but a message about the input, takes over 10 s or allocates over 4 GB.",
        "",
        "| area | cases | rejected with a message | slowest case | peak memory | failures |",
        "|---|---|---|---|---|---|",
        *rows,
        _row("all", total),
        "",
    ]
    for failure in total.failures:
        lines += ["```text", failure, "```", ""]
    return "\n".join(lines)


def _row(area: str, outcome: Outcome) -> str:
    cells = [area, f"{outcome.cases:,}", f"{outcome.rejected:,}", f"{outcome.slowest_seconds:.2f} s"]
    cells += [f"{outcome.peak_bytes / 1e6:,.0f} MB", str(len(outcome.failures))]
    return f"| {' | '.join(cells)} |"


def write_reports(paths: Iterable[str], outcomes: dict[str, Outcome], seconds: float, command: str) -> None:
    values = {test: dataclasses.asdict(outcome) for test, outcome in outcomes.items()}
    for path in paths:
        as_json = json.dumps({"command": command, "seconds": round(seconds), "tests": values}, indent=1) + "\n"
        Path(path).write_text(as_json if path.endswith(".json") else markdown(outcomes, seconds, command))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", help="files of tests/fuzz; all by default")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--chunk", type=int, default=2000, help="largest number of cases of one process")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first process; the next is one more")
    parser.add_argument("--report", action="append", default=[], help="file to write, .md or .json; may be repeated")
    options = parser.parse_args()
    started = time.monotonic()
    chunks = divide(collect(options.areas), options.cases, options.chunk, options.seed)
    print(f"{len(chunks)} processes, {options.jobs} at a time, seeds from {options.seed}", flush=True)
    outcomes = run_all(chunks, options.jobs)
    command = f"python scripts/fuzz.py --cases {options.cases} --jobs {options.jobs} --seed {options.seed}"
    write_reports(options.report, outcomes, time.monotonic() - started, command)
    print(markdown(outcomes, time.monotonic() - started, command))
    return int(any(outcome.failures for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
