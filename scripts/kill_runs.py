"""Kill every task at random moments and check that the same command then ends where an uninterrupted one does.

    python scripts/kill_runs.py --task all --kills 20 --jobs 15 --report kills.json
    python scripts/kill_runs.py --task pretrain dpo --signal TERM

Each task runs once undisturbed. Each trial then starts the same command in an empty folder, sends the signal to its
process group after a delay that is uniform over the duration of the undisturbed run, up to three times, and repeats the
command until it exits alone. A trial passes if the results are equal: every array of the last checkpoint, the losses
and evaluations in metrics.jsonl, status, objective and sample in run.json, or the files that the task writes.
Exit code 1 if a trial fails.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 600
MAX_KILLS_PER_TRIAL, MAX_STARTS = 3, 4
# A command that finds its complete output says so and exits with code 2.
ALREADY_EXISTS = "already exists"
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


def last_values(arguments: list[str]) -> list[str]:
    """Drop earlier values of a key: a command that sets a key twice is rejected."""
    return list({argument.partition("=")[0]: argument for argument in arguments}.values())


def split(text: str) -> list[str]:
    return text.split()


TRAIN = split(
    "model=micro train.seq_len=32 train.per_device_batch_size=4 train.steps=8 train.log_every=1 train.eval_every=3 "
    "train.eval_batches=2 train.sample.tokens=4 checkpoint.every=2 optimizer.schedule.warmup_steps=1 run.name=it"
)
WEIGHTS = ["checkpoint.load_parameters={base}"]
MODEL = ["model=micro", "train.seq_len=32", *WEIGHTS]
TEXT = ["data=grain", "data.path={inputs}/texts.jsonl"]
GRPO = ["task=grpo", "reward=exact", "data=arithmetic", "data.record_type=prompts", *TRAIN, *WEIGHTS]
GRPO += split(
    "task.group_size=4 task.max_tokens=4 train.seq_len=12 train.per_device_batch_size=16 train.eval_start=true "
    "train.eval_batches=1 task.engine.max_batch=16 task.engine.cache_tokens=1024 objective=eval/error"
)
EARLY_STOP = (
    "train.steps=30 train.eval_every=1 train.eval_start=true train.early_stop.patience=2 checkpoint.keep_best=1"
)
# Saves as often as the disk allows, between the multiples of checkpoint.every.
CONTINUOUS = "train.steps=80 train.eval_every=40 checkpoint.every=1000 checkpoint.max_overhead=0.5"
LOCAL = "checkpoint.local_every=1000 checkpoint.local_folder=local"
REWARD_MODEL = "task=reward_model model.head=score train.sample.tokens=0"
ON_POLICY = (
    "task.teacher.weights={base} task.on_policy.fraction=0.5 task.on_policy.max_tokens=4 data.packing.method=none "
    "data.packing.overlong=truncate task.on_policy.engine.max_batch=8 task.on_policy.engine.cache_tokens=1024"
)
TEACHER = "data=arithmetic data.record_type=text data.problems=300 task.k=8 task.shards=4 task.output=out"
DECODE = "task.output=out.jsonl task.sampling.max_tokens=8 task.engine.max_batch=8 task.engine.cache_tokens=1024"
BENCH = "train.seq_len=32 train.per_device_batch_size=4 task.steps=2 task.warm_up=1 task.what=[pretrain] run.name=it"

# Arguments by task. {base} is a run with weights, {inputs} the folder of input files.
TASKS: dict[str, list[str]] = {
    "pretrain": [*TRAIN, "data=demo", "model.dropout=0.1"],
    "continuous": [*TRAIN, "data=demo", *split(CONTINUOUS)],
    "continuous_local": [*TRAIN, "data=demo", *split(CONTINUOUS), *split(LOCAL)],
    "early_stop": [*TRAIN, "data=arithmetic", "optimizer.learning_rate=0.3", *split(EARLY_STOP)],
    "sft": ["task=sft", *TRAIN, *WEIGHTS, "data=arithmetic"],
    "sft_lora": ["task=sft", *TRAIN, *WEIGHTS, "data=arithmetic", "adapter=lora"],
    "dpo": ["task=dpo", *TRAIN, *WEIGHTS, "data=arithmetic", "data.record_type=preference"],
    "kto": ["task=dpo", "task.loss=kto", *TRAIN, *WEIGHTS, "data=arithmetic", "data.record_type=labeled"],
    "reward_model": [*TRAIN, *WEIGHTS, "data=arithmetic", "data.record_type=preference", *split(REWARD_MODEL)],
    "grpo": GRPO,
    "ppo": [*GRPO, *split("task.baseline=critic task.group_size=1 task.iterations=2 task.entropy_bonus=0.01")],
    "grpo_off_policy": [*GRPO, "task.off_policy_steps=1", "task.iterations=2", "task.kl.beta=0.1"],
    "distill": ["task=distill", *TRAIN, "data=arithmetic", "task.teacher.weights={base}"],
    "distill_on_policy": ["task=distill", *TRAIN, *WEIGHTS, "data=arithmetic", *split(ON_POLICY)],
    "sweep": ["-m", *TRAIN, "data=arithmetic", "train.steps=4", "optimizer.learning_rate=1e-3,3e-3"],
    "tokenize": ["task=tokenize", *TEXT, "task.shards=6", "task.workers=2", "task.output=out"],
    "teacher_logits": ["task=teacher_logits", *MODEL, *split(TEACHER)],
    "train_tokenizer": ["task=train_tokenizer", *TEXT, "task.vocab_size=500", "task.output=out", "run.name=it"],
    "convert": ["task=convert", *MODEL, "task.output=out"],
    "decode": ["task=decode", *MODEL, "task.input={inputs}/prompts.jsonl", *split(DECODE)],
    "score": ["task=score", *MODEL, "task.input={inputs}/scored.jsonl", "task.output=out.jsonl"],
    "bench": ["task=bench", "model=micro", *split(BENCH)],
}
BASE = split(
    "model=micro data=arithmetic train.seq_len=32 train.per_device_batch_size=16 train.steps=30 train.eval_every=0 "
    "train.sample.tokens=0 run.name=base"
)
# Tasks whose values are measurements; only their status is compared.
MEASURED = ("bench",)
# Tasks that compile nothing.
UNCOMPILED = ("tokenize", "train_tokenizer")
# Tasks that write their output in the order of completion.
UNORDERED = ("decode",)


class Process(Protocol):
    """A started command."""

    def signal(self, number: int) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def is_running(self) -> bool: ...


Launch = Callable[[Sequence[str], Path], Process]


class CommandProcess:
    """`python -m maxhydra ARGUMENTS` in a process group of its own, with its console in a file."""

    def __init__(self, arguments: Sequence[str], folder: Path, environment: dict[str, str]):
        with open(folder / "console.txt", "a") as console:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "maxhydra", *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal(self, number: int) -> None:
        if self.is_running():
            os.killpg(self._process.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def is_running(self) -> bool:
        return self._process.poll() is None


@dataclasses.dataclass(frozen=True)
class Reference:
    """The undisturbed run of a task."""

    arguments: list[str]
    seconds: float
    result: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial: when it was interrupted, how each start ended, and which results differ."""

    task: str
    number: int
    delays: list[float]
    codes: list[int]
    exit_seconds: list[float]
    """Seconds from the signal to the exit of the process."""
    differences: list[str]


