"""Write runs.tar.xz: run folders, sweeps, checkpoints, shards and exports as the code of one commit writes them.

The archive must be written by an unmodified checkout, so that it holds the names that this commit stores:

    git worktree add --detach /tmp/code 7cdb491
    PYTHONPATH=/tmp/code JAX_PLATFORMS=cpu python tests/stored/make.py

Every command runs in FOLDER. Its path is stored in run.json, sweep.json and job.json; `unpack` replaces it.
"""

import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ARCHIVE = Path(__file__).parent / "runs.tar.xz"
FOLDER = Path("/tmp/maxhydra-stored-runs")
# Text files that can hold the path of FOLDER.
TEXT = (".json", ".yaml", ".jsonl", ".txt", ".log", ".html")
# Files that no reader needs, or that every reader writes again.
EXCLUDED = (".lock", ".sweep.lock", ".runs.sqlite", "report.html", "sweep.html", "diff.patch")

MODEL = [
    *("model.num_layers=2", "model.emb_dim=32", "model.mlp_dim=32", "model.num_heads=2", "model.num_kv_heads=1"),
    *("model.head_dim=8", "model.vocab_size=260", "model.context_length=128", "model.dtypes.compute=float32"),
]
TRAIN = [
    *("train.seq_len=32", "train.per_device_batch_size=4", "train.log_every=1", "train.eval_every=3"),
    *("train.eval_batches=1", "train.sample.tokens=0", "optimizer/schedule=constant"),
    *("optimizer.schedule.warmup_steps=0", "mesh=ddp"),
]
KERNELS = ["model.kernels.attention=xla", "model.kernels.linear_cross_entropy=xla", "model.kernels.rotated_heads=xla"]
PRETRAIN = [*MODEL, *TRAIN, *KERNELS, "checkpoint.every=3", "checkpoint.keep=2"]
MIXTURE = [
    *("model=gemma4-26b", *MODEL, "model.pattern=[local]", "model.remat.policy=none"),
    *("model.kinds.local.attention.window=16", "model.kinds.local.beside=moe", "model.kinds.local.moe.experts=4"),
    *("model.kinds.local.moe.top_k=2", "model.kinds.local.moe.dim=8", "model.kinds.global.moe.experts=4"),
    *("model.kinds.global.moe.top_k=2", *TRAIN, "optimizer=sgd", "train.steps=3"),
]
FLOAT8 = [
    *(*MODEL, *TRAIN, "optimizer=sgd", "quantization=fp8_delayed", "quantization.history=4", "train.steps=3"),
    "+quantization.besides={down:{kind:int8,targets:[mlp/down]}}",
]
LORA = [
    *(*MODEL, *TRAIN, "adapter=lora", "adapter.rank=2", "checkpoint.load_parameters=outputs/pretrain"),
    "train.steps=3",
]
SWEEP = [*MODEL, *TRAIN, "checkpoint=none", "train.steps=3"]
TEXTS = ["data=grain", "data.path=texts.jsonl", "data.eval_fraction=0.1"]
CHAT = ["task=sft", "data=grain", "data.path=chats.jsonl", "data.shape=chat", "data.tokenizer.chat_template=lines"]
PAIRS = ["task=dpo", "data=grain", "data.path=pairs.jsonl", "data.shape=preference"]
GRPO = [
    *("task=grpo", "data=arithmetic", "data.shape=prompts", "reward=exact", "task.max_tokens=4", "task.group_size=2"),
    *("task.engine.max_batch=4", "task.engine.cache_tokens=256", "task.engine.steady=true"),
]
BASE = "checkpoint.load_parameters=outputs/pretrain"
SHORT = [*MODEL, *TRAIN, "train.steps=2", "checkpoint=none", BASE]
SCORE = [*MODEL, "train.seq_len=32", "task=score", "task.input=scored.jsonl"]
DECODE = [
    *("task=decode", "task.prompt=To be", "task.sampling.max_tokens=4", "task.sampling.ignore_eos=true"),
    *("task.engine.max_batch=2", "task.engine.cache_tokens=128", "task.engine.steady=true"),
]

