"""Train every small model on meshes of 8 simulated devices and compare with one device.

    python scripts/mesh_matrix.py --jobs 2 --report matrix.json
    python scripts/mesh_matrix.py --family llama3-tiny mixtral-tiny --mesh fsdp expert

The meshes named processes_* consist of two processes with 4 devices each, whose outermost axis spans both.

Each case takes 5 steps in float32 on the same packed batch of 8 rows as one device does. A case passes if every loss is
within 1e-5 of one device's, relative, and the gradient of every parameter within 1e-4 of its norm. A mesh that a model
rejects with a message is counted separately. Exit code 1 if a case fails or raises anything else.

A case with a larger error is repeated in float64, and passes if it then agrees to 1e-9. In float32 rounding can decide
which experts a token gets or which sign a tiny gradient has; in float64 only an error of the program is left.
"""

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
DEVICES, ROWS, LENGTH, STEPS = 8, 8, 64, 5
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
FLOAT64_TOLERANCE = 1e-9
TIMEOUT_SECONDS = 1200
# Options of each mesh.
MESHES: dict[str, list[str]] = {
    "data": ["mesh.data=8"],
    "fsdp": ["mesh.fsdp=8"],
    "tensor": ["mesh.fsdp=4", "mesh.tensor=2"],
    "data_fsdp_tensor": ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"],
    "ring": ["mesh.fsdp=2", "mesh.sequence=4", "mesh.context=ring"],
    "ulysses": ["mesh.fsdp=4", "mesh.sequence=2", "mesh.context=ulysses"],
    "fsdp_sequence_tensor": ["mesh.fsdp=2", "mesh.sequence=2", "mesh.tensor=2"],
    "expert": ["mesh.fsdp=2", "mesh.expert=4"],
    "fsdp_expert_tensor": ["mesh.fsdp=2", "mesh.expert=2", "mesh.tensor=2"],
    "stage": ["mesh.fsdp=4", "mesh.stage=2"],
    "fsdp_stage_tensor": ["mesh.fsdp=2", "mesh.stage=2", "mesh.tensor=2"],
    "slices": ["mesh.fsdp=4", "mesh.slices=2", "mesh.dcn.data=2"],
}
# Options of the meshes that span two processes: their first axis does, because it is the outermost.
PROCESS_MESHES: dict[str, list[str]] = {
    "processes_fsdp": ["mesh.fsdp=8"],
    "processes_tensor": ["mesh.fsdp=4", "mesh.tensor=2"],
    "processes_expert_ring": ["mesh.expert=2", "mesh.sequence=4", "mesh.context=ring"],
}
# Families of these meshes, unless --family names others: dense, experts, and the delta rule with experts.
PROCESS_FAMILIES = ("llama3-tiny", "mixtral-tiny", "qwen3-next-tiny")
# A single key head cannot be sharded.
ONE_KEY_HEAD = ["mesh.rules.kv_heads=[]", "mesh.rules.act_kv_heads=[]"]
# No clipping, so that the first moment after one step is the gradient times 1 - b1. With AdamW's usual eps of 1e-8 the
# first update of a weight is its learning rate times the sign of its gradient: where rounding decides the sign, one
# weight of qwen3.5-tiny moved the loss of step 4 by 5e-5 on one device, too. A large eps makes updates continuous.
COMMON = [
    "train.seq_len=64",
    "model.scan_unroll=1",
    "model.dtypes.compute=float32",
    "model.dtypes.weights=float32",
    "model.dtypes.logits=float32",
    "optimizer=adamw",
    "optimizer.clip_norm=null",
    "optimizer.eps=1e-3",
    "optimizer.schedule.warmup_steps=0",
    "train.steps=5",
]


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one case; `rejected` is the message of a mesh that the model does not support."""

    family: str
    mesh: str
    seconds: float
    loss_error: float | None = None
    gradient_error: float | None = None
    worst_parameter: str | None = None
    rejected: str | None = None
    error: str | None = None
    float64_error: float | None = None
    """The larger of both errors in float64, if those in float32 are too large."""

    @property
    def is_different(self) -> bool:
        """Whether an error in float32 is too large."""
        if self.loss_error is None or self.gradient_error is None:
            return False
        # NaN is not within a tolerance.
        return not (self.loss_error <= LOSS_TOLERANCE and self.gradient_error <= GRADIENT_TOLERANCE)

    @property
    def passes(self) -> bool:
        if self.error is not None:
            return False
        return not self.is_different or (self.float64_error is not None and self.float64_error <= FLOAT64_TOLERANCE)


def families() -> list[str]:
    """Names of the small models of all families."""
    return sorted(path.stem for path in (ROOT / "conf/model").glob("*-tiny.yaml"))


def run_family(family: str, meshes: list[str], *, is_float64: bool) -> Iterator[Result]:
    """Run the meshes of one family in this process, which has simulated devices, maybe together with another one."""
    # Imported here: the parent process needs no jax.
    from maxhydra import runtime  # noqa: PLC0415
    from maxhydra.config import ConfigError  # noqa: PLC0415
    from maxhydra.config.compose.composer import compose  # noqa: PLC0415
    from tests.support.mesh_cases import Case, compare, train, use_float64  # noqa: PLC0415

    if is_float64:
        use_float64()
    options = [f"model={family}", *COMMON]
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        runtime.start(compose([*options, "hardware=cpu"]).config.hardware)
    layers = compose(options).config.model
    # Pipeline stages need two repetitions of the pattern.
    repeated = len(layers.prefix) + 2 * len(layers.pattern)
    options += [f"model.num_layers={max(layers.num_layers, repeated)}"]
    expected = train(Case(options, devices=1, rows=ROWS, length=LENGTH, steps=STEPS))
    for name in meshes:
        start = time.perf_counter()
        try:
            mesh = [*(MESHES | PROCESS_MESHES)[name], *(ONE_KEY_HEAD if layers.num_kv_heads == 1 else [])]
            actual = train(Case([*options, *mesh], devices=DEVICES, rows=ROWS, length=LENGTH, steps=STEPS))
            measured: dict[str, Any] = compare(expected, actual)._asdict()
        except ConfigError as error:
            measured = {"rejected": str(error)}
        except Exception as error:  # reported as a failed case; the others still run
            measured = {"error": f"{type(error).__name__}: {error}"[:600]}
        yield Result(family, name, round(time.perf_counter() - start, 1), **measured)


def run_cases(family: str, meshes: list[str], processes: int) -> list[Result]:
    """Run the meshes of a family, those whose errors are too large in float64 too."""
    results = list(in_workers(family, meshes, processes))
    different = [result.mesh for result in results if result.error is None and result.is_different]
    repeated = in_workers(family, different, processes, "--float64") if different else ()
    wide = {result.mesh: result for result in repeated}
    return [_with_float64(result, wide[result.mesh]) if result.mesh in wide else result for result in results]


def _with_float64(result: Result, wide: Result) -> Result:
    if wide.loss_error is None or wide.gradient_error is None:
        return dataclasses.replace(result, error=f"in float64: {wide.error}")
    return dataclasses.replace(result, float64_error=max(wide.loss_error, wide.gradient_error))


def in_workers(family: str, meshes: list[str], processes: int, *options: str) -> Iterator[Result]:
    """Run a family in processes with simulated devices; meshes that the first of them does not report have failed."""
    missing = list(meshes)
    command = [sys.executable, __file__, *options, "--worker", family, "--mesh", *meshes]
    with tempfile.TemporaryFile("w+") as errors:
        workers = start_workers(command, processes, errors)
        timer = threading.Timer(TIMEOUT_SECONDS, lambda: [worker.kill() for worker in workers])
        timer.start()
        assert workers[0].stdout is not None
        for line in workers[0].stdout:
            if line.startswith("{"):
                result = Result(**json.loads(line))
                missing.remove(result.mesh)
                yield result
        codes = [worker.wait() for worker in workers]
        timer.cancel()
        errors.seek(0)
        reason = f"exit codes {codes}: {errors.read().strip()[-400:]}"
    yield from (Result(family, mesh, 0.0, error=reason) for mesh in missing)


def start_workers(command: list[str], processes: int, errors: IO[str]) -> list[subprocess.Popen[str]]:
    """Start processes that share DEVICES simulated devices; several of them form a cluster."""
    flags = f"--xla_force_host_platform_device_count={DEVICES // processes} --xla_backend_optimization_level=0"
    modules = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": modules}
    if processes > 1:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        variables |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(processes)}
    return [
        subprocess.Popen(
            command,
            env={**variables, "JAX_PROCESS_ID": str(index)} if processes > 1 else variables,
            cwd=ROOT,
            stdout=subprocess.DEVNULL if index else subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        for index in range(processes)
    ]


def describe(result: Result) -> str:
    if result.rejected is not None:
        return f"rejected: {result.rejected.splitlines()[0]}"
    if result.error is not None:
        return f"FAILED: {result.error}"
    errors = f"loss {result.loss_error:.1e}, gradient {result.gradient_error:.1e} ({result.worst_parameter})"
    if result.float64_error is not None:
        errors += f"; in float64 {result.float64_error:.1e}"
    return errors if result.passes else f"FAILED: {errors}"


def table(results: list[Result]) -> str:
    """A Markdown table with a row for each mesh."""
    errors = ("largest loss error", "largest gradient error")
    columns = ("mesh", "equal", "equal in float64 only", "rejected with a message", "failed", *errors)
    lines = [columns, ("---",) * len(columns)]
    for name, options in (MESHES | PROCESS_MESHES).items():
        of_mesh = [result for result in results if result.mesh == name]
        if not of_mesh:
            continue
        rejected = sum(result.rejected is not None for result in of_mesh)
        failed = sum(not result.passes for result in of_mesh)
        loss = max((result.loss_error for result in of_mesh if result.loss_error is not None), default=0.0)
        gradient = max((result.gradient_error for result in of_mesh if result.gradient_error is not None), default=0.0)
        mesh = " x ".join(option.removeprefix("mesh.") for option in options)
        mesh += ", two processes" if name in PROCESS_MESHES else ""
        rounded = sum(result.passes and result.is_different for result in of_mesh)
        counts = (len(of_mesh) - rounded - rejected - failed, rounded, rejected, failed)
        lines.append((mesh, *map(str, counts), f"{loss:.1e}", f"{gradient:.1e}"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*MESHES, *PROCESS_MESHES]
    parser.add_argument("--family", nargs="+", choices=families(), help="default: all")
    parser.add_argument("--mesh", nargs="+", default=names, choices=names)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="families at a time")
    parser.add_argument("--report", type=Path, help="JSON file with all cases")
    parser.add_argument("--worker", metavar="FAMILY", help=argparse.SUPPRESS)
    parser.add_argument("--float64", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        for result in run_family(args.worker, args.mesh, is_float64=args.float64):
            print(json.dumps(dataclasses.asdict(result)), flush=True)
        return 0
    results: list[Result] = []

    def run(case: tuple[str, list[str], int]) -> None:
        for result in run_cases(*case):
            results.append(result)
            print(f"{result.family:16} {result.mesh:22} {result.seconds:6.1f} s  {describe(result)}", flush=True)

    one, two = ([name for name in args.mesh if name in meshes] for meshes in (MESHES, PROCESS_MESHES))
    cases = [(family, two, 2) for family in args.family or PROCESS_FAMILIES if two]
    cases += [(family, one, 1) for family in args.family or families() if one]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, cases))
    if args.report is not None:
        args.report.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n")
    failed = sum(not result.passes for result in results)
    rejected = sum(result.rejected is not None for result in results)
    print(table(results))
    print(f"{len(results) - failed - rejected} equal, {rejected} rejected, {failed} failed of {len(results)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