class Harness:
    """Runs references and trials below a folder."""

    def __init__(self, folder: Path, launch: Launch, *, number: int = signal.SIGKILL, seed: int = 0):
        self._folder, self._launch, self._signal, self._seed = folder, launch, number, seed
        self._names = {"inputs": str(folder / "inputs"), "base": str(folder / "inputs/outputs/base")}

    def prepare(self, *, weights: bool = True) -> None:
        """Write the input files, and train the weights that some tasks start from."""
        inputs = self._folder / "inputs"
        inputs.mkdir(parents=True)
        random_state = random.Random(0)
        vocabulary = ["".join(random_state.choices("abcdefghij", k=random_state.randint(2, 9))) for _ in range(500)]
        texts = [{"text": " ".join(random_state.choices(vocabulary, k=60))} for _ in range(3000)]
        _write_lines(inputs / "texts.jsonl", texts)
        _write_lines(inputs / "scored.jsonl", [{"text": text["text"][:100]} for text in texts[:60]])
        _write_lines(inputs / "prompts.jsonl", [{"prompt": f"{number}+{number}="} for number in range(60)])
        if weights:
            self._run_to_end(BASE, inputs)

    def reference(self, task: str) -> Reference:
        """Run a task undisturbed: once to fill the compilation cache, and once for the result and the duration."""
        arguments = [argument.format_map(self._names) for argument in last_values(TASKS[task])]
        for name in ("reference",) if task in UNCOMPILED else ("warm", "reference"):
            folder = self._new_folder(task, name)
            start_time = time.monotonic()
            self._run_to_end(arguments, folder)
        return Reference(arguments, time.monotonic() - start_time, self._read(task, folder))

    def trial(self, task: str, reference: Reference, number: int) -> Trial:
        """Interrupt a task up to three times at random moments, then let it end, and compare."""
        folder = self._new_folder(task, f"trial-{number}")
        random_state = random.Random(f"{self._seed}/{task}/{number}")
        delays: list[float] = []
        codes: list[int] = []
        exit_seconds: list[float] = []
        for _ in range(random_state.choice((1, 1, 2, MAX_KILLS_PER_TRIAL))):
            delays.append(random_state.uniform(0, reference.seconds))
            process = self._launch(reference.arguments, folder)
            deadline = time.monotonic() + delays[-1]
            while process.is_running() and time.monotonic() < deadline:
                time.sleep(min(0.02, max(0.0, deadline - time.monotonic())))
            if is_interrupted := process.is_running():
                process.signal(self._signal)
            signal_time = time.monotonic()
            codes.append(process.wait(TIMEOUT_SECONDS))
            if is_interrupted:
                exit_seconds.append(round(time.monotonic() - signal_time, 2))
            elif codes[-1] == 0:
                break
        while codes[-1] != 0 and len(codes) < MAX_KILLS_PER_TRIAL + MAX_STARTS and not self._is_complete(folder, codes):
            codes.append(self._launch(reference.arguments, folder).wait(TIMEOUT_SECONDS))
        differences = compare(reference.result, self._read(task, folder))
        if codes[-1] != 0 and not self._is_complete(folder, codes):
            differences.append(f"the last command ended with exit code {codes[-1]}, see {folder / 'console.txt'}")
        return Trial(task, number, [round(delay, 2) for delay in delays], codes, exit_seconds, differences)

    def _is_complete(self, folder: Path, codes: list[int]) -> bool:
        console = folder / "console.txt"
        return codes[-1] == 2 and console.exists() and ALREADY_EXISTS in console.read_text()[-2000:]

    def _new_folder(self, task: str, name: str) -> Path:
        folder = self._folder / task / name
        folder.mkdir(parents=True)
        return folder

    def _run_to_end(self, arguments: Sequence[str], folder: Path) -> None:
        code = self._launch(arguments, folder).wait(TIMEOUT_SECONDS)
        if code:
            raise RuntimeError(f"maxhydra {' '.join(arguments)}: exit code {code}, see {folder / 'console.txt'}")

    def _read(self, task: str, folder: Path) -> dict[str, Any]:
        """The comparable results of a task, by name."""
        results: dict[str, Any] = {}
        for path in sorted(folder.glob("outputs/**/run.json")):
            results |= {f"{path.parent.name}: {name}": value for name, value in read_run(task, path.parent)}
        for path in sorted([*folder.glob("out/**/*"), *folder.glob("out.jsonl")]):
            if path.is_file() and path.name != ".lock":
                content = path.read_bytes()
                lines = sorted(content.splitlines()) if task in UNORDERED else [content]
                results[str(path.relative_to(folder))] = hashlib.sha256(b"\n".join(lines)).hexdigest()
        return results


