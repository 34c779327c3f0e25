"""Compares maxhydra with the installed peers on this machine, each in a separate process.

    python bench/compare.py model=llama3.2-1b train.seq_len=4096 train.per_device_batch_size=8
    python bench/compare.py decode model=llama3.2-1b batch=1,64 new=256
    python bench/compare.py model=qwen3-30b-a3b model.num_layers=8 train.seq_len=4096 train.per_device_batch_size=2
    python bench/compare.py model=tiny                                          # on a CPU
    python bench/compare.py of one_gpu.jsonl                                    # existing measurements

Prints the line of each, then one with the ratio of tokens per second. For existing measurements it prints only the
ratios, each peer against our fastest unquantized result for its model and number of layers, without an adapter. Peers
are the scripts in bench/peers: they train or decode transformers' model of the same family and sizes, and print the
same fields.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arguments import split_arguments
from decode import TASK_KEYS
from records import OTHER_WORK, kind, layers, read_lines
from records import peer as peer_name

from maxhydra import runtime
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.hardware import Platform

HERE = Path(__file__).parent
PEER_PACKAGES = ("torch", "transformers")
# Fields of a decode line that must match between ours and a peer's.
MATCHED = ("batch", "prompt", "new")


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["of"]:
        for line in ratios(read_lines(map(Path, arguments[1:]))):
            print(json.dumps(line), flush=True)
        return 0
    what = "decode" if arguments[:1] == ["decode"] else "pretrain"
    given = arguments[1:] if arguments[:1] in (["decode"], ["pretrain"]) else arguments
    missing = [name for name in PEER_PACKAGES if importlib.util.find_spec(name) is None]
    maxhydra_result = run([str(HERE / f"{what}.py"), *given])
    peers = [] if missing else run(peer_command(what, given))
    if missing:
        print(f"no peer measured: {', '.join(missing)} not installed", file=sys.stderr)
    for line in maxhydra_result:
        for peer in peers:
            if is_same_work(line, peer):
                print(json.dumps(ratio(what, line, peer)), flush=True)
    return 0 if maxhydra_result and (peers or missing) else 1


def run(command: list[str]) -> list[dict[str, Any]]:
    """Run a script and print its JSON lines; if it fails, print the end of its stderr."""
    process = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if process.returncode:
        tail = process.stderr.strip().splitlines()[-8:]
        print(f"{Path(command[0]).name} exited with {process.returncode}:", *tail, sep="\n  ", file=sys.stderr)
    for line in lines:
        print(line, flush=True)
    return [json.loads(line) for line in lines]


def peer_command(what: str, given: list[str]) -> list[str]:
    """Command of the peer's script with the same sizes."""
    own, overrides = split_arguments(given, TASK_KEYS)
    composed = compose(["task=bench", *overrides])
    config = composed.config
    device = "cuda" if runtime.predict_hardware(config.hardware).platform is Platform.gpu else "cpu"
    sizes = ["--model", composed.choices["model"], "--device", device]
    model_overrides = [text for text in overrides if text.startswith("model.")]
    if what == "pretrain":
        train = config.train
        steps = ["--steps", str(config.task.steps)]
        batch = str(int(train.per_device_batch_size * train.grad_accum))
        return [
            str(HERE / "peers/train_hf.py"),
            *sizes,
            "--batch",
            batch,
            "--seq-len",
            str(train.seq_len),
            *steps,
            *model_overrides,
        ]
    batches = ["--batches", *own.get("batch", "1,8,32").split(",")]
    rest = [part for name in ("prompt", "new", "repeats") if name in own for part in (f"--{name}", own[name])]
    return [str(HERE / "peers/decode_hf.py"), *sizes, *batches, *rest, *model_overrides]


def is_same_work(maxhydra_result: dict[str, Any], peer: dict[str, Any]) -> bool:
    """Training batches may differ: each side uses the size that suits it best."""
    names = ("model",) if maxhydra_result["bench"] == "pretrain" else ("model", *MATCHED)
    if layers(maxhydra_result) != layers(peer):
        return False
    return maxhydra_result["bench"] == kind(peer) and all(maxhydra_result[name] == peer[name] for name in names)


def ratios(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    maxhydra_result = [line for line in lines if line.get("bench") in ("pretrain", "decode") and "peer" not in line]
    unquantized = [
        line for line in maxhydra_result if not any(text.startswith(OTHER_WORK) for text in line["overrides"])
    ]
    for peer in lines:
        if peer_name(peer):
            same = [line for line in unquantized if is_same_work(line, peer)]
            if same:
                yield ratio(kind(peer), max(same, key=lambda line: line["tokens_per_second"]), peer)


def ratio(what: str, maxhydra_result: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    speeds = {name: line["tokens_per_second"] for name, line in (("ours", maxhydra_result), ("peer", peer))}
    about = {name: maxhydra_result[name] for name in (*MATCHED, "model", "device", "date") if name in maxhydra_result}
    about |= {"layers": int(count)} if (count := layers(maxhydra_result)) else {}
    against = {"against": peer_name(peer), "ratio": round(speeds["ours"] / speeds["peer"], 3)}
    return {"bench": "compare", "what": what, **about, **speeds, **against}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
