"""Random command lines and YAML: each gives a config, or a ConfigError that names the problem."""

from functools import cache

import pytest
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import maxhydra.convert  # noqa: F401  registers model=from_hf
from maxhydra.cli import flags
from maxhydra.config.compose.composer import Composer
from maxhydra.config.compose.merge import ConfigMerge
from maxhydra.config.compose.overrides import apply_override, parse
from maxhydra.config.compose.provenance import parse_yaml
from maxhydra.config.fields import walk
from maxhydra.config.registry import groups
from maxhydra.config.schema.config import Config
from maxhydra.config.serialize import from_yaml, to_yaml
from tests.support.fuzzing import fuzz

YAML = "a: &x [1]\nb: *x\nc: {d: ${a}}\ne: 2024-01-01\n1: [null, ~, 0x1F, 1e3, .inf]\n"
KEYS = [path.replace("*", "layer") for path, _ in walk(Config)]
CHOICES = [f"{group}={path.stem}" for group, paths in groups().items() for path in paths]
VALUES = [
    *("null", "true", "off", "nan", "-1", "0", "1e400", "1000000000000000000000", "0x10", "1_000", "???", "''", '"'),
    *("[]", "[1,2", "[1,[2,[3]]]", "{}", "{a:1}", "{a:{b:{c:[]}}}", "a,b", "range(1,3)", "choice(1,2)", "glob(*)"),
    *("${train.steps}", "${oc.env:NO_SUCH}", "${min:1,2}", "${a", "${train}", "${run.name}", "\\", "\\'", "=", "\0"),
    *("_target_", "os.system", "../x", "a b", "é", "\u202e", "x" * 300, "[" * 200, "{a:" * 200, "-", "+", "~", "@"),
]


def texts(size: int = 12) -> SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8"), max_size=size)


def overrides() -> SearchStrategy[str]:
    """Overrides of known keys with unusual values, and the same with a character changed."""
    keys = st.one_of(st.sampled_from(KEYS), st.sampled_from(KEYS), texts(), st.just("data.sources.a.path"))
    values = st.one_of(st.sampled_from(VALUES), st.integers().map(str), st.floats().map(str), texts())
    settings_ = st.builds("{}{}={}".format, st.sampled_from(["", "", "+", "++", "~"]), keys, values)
    choices = st.builds("{}{}".format, st.sampled_from(["", "+", "~"]), st.sampled_from(CHOICES))
    whole = st.one_of(settings_, settings_, choices, texts())
    return st.one_of(whole, st.builds(change, whole, st.integers(0, 40), texts(2)))


def change(text: str, at: int, inserted: str) -> str:
    """Replace one character."""
    return text[:at] + inserted + text[at + 1 :]


@cache
def composer() -> Composer:
    return Composer()


@cache
def config_yaml() -> str:
    return to_yaml(composer().check_overrides(["model=micro"], with_hydra=False).composed().config)


@pytest.mark.slow
@fuzz(cases=200, lines=st.lists(overrides(), max_size=4))
def test_an_override_is_merged_or_reported(lines: list[str]) -> None:
    merge, parsed = ConfigMerge(), parse(lines, composer().loader)
    merge.problems += parsed.problems
    for override in parsed.overrides:
        if not override.is_sweep_override() and not composer().groups.is_choice(override):
            apply_override(merge, override)
    assert all(map(str, merge.problems))


@pytest.mark.slow
@fuzz(cases=200, lines=st.lists(overrides(), max_size=4))
def test_a_command_line_is_parsed_or_reported(lines: list[str]) -> None:
    flags.parse(lines)


@pytest.mark.slow
@fuzz(cases=10, lines=st.lists(overrides(), max_size=5))
def test_a_command_line_gives_a_config_or_its_problems(lines: list[str]) -> None:
    checked = composer().check_overrides(["model=micro", *lines], with_hydra=False)
    assert isinstance(checked.composed().config, Config)


@pytest.mark.slow
@fuzz(cases=200, text=st.one_of(texts(200), st.builds(change, st.just(YAML), st.integers(0, 40), texts(4))))
def test_yaml_is_parsed_or_reported(text: str) -> None:
    parse_yaml.__wrapped__(text, "x.yaml")


@pytest.mark.slow
@fuzz(cases=5, at=st.floats(0, 1), inserted=texts(6), removed=st.integers(0, 30))
def test_a_stored_config_is_read_or_reported(at: float, inserted: str, removed: int) -> None:
    text = config_yaml()
    start = int(at * len(text))
    assert isinstance(from_yaml(text[:start] + inserted + text[start + removed :]), Config)
