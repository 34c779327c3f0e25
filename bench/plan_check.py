"""Compare the estimates of task=plan with the compiler's numbers and with measurements.

python bench/plan_check.py                  estimates beside the stored numbers of the compiler
python bench/plan_check.py measured         estimated step times beside those measured on one H200
python bench/plan_check.py compile [NAME]   compile the cases that are not stored yet, and store their numbers

Compiling needs the CUDA plugin of jax and no GPU (bench/aot.py). The numbers are in docs/lab/plan_compiled.jsonl; a
line that is deleted there is compiled again.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

from maxhydra.config.compose.composer import compose
from maxhydra.plan.case import Case, Subject
from maxhydra.plan.memory import memory
from maxhydra.plan.tables import table
from maxhydra.plan.timing import step_time
from maxhydra.plan.traffic import bytes_by_axes, transfers

DOCS = Path(__file__).parent.parent / "docs"
COMPILED = DOCS / "lab" / "plan_compiled.jsonl"
MIB = 2**20

FULL, MINIMAL, NONE = (f"model.remat.policy={policy}" for policy in ("full", "minimal", "none"))
BASE = "train.seq_len=4096 model.dtypes.logits=bfloat16"
LLAMA = f"model=llama3.1-8b {BASE}"
QWEN = f"model=qwen3-30b-a3b {BASE} train.per_device_batch_size=1"
SMALL = f"{LLAMA} model.num_layers=8 model.vocab_size=8192"
CUT = f"{LLAMA} model.num_layers=4"
# Name -> overrides, for 8 x H200: models cut in layers, over meshes, remat policies and batches.
CASES = {
    "float32_logits": f"{CUT} model.dtypes.logits=float32 train.per_device_batch_size=2 mesh.fsdp=8 {FULL}",
    "fsdp8_full": f"{CUT} train.per_device_batch_size=2 mesh.fsdp=8 {FULL}",
    "fsdp8_minimal": f"{CUT} train.per_device_batch_size=2 mesh.fsdp=8 {MINIMAL}",
    "fsdp8_none": f"{CUT} train.per_device_batch_size=2 mesh.fsdp=8 {NONE}",
    "fsdp8_chunked_loss": f"{CUT} train.per_device_batch_size=2 mesh.fsdp=8 {FULL} train.loss_chunk=1024",
    "fsdp8_accumulated": f"{CUT} train.per_device_batch_size=1 train.grad_accum=4 mesh.fsdp=8 {FULL}",
    "data8": f"{CUT} train.per_device_batch_size=2 mesh.data=8 {FULL}",
    "data2_fsdp4": f"{CUT} train.per_device_batch_size=2 mesh.data=2 mesh.fsdp=4 {FULL}",
    "fsdp2_tensor4": f"{CUT} train.per_device_batch_size=0.5 mesh.fsdp=2 mesh.tensor=4 {FULL}",
    "fsdp4_tensor2_minimal": f"{CUT} train.per_device_batch_size=1 mesh.fsdp=4 mesh.tensor=2 {MINIMAL}",
    "fsdp4_sequence2": f"{CUT} train.per_device_batch_size=1 mesh.fsdp=4 mesh.sequence=2 {FULL}",
    "small_vocabulary_full": f"{SMALL} train.per_device_batch_size=2 mesh.fsdp=8 {FULL}",
    "small_vocabulary_minimal": f"{SMALL} train.per_device_batch_size=2 mesh.fsdp=8 {MINIMAL}",
    "small_vocabulary_none": f"{SMALL} train.per_device_batch_size=2 mesh.fsdp=8 {NONE}",
    "small_vocabulary_batch4": f"{SMALL} train.per_device_batch_size=4 mesh.fsdp=8 {FULL}",
    "small_vocabulary_tensor2": f"{SMALL} train.per_device_batch_size=1 mesh.fsdp=4 mesh.tensor=2 {FULL}",
    "tied_head": f"model=llama3.2-1b {BASE} train.per_device_batch_size=2 mesh.fsdp=8 {NONE}",
    "windows": f"model=gemma3-4b model.num_layers=6 {BASE} train.per_device_batch_size=1 mesh.fsdp=8 {FULL}",
    "latent": f"model=deepseek2-16b model.num_layers=3 {BASE} train.per_device_batch_size=1 mesh.fsdp=8 {FULL}",
    "experts_fsdp8": f"{QWEN} model.num_layers=2 mesh.fsdp=8 {FULL}",
    "experts_expert8": f"{QWEN} model.num_layers=2 mesh.expert=8 {FULL}",
    "experts_expert8_minimal": f"{QWEN} model.num_layers=4 mesh.expert=8 {MINIMAL}",
    "experts_mixed": f"{QWEN} model.num_layers=4 mesh.data=2 mesh.fsdp=2 mesh.expert=2 {FULL}",
}

SMALLER = f"model=llama3.2-1b model.scan_unroll=16 {BASE} {NONE}"
LARGER = f"model=llama3.2-3b model.scan_unroll=28 {BASE}"
LARGEST = f"model=llama3.1-8b {BASE} model.dtypes.weights=bfloat16 optimizer=adafactor train.loss_chunk=1024 {MINIMAL}"
# Tokens per second in docs/lab/2026-11-one-h200.md, one H200; the first of several cards.
MEASURED = [
    (f"{SMALLER} train.per_device_batch_size=8", 68_700),
    (f"{SMALLER} train.per_device_batch_size=16", 69_804),
    (f"{SMALLER} train.per_device_batch_size=8 quantization=fp8", 83_276),
    (f"{SMALLER} train.per_device_batch_size=16 quantization=fp8", 85_211),
    (f"{LARGER} {NONE} train.per_device_batch_size=4", 27_539),
    (f"{LARGER} {NONE} train.per_device_batch_size=6", 27_661),
    (f"{LARGER} {NONE} train.per_device_batch_size=8 train.loss_chunk=2048", 27_919),
    (f"{LARGER} {MINIMAL} train.per_device_batch_size=4 train.loss_chunk=1024", 26_716),
    (
        f"{LARGER} model.remat.policy=custom model.remat.save=[query,key,value,context,mlp_gate,mlp_up] "
        "train.per_device_batch_size=4 train.loss_chunk=1024",
        25_740,
    ),
    (f"{LARGER} {NONE} train.per_device_batch_size=4 quantization=fp8", 34_590),
    (f"{LARGER} {NONE} train.per_device_batch_size=8 train.loss_chunk=2048 quantization=fp8", 36_213),
    (f"{LARGEST} train.per_device_batch_size=1", 10_115),
    (f"{LARGEST} train.per_device_batch_size=4", 11_738),
]


def case_of(overrides: str, devices: int) -> Case:
    config = compose(["hardware=gpu-h200", *overrides.split()]).config
    return Case.of(Subject.of(config), devices=devices, slices=1)


def compile_cases(names: list[str]) -> None:
    """Compile the cases that are not stored yet."""
    from maxhydra.measure.compiled import compile_report
    from maxhydra.runtime.topology import absent_devices
    from maxhydra.sharding import Sharder, build_mesh

    stored = {line["name"] for line in stored_lines()}
    for name in names or [name for name in CASES if name not in stored]:
        config = compose(["hardware=gpu-h200", *CASES[name].split()]).config
        devices = absent_devices("h200:8", slices=1, hardware=config.hardware)
        report, _ = compile_report(config, Sharder.from_config(config.mesh, build_mesh(config.mesh, devices)))
        sent: dict[str, float] = {}
        for row in report.collectives:
            sent[row["axes"]] = sent.get(row["axes"], 0.0) + row["wire_mib"]
        line = {
            "name": name,
            "overrides": CASES[name],
            "devices": 8,
            "bytes": report.bytes_per_device,
            "sent_mib": sent,
            "seconds": round(report.seconds, 1),
        }
        with COMPILED.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def stored_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in COMPILED.read_text().splitlines()] if COMPILED.exists() else []


def deviations(line: dict[str, Any]) -> tuple[float, float]:
    """Relative deviation of peak memory and of bytes sent from the compiler's numbers."""
    case = case_of(line["overrides"], line["devices"])
    used = line["bytes"]["state and batch"] + line["bytes"]["temporaries"]
    sent = sum(line["sent_mib"].values()) * MIB
    return memory(case).peak / used - 1, sum(bytes_by_axes(transfers(case)).values()) / sent - 1


