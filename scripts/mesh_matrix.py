"""Train every small model on meshes of 8 simulated devices and compare with one device.

    python scripts/mesh_matrix.py --jobs 2 --report matrix.json
    python scripts/mesh_matrix.py --family llama3-tiny mixtral-tiny --mesh fsdp expert

Each case takes 5 steps in float32 on the same packed batch of 8 rows as one device does. A case passes if every loss is
within 1e-5 of one device's, relative, and the gradient of every parameter within 1e-4 of its norm. A mesh that a model
rejects with a message is counted separately. Exit code 1 if a case fails or raises anything else.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEVICES, ROWS, LENGTH, STEPS = 8, 8, 64, 5
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
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
# A single key head cannot be sharded.
ONE_KEY_HEAD = ["mesh.rules.kv_heads=[]", "mesh.rules.act_kv_heads=[]"]
# No clipping, so that the first moment after one step is the gradient times 1 - b1.
COMMON = [
    "train.seq_len=64",
    "model.dtypes.compute=float32",
    "model.dtypes.weights=float32",
    "model.dtypes.logits=float32",
    "optimizer=adamw",
    "optimizer.clip_norm=null",
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

    @property
    def passes(self) -> bool:
        return self.rejected is not None or (
            self.error is None
            and self.loss_error is not None
            and self.gradient_error is not None
            and self.loss_error <= LOSS_TOLERANCE
            and self.gradient_error <= GRADIENT_TOLERANCE
        )


def families() -> list[str]:
    """Names of the small models of all families."""
    return sorted(path.stem for path in (ROOT / "conf/model").glob("*-tiny.yaml"))


def run_family(family: str, meshes: list[str]) -> Iterator[Result]:
    """Run the meshes of one family in this process, which has simulated devices."""
    # Imported here: the parent process needs no jax.
    from maxhydra.config import ConfigError  # noqa: PLC0415
    from maxhydra.config.compose.composer import compose  # noqa: PLC0415
    from tests.support.mesh_cases import Case, compare, train  # noqa: PLC0415

    options = [f"model={family}", *COMMON]
    layers = compose(options).config.model
    # Pipeline stages need two repetitions of the pattern.
    repeated = len(layers.prefix) + 2 * len(layers.pattern)
    options += [f"model.num_layers={max(layers.num_layers, repeated)}"]
    expected = train(Case(options, devices=1, rows=ROWS, length=LENGTH, steps=STEPS))
    for name in meshes:
        start = time.perf_counter()
        try:
            mesh = [*MESHES[name], *(ONE_KEY_HEAD if layers.num_kv_heads == 1 else [])]
            actual = train(Case([*options, *mesh], devices=DEVICES, rows=ROWS, length=LENGTH, steps=STEPS))
            measured: dict[str, Any] = compare(expected, actual)._asdict()
        except ConfigError as error:
            measured = {"rejected": str(error)}
        except Exception as error:  # reported as a failed case; the others still run
            measured = {"error": f"{type(error).__name__}: {error}"[:600]}
        yield Result(family, name, round(time.perf_counter() - start, 1), **measured)


def in_worker(family: str, meshes: list[str]) -> Iterator[Result]:
    """Run a family in a process with simulated devices; meshes that it does not report have failed."""
    flags = f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0"
    variables = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--worker", family, "--mesh", *meshes]
    missing = list(meshes)
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            command, env={**os.environ, **variables}, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        timer = threading.Timer(TIMEOUT_SECONDS, worker.kill)
        timer.start()
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith("{"):
                result = Result(**json.loads(line))
                missing.remove(result.mesh)
                yield result
        code = worker.wait()
        timer.cancel()
        errors.seek(0)
        reason = f"exit code {code}: {errors.read().strip()[-400:]}"
    yield from (Result(family, mesh, 0.0, error=reason) for mesh in missing)


def describe(result: Result) -> str:
    if result.rejected is not None:
        return f"rejected: {result.rejected.splitlines()[0]}"
    if result.error is not None:
        return f"FAILED: {result.error}"
    errors = f"loss {result.loss_error:.1e}, gradient {result.gradient_error:.1e} ({result.worst_parameter})"
    return errors if result.passes else f"FAILED: {errors}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=families(), choices=families())
    parser.add_argument("--mesh", nargs="+", default=list(MESHES), choices=list(MESHES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="families at a time")
    parser.add_argument("--report", type=Path, help="JSON file with all cases")
    parser.add_argument("--worker", metavar="FAMILY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        for result in run_family(args.worker, args.mesh):
            print(json.dumps(dataclasses.asdict(result)), flush=True)
        return 0
    results: list[Result] = []

    def run(family: str) -> None:
        for result in in_worker(family, args.mesh):
            results.append(result)
            print(f"{result.family:16} {result.mesh:22} {result.seconds:6.1f} s  {describe(result)}", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(run, args.family))
    if args.report is not None:
        args.report.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n")
    failed = sum(not result.passes for result in results)
    rejected = sum(result.rejected is not None for result in results)
    print(f"{len(results) - failed - rejected} equal, {rejected} rejected, {failed} failed of {len(results)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