COMMANDS: list[list[str]] = [
    # All losses of the run that the archive holds in part.
    [*PRETRAIN, "train.steps=8", "run.name=whole", "run.tags=[complete]"],
    [*PRETRAIN, "train.steps=6", "run.name=pretrain", "run.notes=the first six steps"],
    [*MIXTURE, "run.name=mixture"],
    [*FLOAT8, "train.steps=5", "run.name=float8_whole", "checkpoint=none"],
    [*FLOAT8, "run.name=float8"],
    [*LORA, "run.name=lora"],
    ["-m", *SWEEP, "run.name=rates", "optimizer.learning_rate=0.01,0.001"],
    [
        *("-m", *SWEEP, "run.name=search", "hydra/sweeper=optuna", "hydra.sweeper.trials=2"),
        *("hydra.sweeper.sampler=random", "optimizer.learning_rate=tag(log,interval(1e-4,1e-1))"),
        "optimizer.clip_norm=choice(0.5,1.0)",
    ],
    ["task=convert", *MODEL, BASE, "task.output=exported/hf"],
    ["task=convert", *MODEL, BASE, "task.format=maxhydra", "quantization=int8_weights", "task.output=exported/int8"],
    [
        *("task=convert", *MODEL, BASE, "task.format=maxhydra", "quantization=int4_weights", "quantization.group=16"),
        "task.output=exported/int4",
    ],
    [
        "task=convert",
        *MODEL,
        "checkpoint.load_parameters=outputs/lora",
        "task.format=peft",
        "task.output=exported/peft",
    ],
    ["task=tokenize", *TEXTS, "data.shape=text", "task.output=shards/tokens", "task.shards=2", "task.workers=1"],
    [
        *("task=teacher_logits", *MODEL, "train.seq_len=32", *TEXTS, BASE, "task.output=shards/logits"),
        *("task.shards=1", "task.k=4"),
    ],
    ["task=tokenizer", *TEXTS, "task.output=exported/tokenizer", "task.vocab_size=300", "run.name=tokenizer"],
    [*SHORT, *CHAT, "run.name=chat"],
    [*SHORT, *PAIRS, "run.name=preference"],
    [*SHORT, *GRPO, "run.name=rewards"],
    *(
        [*SCORE, f"task.output=scores/{name}.jsonl", f"checkpoint.load_parameters={weights}", *more]
        for name, weights, more in (
            ("pretrain", "outputs/pretrain", []),
            ("mixture", "outputs/mixture", [override for override in MIXTURE if override.startswith("model")]),
            ("lora", "outputs/lora", []),
            ("hf", "exported/hf", []),
        )
    ),
]
# earlier_runs.tar.xz holds outputs/back_200 and outputs/back_300: this command with the code of 7cdb491~200 (4788010)
# and 7cdb491~300 (f58502c), both of 2026-11-15. Checkpoint 8 is removed, and the metrics of all steps are kept.
EARLIER_ARCHIVE = Path(__file__).parent / "earlier_runs.tar.xz"
EARLIER = [
    *("model.num_layers=1", "model.emb_dim=8", "model.mlp_dim=8", "model.num_heads=1", "model.num_kv_heads=1"),
    *("model.head_dim=8", "model.vocab_size=260", "model.context_length=64", "model.dtypes.compute=float32"),
    *("train.seq_len=16", "train.per_device_batch_size=2", "train.log_every=1", "train.eval_every=3"),
    *("train.eval_batches=1", "train.sample.tokens=0", "optimizer/schedule=constant"),
    *("optimizer.schedule.warmup_steps=0", "mesh=ddp", "checkpoint.every=3", "checkpoint.keep=2", "train.steps=8"),
]
# Configs of tasks that have no run folder, as `maxhydra job` reads them.
JOBS: dict[str, list[str]] = {
    "decode": [*DECODE, *MODEL, BASE],
    "decode_int4": [
        *(*DECODE, *MODEL, "quantization=int4_weights", "quantization.group=16"),
        "checkpoint.load_parameters=exported/int4",
    ],
    "train_tokenizer": ["task=tokenizer", *TEXTS, "task.output=tokenizer", "task.vocab_size=300"],
    "score": [*SCORE, BASE, "task.output=scores.jsonl"],
}
# Runs of which only the text files are kept.
WITHOUT_CHECKPOINTS = ("whole", "chat", "preference", "rewards")


def extract(path: Path, folder: Path) -> None:
    """Extract an archive of the project."""
    with tarfile.open(path) as archive:
        # Python 3.11.4 and later warn without a filter, earlier versions have none.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def unpack(folder: Path) -> Path:
    """Extract the archive as if its commands had run in `folder`."""
    extract(ARCHIVE, folder)
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix in TEXT and "checkpoints" not in path.parts:
            content = path.read_bytes()
            if str(FOLDER).encode() in content:
                path.write_bytes(content.replace(str(FOLDER).encode(), str(folder).encode()))
    return folder


def write_inputs(folder: Path) -> None:
    """Small files that the commands read."""
    texts = [f"{word} or not {word}, that is question {number}." for number, word in enumerate(["to be"] * 24)]
    pairs = [{"prompt": f"Say {n}: ", "chosen": f"{n}", "rejected": f"{n}{n}"} for n in range(24)]
    turns = [[{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": f"{n}"}] for n in range(24)]
    files = {
        "texts.jsonl": [{"text": text} for text in texts],
        "pairs.jsonl": pairs,
        "chats.jsonl": [{"messages": messages} for messages in turns],
        "scored.jsonl": [{"text": text} for text in texts[:2]],
    }
    for name, records in files.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))


def execute(arguments: list[str]) -> str:
    """Run one command in FOLDER and return its standard output."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "maxhydra", *arguments], cwd=FOLDER, env=environment, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}: {arguments}\n{done.stdout}")
    return done.stdout


def strip() -> None:
    """Remove files that are not stored."""
    for name in WITHOUT_CHECKPOINTS:
        shutil.rmtree(FOLDER / "outputs" / name / "checkpoints", ignore_errors=True)
    for path in [path for path in FOLDER.rglob("*") if path.name in EXCLUDED]:
        path.unlink()


def pack() -> None:
    """Write the archive, with nothing of the machine in its headers."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with lzma.open(ARCHIVE, "wb", preset=9 | lzma.PRESET_EXTREME) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for path in sorted(FOLDER.iterdir()):
            tar.add(path, arcname=path.name, filter=anonymous)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name in ("jobs", "scores", "exported", "shards"):
        (FOLDER / name).mkdir(parents=True)
    write_inputs(FOLDER)
    for arguments in COMMANDS:
        print(*arguments, flush=True)
        execute(arguments)
    for name, arguments in JOBS.items():
        (FOLDER / "jobs" / f"{name}.yaml").write_text(execute([*arguments, "--cfg", "job", "--resolve"]))
    strip()
    pack()
    print(f"{ARCHIVE}: {ARCHIVE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
