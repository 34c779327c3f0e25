"""Run every recipe of docs/recipes for a few steps on one large GPU, and print the figures that the pages state.

    python scripts/recipes_gpu.py [--recipes pretrain,lora] [--steps 30] [--out recipes_gpu] [OVERRIDE...]
    python scripts/recipes_gpu.py --weights-1b /data/Llama-3.2-1B --weights-8b /data/Llama-3.1-8B

Each recipe is a separate process with the model, batch, sequences, optimizer and adapter of its experiment, so that
speed and memory are those of the real run. Weights are random and texts are bytes of the included plays; folders of
weights, if given, are loaded with their tokenizers. Without the 8B, the teacher is the 1B model of `pretrain`.
Overrides apply to all recipes.

The form on a CPU, with a tiny model: python scripts/recipes_gpu.py --steps 2 --seconds 4 --clients 2
model.num_layers=1 model.emb_dim=32 model.mlp_dim=64 model.num_heads=2 model.num_kv_heads=1 model.head_dim=16
model.vocab_size=320 model.dtypes.compute=float32
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from maxhydra.config.errors import last_of_each_key
from maxhydra.data.sources.demo import TEXT
from maxhydra.record.metrics import Row, read_metrics

ROOT = Path(__file__).parent.parent
# Recipe -> experiment, inputs by kind of file, and the metric of its curve.
TEXTS = ("data.path={texts}", "data.record_type=text")
MIXTURE = tuple(f"data.sources.{name}.{text[5:]}" for name in ("domain", "general") for text in TEXTS)
TRAINING = {
    "pretrain": ("llama3.2-1b_pretrain", TEXTS, "loss"),
    "continue": ("llama3.2-1b_continue", MIXTURE, "loss"),
    "lora": ("llama3.1-8b_lora", ("data.path={chat}",), "loss"),
    "dpo": ("llama3.1-8b_dpo", ("data.path={pairs}",), "loss"),
    "grpo": ("llama3.2-1b_grpo", (), "reward/mean"),
    "distill": ("llama3.2-1b_distill", TEXTS, "loss"),
}
RECIPES = (*TRAINING, "evaluate", "serve")
CHATS = ("lora", "dpo", "grpo")
SERVED = (
    "data=synthetic",
    "task.engine.max_batch=256",
    "task.engine.cache_tokens=65536",
    "task.engine.max_context=1024",
)


def write_data(folder: Path) -> dict[str, Path]:
    """Write texts, conversations and pairs made of the speeches of the plays; returns the files by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    speeches = [text.strip() for text in TEXT.read_text(encoding="utf-8").split("\n\n") if text.strip()]
    turns = list(zip(speeches, speeches[1:], speeches[2:], strict=False))
    records: dict[str, list[dict[str, object]]] = {
        "texts": [{"text": speech} for speech in speeches],
        "chat": [
            {"messages": [{"role": "user", "content": first}, {"role": "assistant", "content": second}]}
            for first, second, _ in turns
        ],
        "pairs": [{"prompt": first, "chosen": second, "rejected": third} for first, second, third in turns],
    }
    paths = {name: folder / f"{name}.jsonl" for name in records}
    for name, path in paths.items():
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records[name]), encoding="utf-8")
    return paths


def training_overrides(recipe: str, args: argparse.Namespace, files: Mapping[str, Path]) -> list[str]:
    """Overrides that run the experiment of a recipe for a few steps."""
    experiment, inputs, _ = TRAINING[recipe]
    weights = args.weights_8b if "8b" in experiment else args.weights_1b
    template = ["data.tokenizer.chat_template=lines"] if recipe in CHATS else []
    tokenizer = ["data.tokenizer.kind=byte", "data.tokenizer.path=null", *template]
    loaded = weights if recipe != "pretrain" else None
    teacher = [f"task.teacher.weights={args.weights_8b}"]
    if args.weights_8b is None:
        teacher = [f"task.teacher.weights={args.out}/pretrain", "task.teacher.model=null"]
    given = [
        f"experiment={experiment}",
        *(text.format(**files) for text in inputs),
        *(tokenizer if weights is None else [f"data.tokenizer.path={weights}"]),
        f"checkpoint.load_parameters={loaded or 'null'}",
        *(teacher if recipe == "distill" else []),
        *(f"train.steps={args.steps}", "train.log_every=1", "train.eval_every=0", "train.eval_batches=1"),
        *("train.sample.tokens=0", f"checkpoint.every={args.steps}"),
        *(f"run.outputs={args.out}", f"run.name={recipe}"),
    ]
    return last_of_each_key([*given, *args.overrides])


