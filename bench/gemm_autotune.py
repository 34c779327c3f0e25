"""Autotunes the cuBLASLt algorithm of each GEMM of a training step on a GPU that runs at its power limit.

    python bench/gemm_autotune.py model=llama3.2-1b train.seq_len=4096 [--to gemms.txt] [--within FOLDER]
    XLA_FLAGS=--xla_gpu_load_autotune_results_from=gemms.txt python bench/pretrain.py model=llama3.2-1b ...

XLA times algorithms one call at a time, on a card that may be cool and at its highest clock. In training the card is at
its power limit, where the time of a GEMM is proportional to its energy: single and repeated calls were seen to differ
by up to 10 %. Here each GEMM is called repeatedly with each algorithm, in isolation, until the clock has settled. Times
inside the step would mislead: an algorithm that is fast there may slow down everything else.

XLA reads autotune results from a file when a process starts, so each set of choices needs a process. The key of an
entry in that file cannot be predicted, so every entry gets a distinct sequence of algorithms over several runs, by
which it is recognised in the compiled program. NVIDIA GPUs only; prints a JSON line for each GEMM and writes the file.
"""

import argparse
import collections
import fcntl
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Number of algorithms that cuBLASLt offers for such a GEMM.
ALGORITHMS = 8
LOAD, DUMP = "--xla_gpu_load_autotune_results_from", "--xla_gpu_dump_autotune_results_to"
# HLO lines: a two-dimensional array, and a cuBLASLt call.
ARRAY = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = \w+\[\d+,\d+\]\{(\d),(\d)\} ")
CALL = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = \(?(\w+)\[(\d+),(\d+)\]\{(\d),(\d)\}.* custom-call\((.*?)\), .*__cublas\$lt\$matmul"
)
OPERANDS = ("lhs", "rhs")
# The start of an entry in XLA's autotune results.
ENTRY = re.compile(r"(?m)^(?=entries \{)")
DTYPES = {"bf16": "bfloat16", "f32": "float32"}
# Seconds of warm-up calls, and of timed calls.
WARM_UP_SECONDS, TIMED_SECONDS = 0.1, 0.12


class Gemm(NamedTuple):
    """A GEMM as XLA calls cuBLASLt for it."""

    dtype: str
    rows: int
    columns: int
    terms: int
    lhs: int
    """The contracted dimension of the left operand."""
    rhs: int
    orders: str
    """Layouts of both operands and the output, minor dimension first, as in 10 10 01."""
    is_added: bool
    is_in_place: bool


def gemms_of(hlo: str) -> list[tuple[Gemm, int]]:
    """The GEMMs of a compiled program, each with its algorithm."""
    gemms, lines = [], hlo.splitlines()
    orders = {array[1]: array[2] + array[3] for line in lines if (array := ARRAY.match(line))}
    for line in lines:
        if call := CALL.match(line):
            dtype, rows, columns, first, second, inputs = call.groups()
            lhs, rhs = (
                int(re.search(rf'"{operand}_contracting_dimensions":\["(\d)"\]', line)[1]) for operand in OPERANDS
            )
            terms = int(re.search(r'"lhs_stride":"(\d+)"', line)[1]) // int(rows)
            operands = [orders[name.strip(" %")] for name in inputs.split(",")[:2]]
            order = " ".join([*operands, first + second])
            is_added, is_in_place = '"beta":1' in line, "output_to_operand_aliasing" in line
            gemm = Gemm(dtype, int(rows), int(columns), terms, lhs, rhs, order, is_added, is_in_place)
            algorithm = re.search(r'"selected_algorithm":"(\d+)"', line)
            gemms.append((gemm, int(algorithm[1]) if algorithm else 0))
    return gemms


