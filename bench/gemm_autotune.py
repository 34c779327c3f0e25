"""Which of the library's algorithms each matrix product of a training step should take on a GPU at its power limit.

    python bench/products.py model=llama3.2-1b train.seq_len=4096 [--to products.txt] [--within FOLDER]
    XLA_FLAGS=--xla_gpu_load_autotune_results_from=products.txt python bench/pretrain.py model=llama3.2-1b ...

XLA times algorithms one call at a time, on a card that may be cool and at its highest clock. In training it stands at
its power limit, where the time of a product goes with the energy that it takes: single calls and calls over and over
were seen to differ by up to a tenth. Here each product is called over and over by each algorithm, alone, until the card
is as slow as it will be. Times inside the step would mislead: what is fast there may make all else slow.

XLA reads the results of its trials from a file when a process starts, so each set of choices is a process. What a
product's entry in that file is called cannot be known, so entries get numbers that tell them apart in the program that
was compiled. NVIDIA GPUs alone; a line of JSON for each product, and the file.
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

# As many as the library offers for a product of this kind.
ALGORITHMS = 8
LOAD, DUMP = "--xla_gpu_load_autotune_results_from", "--xla_gpu_dump_autotune_results_to"
# An array of two dimensions, and a call of the library.
MADE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = \w+\[\d+,\d+\]\{(\d),(\d)\} ")
CALL = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = \(?(\w+)\[(\d+),(\d+)\]\{(\d),(\d)\}.* custom-call\((.*?)\), .*__cublas\$lt\$matmul"
)
SIDES = ("lhs", "rhs")
# Where an entry of XLA's results begins.
ENTRY = re.compile(r"(?m)^(?=entries \{)")
DTYPES = {"bf16": "bfloat16", "f32": "float32"}
# Seconds of calls before those that are timed, and of these.
SETTLE, TIMED = 0.1, 0.12


class Product(NamedTuple):
    """A product as the compiler calls the library for it."""

    dtype: str
    rows: int
    columns: int
    terms: int
    left: int
    """The dimension of the left operand that is summed over."""
    right: int
    orders: str
    """Dimensions of both operands and the output, the fastest first, as in 10 10 01."""
    is_added: bool
    is_in_place: bool


def products(hlo: str) -> list[tuple[Product, int]]:
    """Those of a compiled program, each with the number of its algorithm."""
    found, lines = [], hlo.splitlines()
    orders = {made[1]: made[2] + made[3] for line in lines if (made := MADE.match(line))}
    for line in lines:
        if call := CALL.match(line):
            dtype, rows, columns, first, second, given = call.groups()
            left, right = (int(re.search(rf'"{side}_contracting_dimensions":\["(\d)"\]', line)[1]) for side in SIDES)
            terms = int(re.search(r'"lhs_stride":"(\d+)"', line)[1]) // int(rows)
            operands = [orders[name.strip(" %")] for name in given.split(",")[:2]]
            order = " ".join([*operands, first + second])
            is_added, is_in_place = '"beta":1' in line, "output_to_operand_aliasing" in line
            product = Product(dtype, int(rows), int(columns), terms, left, right, order, is_added, is_in_place)
            algorithm = re.search(r'"selected_algorithm":"(\d+)"', line)
            found.append((product, int(algorithm[1]) if algorithm else 0))
    return found


class Results:
    """What XLA found by trial, as text: entries, of which those with an algorithm of the library are numbered."""

    def __init__(self, text: str, without: Iterable[str] = ()):
        self._parts, left_out = ENTRY.split(text), set(without)
        self.numbers = [
            place
            for place, part in enumerate(self._parts)
            if "backend: CUBLASLT" in part and _fingerprint(part) not in left_out
        ]

    def fingerprints(self) -> list[str]:
        return [_fingerprint(self._parts[place]) for place in self.numbers]

    def with_algorithms(self, algorithm_of: Callable[[int], int | None]) -> str:
        """`algorithm_of` the number of an entry; None: the one that it has."""
        parts = list(self._parts)
        for number, place in enumerate(self.numbers):
            algorithm = algorithm_of(number)
            if algorithm is not None:
                bare = re.sub(r"\n *algorithm: \d+", "", parts[place])
                parts[place] = re.sub(r"(?m)^( *)gemm \{$", rf"\g<0>\n\g<1>  algorithm: {algorithm}", bare)
        return "".join(parts)


def _fingerprint(part: str) -> str:
    return re.search(r'hlo_fingerprint: "(\w+)"', part)[1]


def in_turn(number: int, run: int) -> int:
    """The algorithm of an entry in a run: each in one of the runs, and no two of 32 entries in the same order."""
    step, start = (1, 3, 5, 7)[number // ALGORITHMS % 4], number % ALGORITHMS
    return (step * run + start) % ALGORITHMS


def numbered(algorithms: Mapping[int, int], count: int) -> int | None:
    """The entry that had these algorithms, by run; None where it cannot be told."""
    same = [number for number in range(count) if all(in_turn(number, run) == a for run, a in algorithms.items())]
    return same[0] if len(same) == 1 else None


def digit(number: int, run: int) -> int:
    """The same for programs that are compiled alone, twice."""
    return number // ALGORITHMS**run % ALGORITHMS


class Work(NamedTuple):
    """Where processes leave what they found."""

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
        """None where the process failed, after saying why."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            last = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
            print(f"{name} failed: {''.join(last)[:300]}", file=sys.stderr)
            return None
        return json.loads(path.read_text())

    def results(self, name: str, without: Iterable[str] = ()) -> Results:
        return Results((self.folder / f"{name}.txt").read_text(), without)

    def write(self, name: str, text: str) -> None:
        (self.folder / f"{name}.txt").write_text(text)