def _write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


# Orbax is called from one thread at a time.
_READER = threading.Lock()


def read_run(task: str, folder: Path) -> Iterator[tuple[str, Any]]:
    facts = json.loads((folder / "run.json").read_text())
    yield "status", facts["status"]
    yield "report", (folder / "report.html").exists()
    if task in MEASURED:
        return
    yield from ((name, facts.get(name)) for name in ("reason", "objective", "sample", "end_step"))
    yield "metrics", {name: value for name, value in facts.get("metrics", {}).items() if is_compared(name)}
    if (metrics := folder / "metrics.jsonl").exists():
        rows = map(json.loads, metrics.read_text().splitlines())
        yield "metrics.jsonl", [{name: value for name, value in row.items() if is_compared(name)} for row in rows]
    steps = [int(path.name) for path in folder.glob("checkpoints/*") if path.name.isdigit()]
    if steps:
        yield "last checkpoint", max(steps)
        checkpoint = folder / "checkpoints" / str(max(steps))
        for item in ("params", "rest"):
            with _READER, ocp.PyTreeCheckpointer() as reader:
                # As NumPy arrays, since several processes may have written them.
                tree = reader.metadata(checkpoint / item).item_metadata.tree
                kinds = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
                arrays = reader.restore(checkpoint / item, restore_args=kinds)
            for path, array in jax.tree_util.tree_leaves_with_path(arrays):
                digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
                yield f"{item}{jax.tree_util.keystr(path)}", digest
        yield "data position", json.loads((checkpoint / "data" / "metadata").read_text())


