"""Every kernel as it is compiled for this GPU against its reference in float32: values and gradients over a grid.

    python bench/check_kernels.py [attention] [gated_delta] ... [--processes 8]

A line of JSON for each kernel, backend and number format: how many cases there were, and the largest distances of
values and of gradients (null: what it serves has none), relative by the norm, beside the limit. Ends with 1 if one is
beyond it or a case has failed. Backends are those of this machine's platform whose tables say that they serve a case;
inputs are rounded first, so that what differs is the kernel's own.
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
from checks import Case, Found, checked
from subject import opened

# By the number format of a case, ten of its roundings; of float32 the order of sums is more.
LIMITS = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2.5e-3}
KERNELS = {**training_cases.KERNELS, **decode_cases.KERNELS}


def device() -> str:
    return jax.devices()[0].device_kind


def run(case: Case) -> list[Found]:
    return checked(case, KERNELS[case.kernel].check)


def summary(found: Iterable[Found]) -> list[dict]:
    groups = defaultdict(list)
    for one in found:
        groups[one.case.kernel, one.backend, one.case.dtype].append(one)
    return [line(*names, group) for names, group in groups.items()]


def line(kernel: str, backend: str, dtype: str, group: list[Found]) -> dict:
    limit = LIMITS[dtype]
    failed = [
        f"{one.case.about}: {one.error or (one.values, one.gradients)}" for one in group if not one.is_within(limit)
    ]
    return {
        "bench": "check_kernels",
        "kernel": kernel,
        "backend": backend,
        "dtype": dtype,
        "cases": len(group),
        "values": largest(one.values for one in group),
        "gradients": largest(one.gradients for one in group),
        "limit": limit,
        **({"failed": failed} if failed else {}),
    }


def largest(distances: Iterable[float | None]) -> float | None:
    """Of those there are; no number if one is none."""
    there = [one for one in distances if one is not None]
    return float(np.max(there)) if there else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", help=", ".join(KERNELS))
    parser.add_argument("--processes", type=int, default=max((os.cpu_count() or 2) * 3 // 4, 1))
    arguments = parser.parse_args()
    if unknown := sorted({*arguments.kernels} - {*KERNELS}):
        parser.error(f"no kernel {unknown[0]!r}: {', '.join(KERNELS)}")
    # Of the processes, which share the GPU; nobody waits for the reference, so that its products need not be tuned.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    cases = [case for name in arguments.kernels or KERNELS for case in KERNELS[name].cases()]
    context = multiprocessing.get_context("spawn")
    # Each with the flags that kernels meet in training.
    with ProcessPoolExecutor(arguments.processes, context, opened, ([],)) as pool:
        found = []
        for count, several in enumerate(pool.map(run, cases), start=1):
            found += several
            print(
                f"\r{count} of {len(cases)} cases", end="" if count < len(cases) else "\n", file=sys.stderr, flush=True
            )
        told = {"device": pool.submit(device).result(), "jax": jax.__version__}
    told["date"] = datetime.date.today().isoformat()
    lines = summary(found)
    for each in lines:
        print(json.dumps({**each, **told}), flush=True)
    if unserved := {case.kernel for case in cases} - {each["kernel"] for each in lines}:
        print(f"nothing on this machine serves {', '.join(sorted(unserved))}", file=sys.stderr)
    return 1 if unserved or any("failed" in each for each in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