def choose(work: Work, to: Path) -> None:
    work.start("step", "step", DUMP).wait()
    step = work.read("step")
    if step is None or not (work.folder / "step.txt").exists():
        print("XLA left no results of trials, as it does on an NVIDIA GPU", file=sys.stderr)
        raise SystemExit(2)
    of_step = work.results("step")
    for run in range(2):
        work.write(f"step{run}", of_step.with_algorithms(lambda number, run=run: digit(number, run)))
    others = [work.start(f"step{run}", "step", LOAD) for run in range(2)]
    others += [work.start(name, name, DUMP) for name in ("alone", "reference")]
    for process in others:
        process.wait()
    entries = step_entries(work, len(of_step.numbers))
    times = times_alone(work, work.results("alone", work.results("reference").fingerprints()))

    before, chosen = dict(map(_pair, step)), {}
    for number, product in entries.items():
        by_algorithm = times.get(product, {})
        if by_algorithm:
            chosen[number] = min(by_algorithm, key=lambda algorithm: by_algorithm[algorithm])
        ms = {algorithm: round(1e3 * seconds, 4) for algorithm, seconds in sorted(by_algorithm.items())}
        line = {**product._asdict(), "before": before[product], "chosen": chosen.get(number), "ms": ms}
        print(json.dumps({"bench": "products", **line}), flush=True)
    to.write_text(of_step.with_algorithms(chosen.get))


def step_entries(work: Work, count: int) -> dict[int, Product]:
    """Entries of the step's results by number."""
    seen: dict[Product, list[int]] = collections.defaultdict(list)
    for run in range(2):
        for product, algorithm in dict(map(_pair, work.read(f"step{run}") or [])).items():
            seen[product].append(algorithm)
    whole = {product: digits for product, digits in seen.items() if len(digits) == 2}
    numbers = {low + ALGORITHMS * high: product for product, (low, high) in whole.items()}
    return {number: product for number, product in sorted(numbers.items()) if number < count}


def times_alone(work: Work, results: Results) -> dict[Product, dict[int, float]]:
    """Seconds of each product by algorithm, at the clock that a product of all runs had."""
    names = [f"run{run}" for run in range(ALGORITHMS)]
    for run, name in enumerate(names):
        work.write(name, results.with_algorithms(lambda number, run=run: in_turn(number, run)))
    for name, process in [(name, work.start(name, "timed", LOAD)) for name in names]:
        process.wait()
        print(f"{name} of {ALGORITHMS} ended", file=sys.stderr)
    found = {run: made for run, name in enumerate(names) if (made := work.read(name)) is not None}
    if not found:
        raise SystemExit(2)
    times: dict[Product, dict[int, float]] = {}
    of_product = {run: {Product(*one): rest for one, *rest in made} for run, made in found.items()}
    for product in {product for made in of_product.values() for product in made}:
        rows = {run: made[product] for run, made in of_product.items() if product in made}
        if numbered({run: algorithm for run, (algorithm, *_) in rows.items()}, len(results.numbers)) is None:
            print(f"{product} is none of the entries", file=sys.stderr)
            continue
        times[product] = {algorithm: seconds / reference for algorithm, seconds, reference in rows.values()}
    usual = min(reference for made in of_product.values() for _, _, reference in made.values())
    return {product: {a: share * usual for a, share in by.items()} for product, by in times.items()}


def _pair(values: list) -> tuple[Product, int]:
    return Product(*values[0]), values[1]


