"""Compile the training step for GPUs or TPUs that are not attached, and print the contents of the program as JSON.

python bench/aot.py model=llama3.1-8b model.num_layers=2 mesh.fsdp=8
python bench/aot.py topology=b200:4x8 hlo=/tmp/step.txt model=qwen3-30b-a3b model.num_layers=2 mesh.expert=32
python bench/aot.py cases [jobs=N] [NAME...]   compile those named, or those that docs/lab/aot.jsonl lacks
python bench/aot.py table                      the tables of docs/lab/aot.md from the stored cases

topology: h200:8 unless given; the hardware option follows from it. hlo: file for the optimized program. The CUDA plugin
of jax's version must be installed (`pip install 'jax-cuda13-plugin[with-cuda]'`); no GPU is needed. For each mesh
axis the report has the MiB that a device sends in a step and the theoretical minimum (maxhydra/measure/minimum.py).
"""

import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from arguments import split_arguments

# The compiler of the absent devices runs on this host's CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.measure.compiled import compile_report
from maxhydra.runtime.topology import absent_devices
from maxhydra.sharding import Sharder, build_mesh

DEFAULTS = ["train.seq_len=4096", "train.per_device_batch_size=1"]
STORED = Path(__file__).parent.parent / "docs" / "lab" / "aot.jsonl"

LONG = "model.context_length=131072 train.seq_len=131072 train.per_device_batch_size=0.125"
# Models cut to one repetition of a long pattern, or four layers, after those of their prefix.
MODELS = {
    "llama3.1-8b": "model.num_layers=4 model.remat.policy=minimal",
    "gemma3-4b": "model.num_layers=6 model.remat.policy=minimal",
    "gpt-oss-20b": "model.num_layers=4 model.remat.policy=full",
    "qwen3-30b-a3b": "model.num_layers=4 model.remat.policy=full",
    "deepseek2-16b": "model.num_layers=5 model.remat.policy=minimal",
    "qwen3-next-80b-a3b": "model.num_layers=4 model.remat.policy=full",
}
MESHES = {
    "fsdp": "mesh.fsdp=8",
    "tensor": "mesh.fsdp=2 mesh.tensor=4",
    "expert": "mesh.expert=8",
    "sequence": f"mesh.sequence=8 {LONG}",
}
DENSE = ("llama3.1-8b", "gemma3-4b")
# Two key heads cannot be split over tensor=4.
REPLICATED_KEYS = {"qwen3-next-80b-a3b_tensor": " mesh.rules.kv_heads=[]"}
CASES = {
    f"{model}_{name}": f"model={model} {layers} {mesh}" + REPLICATED_KEYS.get(f"{model}_{name}", "")
    for model, layers in MODELS.items()
    for name, mesh in MESHES.items()
    if not (name == "expert" and model in DENSE)
}


def main() -> None:
    own, overrides = split_arguments(sys.argv[1:], ("topology", "hlo", "slices"))
    topology = own.get("topology", "h200:8")
    chip = topology.partition(":")[0]
    hardware = "cpu" if chip == "cpu" else f"{'tpu' if chip.startswith('v') else 'gpu'}-{chip}"
    try:
        config = compose([f"hardware={hardware}", *DEFAULTS, *overrides]).config
        devices = absent_devices(topology, slices=int(own.get("slices", 1)), hardware=config.hardware)
        report, compiled = compile_report(config, Sharder.from_config(config.mesh, build_mesh(config.mesh, devices)))
    except ConfigError as error:
        sys.exit(str(error))
    if "hlo" in own:
        Path(own["hlo"]).write_text(compiled.as_text() or "")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    facts = {"topology": topology, "overrides": overrides, "compiler_gib": round(peak, 2)}
    print(json.dumps({**facts, **dataclasses.asdict(report)}, indent=1))


def compile_cases(names: list[str], *, jobs: int) -> None:
    """Compile cases, each in its own process, and store their reports in place of older ones."""
    names = names or [name for name in CASES if name not in stored_cases()]

    def compile_case(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, __file__, *CASES[name].split()], stdout=subprocess.PIPE, text=True)

    with ThreadPoolExecutor(jobs) as pool:
        for name, result in zip(names, pool.map(compile_case, names), strict=True):
            if result.returncode:
                print(f"{name}: exit code {result.returncode}", flush=True)
                continue
            stored = stored_cases() | {name: _stored_part(json.loads(result.stdout))}
            STORED.write_text("".join(json.dumps({"name": name} | case) + "\n" for name, case in stored.items()))
            print(f"{name}: {json.dumps(stored[name]['wire'])}", flush=True)


def _stored_part(report: dict[str, Any]) -> dict[str, Any]:
    """The part of a report that the tables show."""
    dropped = ("largest_collectives", "device", "topology")
    return {key: value for key, value in report.items() if key not in dropped} | {
        "largest_arrays": report["largest_arrays"][:3]
    }


def stored_cases() -> dict[str, dict[str, Any]]:
    """Stored reports by name."""
    lines = STORED.read_text().splitlines() if STORED.exists() else []
    return {case.pop("name"): case for case in map(json.loads, lines)}


HEADER = (
    "model, layers",
    "mesh",
    "backends",
    "sent / minimum, MiB",
    "ratio",
    "ratio, nothing recomputed",
    "state + temporaries, GiB",
    "largest array",
)


def rows() -> Iterator[tuple[str, ...]]:
    """Rows of the table: backends, bytes by axis with their minimum, memory and largest array of each case."""
    for case in stored_cases().values():
        overrides = dict(part.split("=", 1) for part in case["overrides"])
        wire, used = case["wire"], case["bytes_per_device"]
        sent = [f"{axes} {row['mib']:,.0f} / {row['minimum_mib']:,.0f}" for axes, row in wire.items() if row["mib"] > 1]
        largest = case["largest_arrays"][0]
        yield (
            f"{overrides['model']}, {overrides.get('model.num_layers', 'all')}",
            " x ".join(f"{axis}={size}" for axis, size in case["mesh"].items()),
            ", ".join(line.partition(" (")[0].replace(":", "") for line in case["operations"]),
            "; ".join(text for text in sent if not text.startswith("total")),
            f"{wire['total']['ratio']:.3f}",
            f"{wire['total']['ratio_if_saved']:.3f}",
            f"{used['state and batch'] / 2**30:.1f} + {used['temporaries'] / 2**30:.1f}",
            f"{largest['shape']}, {largest['mib']:,.0f} MiB",
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["cases"]:
        own, names = split_arguments(sys.argv[2:], ("jobs",))
        compile_cases(names, jobs=int(own.get("jobs", 1)))
    elif sys.argv[1:] == ["table"]:
        for row in (HEADER, ["---"] * len(HEADER), *rows()):
            print(f"| {' | '.join(row)} |")
    else:
        main()