class AutotuneResults:
    """XLA's autotune results as text; the entries with a cuBLASLt algorithm are numbered."""

    def __init__(self, text: str, without: Iterable[str] = ()):
        self._entries, excluded = ENTRY.split(text), set(without)
        self.indices = [
            index
            for index, entry in enumerate(self._entries)
            if "backend: CUBLASLT" in entry and _fingerprint(entry) not in excluded
        ]

    def fingerprints(self) -> list[str]:
        return [_fingerprint(self._entries[index]) for index in self.indices]

    def with_algorithms(self, algorithm_of: Callable[[int], int | None]) -> str:
        """The text with algorithm_of(number of an entry) in each entry; None keeps the current one."""
        entries = list(self._entries)
        for number, index in enumerate(self.indices):
            algorithm = algorithm_of(number)
            if algorithm is not None:
                bare = re.sub(r"\n *algorithm: \d+", "", entries[index])
                entries[index] = re.sub(r"(?m)^( *)gemm \{$", rf"\g<0>\n\g<1>  algorithm: {algorithm}", bare)
        return "".join(entries)


def _fingerprint(entry: str) -> str:
    return re.search(r'hlo_fingerprint: "(\w+)"', entry)[1]


def algorithm_in_run(number: int, run: int) -> int:
    """The algorithm of an entry in a run: each algorithm in one run, in a different order for each of 32 entries."""
    step, start = (1, 3, 5, 7)[number // ALGORITHMS % 4], number % ALGORITHMS
    return (step * run + start) % ALGORITHMS


def identify_entry(algorithms: Mapping[int, int], count: int) -> int | None:
    """The entry that had these algorithms, by run; None if it is ambiguous."""
    matches = [
        number for number in range(count) if all(algorithm_in_run(number, run) == a for run, a in algorithms.items())
    ]
    return matches[0] if len(matches) == 1 else None


def digit(number: int, run: int) -> int:
    """The algorithm of an entry of the step in one of two runs, which together identify it."""
    return number // ALGORITHMS**run % ALGORITHMS


class Workspace(NamedTuple):
    """The folder through which the processes exchange files."""

    folder: Path
    overrides: list[str]

    def start(self, name: str, role: str, flag: str) -> subprocess.Popen[bytes]:
        flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}={self.folder / f'{name}.txt'}"
        command = [sys.executable, __file__, "--as", role, "--to", str(self.folder / f"{name}.json")]
        command += ["--within", str(self.folder), *self.overrides]
        environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with open(self.folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(command, env=environment, stderr=log)

    def read(self, name: str) -> Any:
        """Read a process's result; prints the error and returns None if it failed."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            tail = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
            print(f"{name} failed: {''.join(tail)[:300]}", file=sys.stderr)
            return None
        return json.loads(path.read_text())

    def results(self, name: str, without: Iterable[str] = ()) -> AutotuneResults:
        return AutotuneResults((self.folder / f"{name}.txt").read_text(), without)

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.txt").write_text(text)


def choose(work: Workspace, to: Path) -> None:
    """Time all algorithms of all GEMMs and write the file with the fastest ones."""
    work.start("step", "step", DUMP).wait()
    step = work.read("step")
    if step is None or not (work.folder / "step.txt").exists():
        print("XLA wrote no autotune results; they need an NVIDIA GPU", file=sys.stderr)
        raise SystemExit(2)
    step_results = work.results("step")
    for run in range(2):
        work.write(f"step{run}", step_results.with_algorithms(lambda number, run=run: digit(number, run)))
    processes = [work.start(f"step{run}", "step", LOAD) for run in range(2)]
    processes += [work.start(name, name, DUMP) for name in ("alone", "reference")]
    for process in processes:
        process.wait()
    entries = step_entries(work, len(step_results.indices))
    times = isolated_times(work, work.results("alone", work.results("reference").fingerprints()))

    before, chosen = dict(map(_pair, step)), {}
    for number, gemm in entries.items():
        by_algorithm = times.get(gemm, {})
        if by_algorithm:
            chosen[number] = min(by_algorithm, key=lambda algorithm: by_algorithm[algorithm])
        ms = {algorithm: round(1e3 * seconds, 4) for algorithm, seconds in sorted(by_algorithm.items())}
        line = {**gemm._asdict(), "before": before[gemm], "chosen": chosen.get(number), "ms": ms}
        print(json.dumps({"bench": "gemm_autotune", **line}), flush=True)
    to.write_text(step_results.with_algorithms(chosen.get))


def step_entries(work: Workspace, count: int) -> dict[int, Gemm]:
    """The GEMM of each numbered entry of the step's results."""
    digits_of: dict[Gemm, list[int]] = collections.defaultdict(list)
    for run in range(2):
        for gemm, algorithm in dict(map(_pair, work.read(f"step{run}") or [])).items():
            digits_of[gemm].append(algorithm)
    complete = {gemm: digits for gemm, digits in digits_of.items() if len(digits) == 2}
    numbers = {low + ALGORITHMS * high: gemm for gemm, (low, high) in complete.items()}
    return {number: gemm for number, gemm in sorted(numbers.items()) if number < count}


def isolated_times(work: Workspace, results: AutotuneResults) -> dict[Gemm, dict[int, float]]:
    """Seconds of each GEMM by algorithm, normalised to the clock at which the reference GEMM ran fastest."""
    names = [f"run{run}" for run in range(ALGORITHMS)]
    for run, name in enumerate(names):
        work.write(name, results.with_algorithms(lambda number, run=run: algorithm_in_run(number, run)))
    for name, process in [(name, work.start(name, "timed", LOAD)) for name in names]:
        process.wait()
        print(f"{name} of {ALGORITHMS} finished", file=sys.stderr)
    rows_by_run = {run: rows for run, name in enumerate(names) if (rows := work.read(name)) is not None}
    if not rows_by_run:
        raise SystemExit(2)
    times: dict[Gemm, dict[int, float]] = {}
    gemms_by_run = {run: {Gemm(*gemm): rest for gemm, *rest in rows} for run, rows in rows_by_run.items()}
    for gemm in {gemm for gemms in gemms_by_run.values() for gemm in gemms}:
        rows = {run: gemms[gemm] for run, gemms in gemms_by_run.items() if gemm in gemms}
        if identify_entry({run: algorithm for run, (algorithm, *_) in rows.items()}, len(results.indices)) is None:
            print(f"{gemm} matches no entry of the autotune results", file=sys.stderr)
            continue
        times[gemm] = {algorithm: seconds / reference for algorithm, seconds, reference in rows.values()}
    fastest = min(reference for gemms in gemms_by_run.values() for _, _, reference in gemms.values())
    return {gemm: {a: ratio * fastest for a, ratio in ratios.items()} for gemm, ratios in times.items()}


def _pair(values: list) -> tuple[Gemm, int]:
    return Gemm(*values[0]), values[1]


def run_role(role: str, folder: Path, overrides: list[str]) -> list:
    """The result of a worker process, with the compiler flags of the step."""
    from target import open_target

    from maxhydra.measure.training import prepare

    target, _ = open_target(overrides)
    if role == "step":
        prepared = prepare(target.config, target.machine)
        prepared.loader.close()
        return gemms_of(prepared.step.as_text())
    if role == "reference":
        return gemms_of(compile_gemm(REFERENCE).as_text())
    gemms = list(dict(map(_pair, json.loads((folder / "step.json").read_text()))))
    return time_all(gemms, folder / "card") if role == "timed" else autotune_all(gemms, folder / "alone.txt")


def operands(gemm: Gemm, make: Callable[..., Any]) -> list:
    """make(number, shape, dtype) for each operand."""
    lhs, rhs = (gemm.rows, gemm.terms), (gemm.terms, gemm.columns)
    shapes = [lhs if gemm.lhs == 1 else lhs[::-1], rhs if gemm.rhs == 0 else rhs[::-1]]
    arrays = [make(number, shape, "bfloat16") for number, shape in enumerate(shapes)]
    if gemm.is_added:
        arrays.append(make(2, (gemm.rows, gemm.columns), DTYPES[gemm.dtype]))
    return arrays


def compile_gemm(gemm: Gemm) -> Any:
    """Compile the GEMM alone."""
    import jax

    *input_formats, out_format = formats(gemm)

    def call(lhs: Any, rhs: Any, *addend: Any) -> Any:
        dims = (((gemm.lhs,), (gemm.rhs,)), ((), ()))
        out = jax.lax.dot_general(lhs, rhs, dims, preferred_element_type=DTYPES[gemm.dtype])
        return out + addend[0] if addend else out

    addend_format = [out_format] if gemm.is_added else []
    jitted = jax.jit(
        call,
        in_shardings=[*input_formats, *addend_format],
        out_shardings=out_format,
        donate_argnums=(2,) if gemm.is_in_place else (),
    )
    return jitted.lower(*operands(gemm, lambda _, shape, dtype: jax.ShapeDtypeStruct(shape, dtype))).compile()


def formats(gemm: Gemm) -> list:
    """Layouts of operands and output."""
    import jax
    from jax.experimental.layout import Format, Layout

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return [Format(Layout(tuple(map(int, reversed(order)))), sharding) for order in gemm.orders.split()]


def compile_sampler(gemm: Gemm) -> Any:
    """Compile a function that returns random operands."""
    import jax

    *input_formats, out_format = formats(gemm)

    def sample() -> list:
        return operands(gemm, lambda number, *spec: jax.random.normal(jax.random.key(number), *spec))

    return jax.jit(sample, out_shardings=[*input_formats, out_format][: 3 if gemm.is_added else 2]).lower().compile()


def seconds_per_call(compiled: Any, arrays: list, seconds: float) -> float:
    """Mean seconds of a call, over about `seconds` seconds of calls."""
    import jax

    def calls(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            out = compiled(*arrays)
            if len(arrays) > 2:
                arrays[2] = out
        jax.block_until_ready(out)
        return time.perf_counter() - start

    calls(1)
    count = max(2, int(seconds / max(calls(2) / 2, 1e-6)))
    return calls(count) / count


REFERENCE = Gemm("bf16", 8192, 8192, 8192, 1, 0, "10 10 10", False, False)


def autotune_all(gemms: list[Gemm], results: Path) -> list:
    """Have XLA autotune each GEMM alone and collect the results; XLA may write those of all programs or of the last."""
    entries: dict[str, None] = {}
    for gemm in gemms:
        compile_gemm(gemm)
        entries |= dict.fromkeys(ENTRY.split(results.read_text()))
    results.write_text("".join(entries))
    return []


def time_all(gemms: list[Gemm], lock: Path) -> list:
    """Each GEMM with its algorithm, its time alone, and that of the reference rhs after it.

    Everything is compiled before the lock on the GPU is taken.
    """
    compiled, samplers = (
        {gemm: compile_function(gemm) for gemm in (REFERENCE, *gemms)}
        for compile_function in (compile_gemm, compile_sampler)
    )
    rows = []
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        reference_arrays = samplers[REFERENCE]()
        for gemm in gemms:
            arrays, ((_, algorithm),) = samplers[gemm](), gemms_of(compiled[gemm].as_text())
            seconds_per_call(compiled[gemm], arrays, WARM_UP_SECONDS)
            seconds = seconds_per_call(compiled[gemm], arrays, TIMED_SECONDS)
            rows.append(
                (gemm, algorithm, seconds, seconds_per_call(compiled[REFERENCE], reference_arrays, TIMED_SECONDS / 2))
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--as", dest="role", choices=["step", "alone", "reference", "timed"], help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, default=Path("gemms.txt"), help="the file to write")
    parser.add_argument("--within", type=Path, help="folder for intermediate files (default: a temporary one)")
    arguments, overrides = parser.parse_known_args()
    if arguments.role is None:
        with tempfile.TemporaryDirectory() as folder:
            within = arguments.within or Path(folder)
            within.mkdir(parents=True, exist_ok=True)
            # Programs from the compilation cache are not autotuned.
            choose(Workspace(within, [*overrides, "hardware.compilation_cache=null"]), arguments.to)
        return
    arguments.to.write_text(json.dumps(run_role(arguments.role, arguments.within, overrides)))


if __name__ == "__main__":
    main()