def found_by(role: str, folder: Path, overrides: list[str]) -> list:
    """What a process finds, with the compiler's flags of the step."""
    from subject import opened

    from maxhydra.measure.training import prepare

    subject, _ = opened(overrides)
    if role == "step":
        prepared = prepare(subject.config, subject.machine)
        prepared.loader.close()
        return products(prepared.step.as_text())
    if role == "reference":
        return products(program(REFERENCE).as_text())
    wanted = list(dict(map(_pair, json.loads((folder / "step.json").read_text()))))
    return time_all(wanted, folder / "card") if role == "timed" else try_all(wanted, folder / "alone.txt")


def operands(product: Product, make: Callable[..., Any]) -> list:
    """make(number, shape, dtype) of each."""
    left, right = (product.rows, product.terms), (product.terms, product.columns)
    shapes = [left if product.left == 1 else left[::-1], right if product.right == 0 else right[::-1]]
    given = [make(number, shape, "bfloat16") for number, shape in enumerate(shapes)]
    if product.is_added:
        given.append(make(2, (product.rows, product.columns), DTYPES[product.dtype]))
    return given


def program(product: Product) -> Any:
    """The product alone, compiled."""
    import jax

    *given, made = formats(product)

    def call(left: Any, right: Any, *added: Any) -> Any:
        dims = (((product.left,), (product.right,)), ((), ()))
        made = jax.lax.dot_general(left, right, dims, preferred_element_type=DTYPES[product.dtype])
        return made + added[0] if added else made

    of_added = [made] if product.is_added else []
    jitted = jax.jit(
        call,
        in_shardings=[*given, *of_added],
        out_shardings=made,
        donate_argnums=(2,) if product.is_in_place else (),
    )
    return jitted.lower(*operands(product, lambda _, shape, dtype: jax.ShapeDtypeStruct(shape, dtype))).compile()


def formats(product: Product) -> list:
    """How operands and output lie."""
    import jax
    from jax.experimental.layout import Format, Layout

    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return [Format(Layout(tuple(map(int, reversed(order)))), place) for order in product.orders.split()]


def drawer(product: Product) -> Any:
    """Makes random operands; compiled."""
    import jax

    *given, made = formats(product)

    def draw() -> list:
        return operands(product, lambda number, *of: jax.random.normal(jax.random.key(number), *of))

    return jax.jit(draw, out_shardings=[*given, made][: 3 if product.is_added else 2]).lower().compile()


def timed(compiled: Any, given: list, seconds: float) -> float:
    """Seconds of a call, of so many seconds of calls."""
    import jax

    def calls(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            made = compiled(*given)
            if len(given) > 2:
                given[2] = made
        jax.block_until_ready(made)
        return time.perf_counter() - began

    calls(1)
    count = max(2, int(seconds / max(calls(2) / 2, 1e-6)))
    return calls(count) / count


REFERENCE = Product("bf16", 8192, 8192, 8192, 1, 0, "10 10 10", False, False)


def try_all(wanted: list[Product], results: Path) -> list:
    """Have the compiler try the algorithms of each product alone, and keep the results, whether it leaves those of all
    programs or of the last."""
    entries: dict[str, None] = {}
    for product in wanted:
        program(product)
        entries |= dict.fromkeys(ENTRY.split(results.read_text()))
    results.write_text("".join(entries))
    return []


def time_all(wanted: list[Product], card: Path) -> list:
    """Each product with its algorithm, its time alone, and that of the reference right behind it. All is compiled
    before the card is taken."""
    compiled, drawers = ({product: of(product) for product in (REFERENCE, *wanted)} for of in (program, drawer))
    rows = []
    with open(card, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        of_reference = drawers[REFERENCE]()
        for product in wanted:
            given, ((_, algorithm),) = drawers[product](), products(compiled[product].as_text())
            timed(compiled[product], given, SETTLE)
            seconds = timed(compiled[product], given, TIMED)
            rows.append((product, algorithm, seconds, timed(compiled[REFERENCE], of_reference, TIMED / 2)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--as", dest="role", choices=["step", "alone", "reference", "timed"], help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, default=Path("products.txt"), help="the file to write")
    parser.add_argument("--within", type=Path, help="folder for what processes leave behind (a temporary one)")
    arguments, overrides = parser.parse_known_args()
    if arguments.role is None:
        with tempfile.TemporaryDirectory() as folder:
            within = arguments.within or Path(folder)
            within.mkdir(parents=True, exist_ok=True)
            # A program that is found in the cache is not tried.
            choose(Work(within, [*overrides, "hardware.compilation_cache=null"]), arguments.to)
        return
    arguments.to.write_text(json.dumps(found_by(arguments.role, arguments.within, overrides)))


if __name__ == "__main__":
    main()
