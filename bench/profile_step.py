"""Profiles a training step on a GPU: kernel time by part of the model. Prints a table, then one JSON line.

python bench/profile_step.py model=llama3.2-1b train.seq_len=4096 model.scan_unroll=16 [--keep FOLDER]

Kernels are attributed to the HLO instruction that launched them, and so to its named scope (embedding, norm, attention,
mlp, router, moe, loss, update) and pass; a fusion is attributed to its last operation. Command buffers hide that link,
so they are disabled: `idle` is larger than in training, the kernels are the same. `--keep` saves the HLO and all
kernels.
"""

import collections
import json
import os
import re
import sys
import tempfile
from pathlib import Path

STEPS, WARM_UP, TOP = 4, 3, 25
SCOPES = ("embedding", "norm", "attention", "mlp", "router", "moe", "loss", "update")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\S+|\(.*?\)) ([\w-]+)\(")


def main(arguments: list[str]) -> None:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="
    keep = Path(arguments[arguments.index("--keep") + 1]) if "--keep" in arguments else None
    overrides = [a for a in arguments if a != "--keep" and a != str(keep)]
    import jax
    from pretrain import prepare

    bench = prepare(overrides)
    state = bench.training.states.create(0)
    for _ in range(WARM_UP):
        state, _ = bench.step(state, next(bench.loader))
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                state, _ = bench.step(state, next(bench.loader))
            jax.block_until_ready(state)
        (path,) = Path(folder).rglob("*.xplane.pb")
        kernels = read_kernels(jax.profiler.ProfileData.from_file(str(path)))
    bench.loader.close()
    hlo = bench.step.as_text()
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / "step.hlo").write_text(hlo)
        (keep / "kernels.json").write_text(json.dumps(kernels))
    rows, busy = group(kernels, instructions(hlo))
    span = (max(end for _, _, _, end in kernels) - min(start for _, _, start, _ in kernels)) / 1e6 / STEPS
    groups: collections.Counter = collections.Counter()
    for (part, direction, kind, *_), (_, ms) in rows.items():
        groups[part, direction, kind] += ms
    for (part, direction, kind), ms in groups.most_common():
        print(f"{ms:9.2f} ms {100 * ms / span:5.1f} %  {part:10} {direction:8} {kind}")
    print(
        f"{span - busy:9.2f} ms {100 * (1 - busy / span):5.1f} %  idle\n{span:9.2f} ms in total; the largest kernels:"
    )
    for (*name, shape, kernel), (count, ms) in sorted(rows.items(), key=lambda row: -row[1][1])[:TOP]:
        print(f"{ms:9.2f} ms {count / STEPS:5.0f} x  {' '.join(name):34} {shape:44} {kernel[:60]}")
    line = {
        "bench": "profile_step",
        "overrides": overrides,
        "step_ms": round(span, 2),
        "idle_ms": round(span - busy, 2),
    }
    print(json.dumps({**line, "ms": {" ".join(name): round(ms, 2) for name, ms in groups.most_common()}}), flush=True)


def read_kernels(profile) -> list[tuple[str, str, int, int]]:
    """(HLO instruction, kernel, start, end) of everything that ran on the GPU's streams, in nanoseconds."""
    kernels = []
    for plane in profile.planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            if line.name.startswith("Stream"):
                for event in line.events:
                    instruction = next((value for name, value in event.stats if name == "hlo_op"), "")
                    start = int(event.start_ns)
                    kernels.append((instruction, event.name, start, start + int(event.duration_ns)))
    return sorted(kernels, key=lambda kernel: kernel[2])


def instructions(hlo: str) -> dict[str, tuple[str, str, str]]:
    """Instruction -> its shape, its opcode or the library it calls, and the JAX operation it came from."""
    by_name = {}
    for line in hlo.splitlines():
        if match := INSTRUCTION.match(line):
            name, shape, opcode = match.groups()
            target = re.search(r'custom_call_target="([^"]*)"|"kind":"(__\w+)"', line)
            operation = re.search(r'op_name="([^"]*)"', line)
            by_name[name] = (
                shape,
                target.group(1) or target.group(2) if target else opcode,
                operation[1] if operation else "",
            )
    return by_name


def group(kernels: list, known: dict[str, tuple[str, str, str]]) -> tuple[dict, float]:
    """(part, pass, kind, shape, kernel) -> [launches, ms per step]; and the ms per step in which anything ran."""
    rows: dict = {}
    busy, last = 0, 0
    for instruction, kernel, start, end in kernels:
        busy, last = busy + max(0, end - max(start, last)), max(end, last)
        shape, what, operation = known.get(instruction, ("", "", ""))
        part = next((scope for scope in reversed(re.findall(r"\w+", operation)) if scope in SCOPES), "other")
        direction = "backward" if "transpose(" in operation else "forward" if "jvp(" in operation else "update"
        if "fmha" in what or re.search("cudnn|attention_(forward|backward)", kernel.lower()):
            kind = "flash attention"
        elif "gemm" in what or "matmul" in what or re.search("gemm|matmul|nvjet|xmma", kernel):
            kind = "matmul"
        else:
            kind = "copy" if re.search("copy|transpose|Memcpy|Memset|concatenate", kernel) else "elementwise"
        row = rows.setdefault((part, direction, kind, shape[:44], f"{instruction.split('.')[0]} {kernel}"), [0, 0.0])
        row[0] += 1
        row[1] += (end - start) / 1e6 / STEPS
    return rows, busy / 1e6 / STEPS


if __name__ == "__main__":
    main(sys.argv[1:])
