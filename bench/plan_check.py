"""Compare the estimates of task=plan with the compiler's numbers and with measurements.

python bench/plan_check.py                  estimates beside the stored numbers of the compiler
python bench/plan_check.py measured         estimated step times beside those measured on one H200
python bench/plan_check.py held_out         the same for measurements that the rates were not fitted to
python bench/plan_check.py scale            table of docs/plan.md: the best setups of large models on many devices
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

import numpy as np
from scipy.optimize import nnls

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.hardware import Platform
from maxhydra.config.schema.quantization import QuantizationKind
from maxhydra.plan.case import Case, Subject
from maxhydra.plan.memory import memory
from maxhydra.plan.search import Limits, search
from maxhydra.plan.tables import mesh_text, table
from maxhydra.plan.timing import MATMUL_RATE, compute_time, step_time
from maxhydra.plan.traffic import bytes_by_axes, transfers

DOCS = Path(__file__).parent.parent / "docs"
COMPILED = DOCS / "lab" / "plan_compiled.jsonl"
MIB = 2**20

FULL, MINIMAL, NONE = (f"model.remat.policy={policy}" for policy in ("full", "minimal", "none"))
BASE = "train.seq_len=4096 model.dtypes.logits=bfloat16"
LONG = "model=llama3.1-8b model.num_layers=1 mesh.sequence=8 train.seq_len=16384 train.per_device_batch_size=0.125"
DEFAULTS = "train.seq_len=4096 train.per_device_batch_size=1"
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
    "fsdp4_stage2": f"{CUT} train.per_device_batch_size=2 mesh.fsdp=4 mesh.stage=2 {FULL}",
    "small_vocabulary_full": f"{SMALL} train.per_device_batch_size=2 mesh.fsdp=8 {FULL}",
    "small_vocabulary_minimal": f"{SMALL} train.per_device_batch_size=2 mesh.fsdp=8 {MINIMAL}",
    "small_vocabulary_none": f"{SMALL} train.per_device_batch_size=2 mesh.fsdp=8 {NONE}",
    "small_vocabulary_batch4": f"{SMALL} train.per_device_batch_size=4 mesh.fsdp=8 {FULL}",
    "small_vocabulary_tensor2": f"{SMALL} train.per_device_batch_size=1 mesh.fsdp=4 mesh.tensor=2 {FULL}",
    "tied_head": f"model=llama3.2-1b {BASE} train.per_device_batch_size=2 mesh.fsdp=8 {NONE}",
    "windows": f"model=gemma3-4b model.num_layers=6 {BASE} train.per_device_batch_size=1 mesh.fsdp=8 {FULL}",
    "latent": f"model=deepseek2-16b model.num_layers=5 {BASE} train.per_device_batch_size=1 mesh.fsdp=8 {FULL}",
    "experts_fsdp8": f"{QWEN} model.num_layers=4 mesh.fsdp=8 {FULL}",
    "experts_expert8": f"{QWEN} model.num_layers=4 mesh.expert=8 {FULL}",
    "experts_expert8_minimal": f"{QWEN} model.num_layers=4 mesh.expert=8 {MINIMAL}",
    "fsdp8_float32_logits": f"{DEFAULTS} model=llama3.1-8b model.num_layers=2 mesh.fsdp=8 {MINIMAL}",
    "fsdp8_chunked_loss_float32": f"{DEFAULTS} model=llama3.1-8b model.num_layers=2 mesh.fsdp=8 train.loss_chunk=1024 "
    f"{MINIMAL}",
    "fsdp2_tensor4_minimal": f"{DEFAULTS} model=llama3.1-8b model.num_layers=2 mesh.fsdp=2 mesh.tensor=4 {MINIMAL}",
    "experts_expert64": f"{DEFAULTS} model=qwen3-30b-a3b model.num_layers=4 mesh.expert=64 {FULL}",
    "experts_all_to_all": f"{DEFAULTS} model=qwen3-30b-a3b model.num_layers=4 mesh.expert=8 "
    f"model.expert_parallel.dispatch=all_to_all {FULL}",
    "sequence8_ring": f"{LONG} mesh.context=ring {MINIMAL}",
    "sequence8_ulysses": f"{LONG} mesh.context=ulysses {MINIMAL}",
    "windows_float32_logits": f"{DEFAULTS} model=gemma3-4b model.num_layers=6 mesh.fsdp=8 {MINIMAL}",
    "zero1": f"{CUT} train.per_device_batch_size=1 mesh.data=8 mesh.shard_state_over_data=true {FULL}",
    "zero1_fsdp4": f"{CUT} train.per_device_batch_size=1 mesh.data=2 mesh.fsdp=4 mesh.shard_state_over_data=true "
    f"{MINIMAL}",
    "adam8": f"{CUT} train.per_device_batch_size=1 mesh.fsdp=8 optimizer.moments=dynamic8 {FULL}",
    "offload": f"{CUT} train.per_device_batch_size=1 mesh.fsdp=8 optimizer.offload=true {FULL}",
    "offload_weights": f"{CUT} train.per_device_batch_size=1 mesh.fsdp=8 optimizer.offload=true "
    f"optimizer.offload_weights=true {FULL}",
    "adafactor": f"{CUT} train.per_device_batch_size=1 mesh.fsdp=8 optimizer=adafactor {MINIMAL}",
    "replica2_fsdp4": f"{CUT} train.per_device_batch_size=1 mesh.replica=2 mesh.fsdp=4 train.diloco.period=1 {FULL}",
    "custom_remat": f"{CUT} train.per_device_batch_size=1 mesh.fsdp=8 model.remat.policy=custom "
    "model.remat.save=[query,key,value,context]",
    "latent_expert8": f"model=deepseek2-16b model.num_layers=5 {BASE} train.per_device_batch_size=1 mesh.expert=8 "
    f"{FULL}",
    "latent_sequence4": f"model=deepseek2-16b model.num_layers=5 {BASE} train.per_device_batch_size=0.25 "
    f"mesh.sequence=4 mesh.fsdp=2 {FULL}",
    "latent_sequence8": "model=deepseek2-16b model.num_layers=5 model.context_length=131072 train.seq_len=131072 "
    f"train.per_device_batch_size=0.125 mesh.sequence=8 {MINIMAL}",
    "latent_tensor4": f"{DEFAULTS} model=deepseek2-16b model.num_layers=5 mesh.fsdp=2 mesh.tensor=4 {MINIMAL}",
    "windows_sequence2": f"model=gemma3-4b model.num_layers=12 {BASE} train.per_device_batch_size=0.5 mesh.fsdp=4 "
    f"mesh.sequence=2 {FULL}",
    "experts_mixed": f"{QWEN} model.num_layers=4 mesh.data=2 mesh.fsdp=2 mesh.expert=2 {FULL}",
}

# Nodes of 8 devices; 1 for all others.
NODES = {"experts_expert64": 8}

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

# The date of the newest lines of docs/performance.jsonl that the rates are fitted to.
FITTED = "2026-11-16"

# Models with their sequence length, device counts, and slices where the devices exceed one.
SCALED = {"llama3.1-405b": 8192, "deepseek3-671b": 4096, "kimi-k2-1t": 4096, "qwen3-235b-a22b": 4096}
DEVICES = (64, 512, 4096, 16384)
CHIPS: dict[str, dict[int, int]] = {"gpu-h200": {}, "tpu-v5p": {16384: 4}}


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
        nodes = NODES.get(name, 1)
        devices = absent_devices(f"h200:{nodes}x8", slices=1, hardware=config.hardware)
        report, _ = compile_report(config, Sharder.from_config(config.mesh, build_mesh(config.mesh, devices)))
        sent: dict[str, float] = {}
        for row in report.collectives:
            sent[row["axes"]] = sent.get(row["axes"], 0.0) + row["wire_mib"]
        line = {
            "name": name,
            "overrides": CASES[name],
            "devices": 8 * nodes,
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
    """Overrides and tokens per second of the training measurements on one H200 that the rates are fitted to."""
    lines = [json.loads(line) for line in (DOCS / "performance.jsonl").read_text().splitlines()]
    own = [line for line in lines if line.get("bench") == "pretrain" and "peer" not in line]
    found = [
        (" ".join(part for part in line["overrides"] if not part.startswith("hardware.")), line["tokens_per_second"])
        for line in own
        if "H200" in line["device"] and line["date"] <= FITTED
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


def time_terms(case: Case) -> list[float]:
    """Seconds of the terms of the time model that have separate rates, on one device."""
    time, is_float8 = compute_time(case), QuantizationKind.fp8 in case.config.quantization.kinds
    flops, tokens = case.subject.forward_flops, case.tokens * case.grad_accum
    head = 3 * tokens * flops.head / (case.config.hardware.peak_tflops["bfloat16"] * 1e12 * MATMUL_RATE[Platform.gpu])
    layers = time.matmul + time.recomputed - head
    by_dtype = [layers, 0.0, time.elementwise, 0.0] if not is_float8 else [0.0, layers, 0.0, time.elementwise]
    by_dtype[0] += head
    return [*by_dtype, time.attention, time.optimizer]


def held_out() -> Iterator[tuple[str, ...]]:
    """Rows of the table: for each split, deviations of the estimates with rates fitted to the other measurements."""
    yield ("held out", "fitted to", "mean", "largest")
    cases = [(case_of(overrides, 1), tokens) for overrides, tokens in measured_cases()]
    seconds = np.array([case.step_tokens / tokens for case, tokens in cases])
    terms = np.array([time_terms(case) for case, _ in cases]) / seconds[:, None]
    names = [case.config.model.num_layers for case, _ in cases]
    splits = {
        "every second": [i % 2 == 1 for i in range(len(cases))],
        "the others": [i % 2 == 0 for i in range(len(cases))],
    }
    splits |= {f"{layers} layers": [name == layers for name in names] for layers in sorted(set(names))}
    for split, is_test in splits.items():
        test = np.array(is_test)
        # Terms that the fitted half does not have (float8, Adafactor) keep the shipped rate.
        scales = np.ones(terms.shape[1])
        known = terms[~test].any(0)
        rest = 1 - terms[~test][:, ~known].sum(1)
        scales[known] = nnls(terms[~test][:, known], rest)[0]
        error = terms[test] @ scales - 1
        yield (
            split,
            f"{(~test).sum()} of {len(test)}",
            f"{np.abs(error).mean():.1%}",
            f"{error[np.abs(error).argmax()]:+.1%}",
        )


def scale_rows() -> Iterator[tuple[str, ...]]:
    """Rows of the table in docs/plan.md: the best setup of each model on each number of devices."""
    yield ("model", "devices", "mesh", "remat", "batch, accumulated", "GiB", "step", "MFU")
    for model, seq_len in SCALED.items():
        for chip, slices in CHIPS.items():
            overrides = [
                f"model={model}",
                f"hardware={chip}",
                f"train.seq_len={seq_len}",
                "model.dtypes.logits=bfloat16",
            ]
            subject = Subject.of(compose(overrides).config)
            for devices in DEVICES:
                limits = Limits(
                    devices=devices,
                    slices=slices.get(devices, 1),
                    batch_tokens=2**24,
                    memory_share=0.92,
                    results=1,
                )
                plan = search(subject, limits)[0]
                case, time = plan.case, plan.time
                assert time is not None
                fits = "" if plan.fits else " (does not fit)"
                yield (
                    model,
                    f"{devices:,} {chip.partition('-')[2]}",
                    mesh_text(plan),
                    case.remat.policy.value,
                    f"{case.rows:g}, {case.grad_accum}",
                    f"{plan.memory.peak / 2**30:.0f}{fits}",
                    f"{time.seconds:.1f} s",
                    f"{time.mfu:.0%}",
                )


if __name__ == "__main__":
    command = sys.argv[1] if len(sys.argv) > 1 else "compiled"
    if command == "compile":
        compile_cases(sys.argv[2:])
    elif command == "scale":
        for row in scale_rows():
            print(f"| {' | '.join(row)} |", flush=True)
    else:
        rows = {"measured": compare_measured, "held_out": held_out}.get(command, compare_compiled)
        print("\n".join(table(list(rows()))))