def is_compared(name: str) -> bool:
    """Whether a metric is a result, and not a measurement of time."""
    return name == "step" or name.endswith("loss") or name.startswith(("eval/", "reward/"))


def compare(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Describe each result that is missing, additional or different."""
    names = [*expected, *(name for name in found if name not in expected)]
    return [
        f"{name}: {_shorten(expected.get(name))} expected, {_shorten(found.get(name))} found"
        for name in names
        if expected.get(name) != found.get(name)
    ]


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 300 else f"{text[:150]} ... {text[-150:]}"


def environment(cache: Path) -> dict[str, str]:
    """A clean environment with a shared compilation cache."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": XLA_FLAGS, "OMP_NUM_THREADS": "1"}
    settings |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {**inherited, **settings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", default=["all"], choices=["all", *TASKS])
    parser.add_argument("--kills", type=int, default=20, help="trials per task")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="commands at a time")
    parser.add_argument("--signal", default="KILL", choices=["KILL", "TERM", "USR1", "HUP"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="empty folder for all files; a temporary one by default")
    parser.add_argument("--report", type=Path, help="JSON file with all trials")
    args = parser.parse_args()
    tasks = list(TASKS) if "all" in args.task else args.task
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kill-runs-"))
    variables = environment(folder.absolute() / "cache")
    number = signal.Signals[f"SIG{args.signal}"]
    harness = Harness(
        folder.absolute(),
        lambda arguments, cwd: CommandProcess(arguments, cwd, variables),
        number=number,
        seed=args.seed,
    )
    harness.prepare()
    trials: list[Trial] = []
    with ThreadPoolExecutor(args.jobs) as pool:
        references = dict(zip(tasks, pool.map(harness.reference, tasks), strict=True))
        print({task: round(reference.seconds, 1) for task, reference in references.items()}, flush=True)
        work = [(task, number) for number in range(args.kills) for task in tasks]
        for trial in pool.map(lambda item: harness.trial(item[0], references[item[0]], item[1]), work):
            trials.append(trial)
            result = "; ".join(trial.differences) or "equal"
            print(
                f"{trial.task} {trial.number}: {args.signal} after {trial.delays} s, {trial.codes}: {result}",
                flush=True,
            )
    failed = [trial for trial in trials if trial.differences]
    if args.report is not None:
        args.report.write_text(json.dumps(_summary(references, trials, args.signal), indent=1) + "\n")
    print(f"{len(trials) - len(failed)} of {len(trials)} trials equal, files in {folder}")
    return 1 if failed else 0


def _summary(references: dict[str, Reference], trials: list[Trial], name: str) -> dict[str, Any]:
    by_task = {}
    for task, reference in references.items():
        own = [trial for trial in trials if trial.task == task]
        by_task[task] = {
            "seconds": round(reference.seconds, 2),
            "trials": len(own),
            "signals": sum(len(trial.exit_seconds) for trial in own),
            "equal": sum(not trial.differences for trial in own),
            "slowest_exit": max((seconds for trial in own for seconds in trial.exit_seconds), default=None),
        }
    return {"signal": name, "tasks": by_task, "trials": [dataclasses.asdict(trial) for trial in trials]}


if __name__ == "__main__":
    sys.exit(main())