def compare_compiled() -> Iterator[tuple[str, ...]]:
    """Rows of the table: case, peak memory and bytes sent by the compiler, and both deviations."""
    yield ("case", "peak GiB", "estimate", "sent MiB", "estimate")
    for line in stored_lines():
        peak, sent = deviations(line)
        used = (line["bytes"]["state and batch"] + line["bytes"]["temporaries"]) / 2**30
        yield line["name"], f"{used:.2f}", f"{peak:+.1%}", f"{sum(line['sent_mib'].values()):,.0f}", f"{sent:+.1%}"


def measured_cases() -> list[tuple[str, float]]:
    """Overrides and tokens per second of every training measurement on one H200."""
    lines = [json.loads(line) for line in (DOCS / "performance.jsonl").read_text().splitlines()]
    own = [line for line in lines if line.get("bench") == "pretrain" and "peer" not in line]
    found = [
        (" ".join(part for part in line["overrides"] if not part.startswith("hardware.")), line["tokens_per_second"])
        for line in own
        if "H200" in line["device"]
    ]
    return [*found, *MEASURED]


def compare_measured() -> Iterator[tuple[str, ...]]:
    """Rows of the table: setup, measured and estimated milliseconds."""
    yield ("setup", "measured ms", "estimated ms", "deviation")
    for overrides, tokens in measured_cases():
        case = case_of(overrides, 1)
        time = step_time(case)
        assert time is not None
        measured = case.step_tokens / tokens
        name = overrides.replace(f"{BASE} ", "")
        yield name, f"{measured * 1e3:.0f}", f"{time.seconds * 1e3:.0f}", f"{time.seconds / measured - 1:+.1%}"


if __name__ == "__main__":
    command = sys.argv[1] if len(sys.argv) > 1 else "compiled"
    if command == "compile":
        compile_cases(sys.argv[2:])
    else:
        print("\n".join(table(list(compare_measured() if command == "measured" else compare_compiled()))))
