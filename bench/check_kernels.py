"""Checks every kernel, compiled for this GPU, against its float32 reference: values and gradients over a grid.

    python bench/check_kernels.py [attention] [gated_delta] ... [--processes 8]

Prints a JSON line for each kernel, backend and dtype: the number of cases, the largest relative errors (by norm) of
values and of gradients (null: no gradients), and the limit. Exits with 1 if an error exceeds the limit or a case fails.
Backends are those of this platform that support a case; inputs are rounded first, so that only the kernel's own error
remains.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

import decode_cases
import jax
import numpy as np
import training_cases
from checks import Case, Result, run_check
from target import open_target

# Ten roundings of the dtype; for float32 the order of summation contributes more.
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2.5e-3}
KERNELS = {**training_cases.KERNELS, **decode_cases.KERNELS}


def device() -> str:
    return jax.devices()[0].device_kind


def run(case: Case) -> list[Result]:
    return run_check(case, KERNELS[case.kernel].check)


def summary(results: Iterable[Result]) -> list[dict]:
    groups = defaultdict(list)
    for result in results:
        groups[result.case.kernel, result.backend, result.case.dtype].append(result)
    return [line(*names, group) for names, group in groups.items()]


def line(kernel: str, backend: str, dtype: str, group: list[Result]) -> dict:
    limit = LIMITS[dtype]
    failed = [
        f"{result.case.description}: {result.error or (result.values, result.gradients)}"
        for result in group
        if not result.is_within(limit)
    ]
    return {
        "bench": "check_kernels",
        "kernel": kernel,
        "backend": backend,
        "dtype": dtype,
        "cases": len(group),
        "values": largest(result.values for result in group),
        "gradients": largest(result.gradients for result in group),
        "limit": limit,
        **({"failed": failed} if failed else {}),
    }


def largest(errors: Iterable[float | None]) -> float | None:
    """The largest error, NaN if one is NaN; None if there are none."""
    known = [error for error in errors if error is not None]
    return float(np.max(known)) if known else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=", ".join(KERNELS))
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) * 3 // 4, 1))
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.kernels} - {*KERNELS}):
        parser.error(f"unknown kernel {unknown[0]!r}; expected {', '.join(KERNELS)}")
    # The processes share the GPU; the reference need not be fast, so its matmuls are not autotuned.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    cases = [case for name in arguments.kernels or KERNELS for case in KERNELS[name].cases()]
    context = multiprocessing.get_context("spawn")
    # Each process uses the compiler flags of training.
    with ProcessPoolExecutor(arguments.processes, context, open_target, ([],)) as pool:
        results = []
        for count, case_results in enumerate(pool.map(run, cases), start=1):
            results += case_results
            print(
                f"\r{count} of {len(cases)} cases", end="" if count < len(cases) else "\n", file=sys.stderr, flush=True
            )
        environment = {"device": pool.submit(device).result(), "jax": jax.__version__}
    environment["date"] = datetime.date.today().isoformat()
    lines = summary(results)
    for entry in lines:
        print(json.dumps({**entry, **environment}), flush=True)
    if unserved := {case.kernel for case in cases} - {entry["kernel"] for entry in lines}:
        print(f"no backend on this machine supports {', '.join(sorted(unserved))}", file=sys.stderr)
    return 1 if unserved or any("failed" in entry for entry in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
