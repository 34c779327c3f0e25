"""Every key has an effect in a task or is rejected there: a walk over all pairs of keys and tasks."""

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest

from maxhydra.config import ConfigError, usage
from maxhydra.config.compose.composer import compose
from maxhydra.config.fields import walk
from maxhydra.config.registry import PACKAGE, modules
from maxhydra.config.schema.config import DESCRIBING_TASKS, TRAINING_TASKS, Config
from maxhydra.config.schema.run import Task
from maxhydra.config.schema.tasks.inference import DecodeTask
from maxhydra.config.usage import CONDITIONS, MEASURING_TASKS, SOURCES, TASKS, unused_problems, using_tasks

KEYS = {path: field.name for path, field in walk(Config) if not field.spec.is_section}


@functools.cache
def imported_files(module: str) -> tuple[Path, ...]:
    """Files of a module that is imported; of a package that modules are imported from by name, all of them."""
    folder = PACKAGE.parent.joinpath(*module.split("."))
    if module.endswith(".*"):
        return tuple(folder.parent.glob("*.py"))
    candidates = (folder.with_suffix(".py"), folder / "__init__.py")
    return tuple(path for path in candidates if path.is_file())


@functools.cache
def module_facts(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a file reads as attributes, or lists for getattr, and the modules of maxhydra that it imports."""
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    if PACKAGE / "config" / "schema" in path.parents:
        # Of the schema, only what tasks call counts, such as Run.folder.
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        called = [node for node in functions if "check" not in node.name and "problem" not in node.name]
        nodes = [node for function in called for node in ast.walk(function)]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    listed = [item for node in nodes if isinstance(node, ast.Tuple | ast.List | ast.Dict) for item in ast.walk(node)]
    names |= {item.value for item in listed if isinstance(item, ast.Constant) and isinstance(item.value, str)}
    imports = set[str]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            imports |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
    own = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
    by_name = re.findall(r'import_module\(f"(maxhydra[\w.]*|\{__(?:name|package)__\})\.\{', text)
    imports |= {f"{own if match.startswith('{') else match}.*" for match in by_name}
    return frozenset(names), frozenset(name for name in imports if name.startswith("maxhydra"))


def names_read(task: str) -> set[str]:
    """Attributes that a task may read: those in all modules that its module imports, directly or not."""
    waiting, seen, names = (
        [f"maxhydra.tasks.{task}", "maxhydra.tasks._runner", "maxhydra.cli.run_job"],
        set(),
        set[str](),
    )
    while waiting:
        for path in imported_files(waiting.pop()):
            is_other_task = path.parent == PACKAGE / "tasks" and path.stem != task and not path.stem.startswith("_")
            if path not in seen and not is_other_task:
                seen.add(path)
                found, imports = module_facts(path)
                names |= found
                waiting += imports
    return names


@pytest.mark.slow
def test_every_key_is_read_or_rejected_in_every_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks that describe or measure a training run accept what any training task reads."""
    tasks_of = functools.cache(using_tasks)
    monkeypatch.setattr(usage, "using_tasks", tasks_of)
    trained = set[str]().union(*map(names_read, TRAINING_TASKS))
    tasks, base = modules("maxhydra.tasks"), compose([]).config
    used, rejected, unread = 0, 0, list[str]()
    for task in tasks:
        config, names = dataclasses.replace(base, task=Task(name=task)), names_read(task)
        if task in (*MEASURING_TASKS, *DESCRIBING_TASKS):
            names |= trained
        problems = {problem.path: problem for problem in unused_problems(config, [(key, 1) for key in KEYS])}
        for key, name in KEYS.items():
            if task in tasks_of(key):
                used += 1
                unread += [f"{key} task={task}"] if name not in names else []
            else:
                rejected += 1
                assert f"task={task}" in problems[key].reason and problems[key].accepted.startswith("task=")
    assert not unread, "neither read nor rejected: list the tasks of these keys in maxhydra/config/usage.py"
    assert used + rejected == len(KEYS) * len(tasks) > 7000 and rejected > 1500


def test_tables_name_keys_that_exist() -> None:
    keys = [*KEYS, *(f"task.{path}" for path, _ in walk(DecodeTask))]
    patterns = [pattern for pattern, _ in TASKS] + [key for condition in CONDITIONS for key in condition.keys]
    for pattern in [*patterns, *(f"data.{name}" for name in SOURCES)]:
        expression = re.compile(re.escape(pattern).replace(r"\*", ".*"))
        assert any(expression.fullmatch(key) for key in keys), f"{pattern} matches no key"


SHAPES = ["task=sft", "data=shapes", "model=micro-vision", "train.seq_len=48"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "without", "needed"),
    [
        ("checkpoint.best_metric=eval/perplexity", [], ["checkpoint.keep_best=1"]),
        ("checkpoint.every=5", ["checkpoint=none"], []),
        ("checkpoint.first_minutes=2", ["checkpoint.every_minutes=null"], []),
        ("objective=nonsense", [], None),
        ("objective=loss", ["task=decode"], []),
        ("data.digits=3", [], ["data=arithmetic"]),
        ("data.streaming=true", ["data=arithmetic"], ["data=hf", "data.name=x"]),
        ("data.packing.window=9", ["data=arithmetic", "data.record_type=preference"], ["data=arithmetic"]),
        ("data.packing.window=9", ["data=arithmetic", "data.record_type=preference"], SHAPES),
        ("data.packing.max_segments=2", SHAPES, [*SHAPES, "data.packing.method=best_fit"]),
        ("data.packing.max_segments=2", ["data=arithmetic", "data.record_type=prompts"], ["data=arithmetic"]),
        ("data.temperature=2", [], None),
        ("reward.workers=2", [], None),
        ("reward.workers=2", ["task=sft"], None),
        ("tracker.project=mine", [], ["tracker=wandb"]),
        ("tracker.project=mine", ["tracker=tensorboard"], None),
        ("train.spike.decay=0.9", [], ["train.spike.sigmas=3"]),
        ("train.early_stop.min_delta=0.1", [], ["train.early_stop.patience=3"]),
        ("train.sample.temperature=0", ["train.sample.tokens=0"], ["train.sample.tokens=3"]),
        ("train.steps=3", ["task=decode"], []),
        ("model.dtypes.softmax=bfloat16", ["model.kernels.attention=cudnn"], ["model.kernels.attention=xla"]),
        ("alerts.timeout=3", [], ["alerts.command=true"]),
    ],
)
def test_a_value_without_effect_is_rejected(key: str, without: list[str], needed: list[str] | None) -> None:
    """`without` rejects the key; `needed`, unless None, gives it an effect."""
    with pytest.raises(ConfigError) as failure:
        compose([*without, key])
    (problem,) = failure.value.problems
    assert problem.path == key.partition("=")[0] and (problem.hint or problem.accepted)
    if needed is not None:
        compose([*needed, key])


def test_options_and_experiments_may_set_more_than_a_task_uses() -> None:
    compose(["experiment=shakespeare", "task=decode"])
    compose(["task=plan", "train.steps=7", "reward.workers=2", "tracker.backends=[wandb]"])


def test_tasks_without_rows_of_fixed_length_ignore_it() -> None:
    """A model whose context is shorter than the default of train.seq_len is decoded without setting it."""
    short = ["model=tiny", "model.context_length=64"]
    compose(["task=decode", "task.prompt=a", *short])
    with pytest.raises(ConfigError, match=r"exceeds model\.context_length=64(.|\n)*set train\.seq_len=64"):
        compose(short)