def evaluation_overrides(args: argparse.Namespace) -> list[str]:
    """Overrides that evaluate the model of `pretrain`, or the weights of the 1B."""
    weights = args.weights_1b or f"{args.out}/pretrain"
    tokenizer = [f"data.tokenizer.path={weights}", "data.tokenizer.kind=hf"] if args.weights_1b else []
    given = ["task=eval", "model=llama3.2-1b", f"checkpoint.load_parameters={weights}", *tokenizer]
    tasks = ["task.tasks=[cloze,plays,arithmetic]", "task.limit=100"]
    return last_of_each_key([*given, *tasks, f"run.outputs={args.out}", "run.name=evaluate", *args.overrides])


def describe_training(rows: Sequence[Row], metric: str) -> str:
    """One row of a page: speed after the first third of the steps, memory, and the first and last values."""
    steps = [row for row in rows if "loss" in row]
    timed = steps[len(steps) // 3 :]
    speeds = [row["tokens_per_second"] for row in timed if "tokens_per_second" in row]
    shares = [row["mfu"] for row in timed if "mfu" in row]
    peak = max((row.get("system/device_memory_peak_gib", 0.0) for row in rows), default=0.0)
    curve = [row[metric] for row in steps if metric in row]
    cells = [
        f"{statistics.median(speeds):,.0f} tokens/s" if speeds else "no speed",
        f"MFU {statistics.median(shares):.1%}" if shares else "no MFU",
        f"peak {peak:.1f} GiB" if peak else "no device memory",
        f"{metric} {curve[0]:.3f} to {curve[-1]:.3f}" if curve else f"no {metric}",
    ]
    return " | ".join(cells)


def run_recipe(recipe: str, args: argparse.Namespace, files: Mapping[str, Path]) -> Iterator[str]:
    """Run one recipe, and yield lines about it."""
    if recipe == "serve":
        command = [str(ROOT / "bench/serve_load.py"), "--random-weights", "--tokens", "128"]
        command += ["--seconds", args.seconds, "--clients", args.clients, *SERVED]
        yield from _output([sys.executable, *command, *args.overrides]).splitlines()
    elif recipe == "evaluate":
        output = _output([sys.executable, "-m", "maxhydra", *evaluation_overrides(args)])
        yield from (line for line in output.splitlines() if line.startswith(("task", "cloze", "plays", "arithmetic")))
    else:
        metric = TRAINING[recipe][2]
        _output([sys.executable, "-m", "maxhydra", *training_overrides(recipe, args, files)])
        yield describe_training(read_metrics(args.out / recipe / "metrics.jsonl"), metric)
        yield f"curve: python scripts/curve_svg.py {recipe}.svg {args.out / recipe}:{metric}"


def _output(command: Sequence[str]) -> str:
    """Output of a command; its end is printed if it fails."""
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--recipes", default=",".join(RECIPES), help=f"some of {', '.join(RECIPES)}")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seconds", default="8", help="duration of each load of the server")
    parser.add_argument("--clients", default="64,256", help="numbers of clients of the server")
    parser.add_argument("--out", type=lambda text: Path(text).absolute(), default=Path("recipes_gpu").absolute())
    parser.add_argument("--weights-1b", help="folder of Llama 3.2 1B")
    parser.add_argument("--weights-8b", help="folder of Llama 3.1 8B")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(arguments)
    args.recipes = args.recipes.split(",")
    if unknown := set(args.recipes) - set(RECIPES):
        parser.error(f"unknown recipe {', '.join(sorted(unknown))}; expected some of {', '.join(RECIPES)}")
    return args


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    files, failures = write_data(args.out / "data"), 0
    for recipe in args.recipes:
        try:
            for line in run_recipe(recipe, args, files):
                print(f"{recipe} | {line}", flush=True)
        except RuntimeError as error:
            failures += 1
            print(f"{recipe} | failed: {error}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
