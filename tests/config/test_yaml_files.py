"""YAML options of a user: limits are checked before parsing, with file and line."""

import time
from pathlib import Path

import pytest

from maxhydra.config.compose.composer import Composer
from maxhydra.config.errors import ConfigError

HEAD = b"# @package _global_\nrun:\n"
ALIASES = b"".join(b"    - &a%d [%s]\n" % (i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 8))
CASES = {
    "not UTF-8": (b'  notes: "\xff"\n', "x.yaml:3: is not UTF-8: byte 0xff"),
    "refers to itself": (b"  tags: &a [*a]\n", "x.yaml:3: *a refers to a value that contains it"),
    "nested": (b"  tags: " + b"[" * 20_000 + b"]" * 20_000, "x.yaml:3: is nested more than 50 levels deep"),
    "aliases of aliases": (b"  tags:\n    - &a0 [x]\n" + ALIASES, "has more than 20000 values, counting aliases"),
    "long": (b"  tags: [" + b"x," * 300_000 + b"]\n", "x.yaml:3: has more than 20000 values"),
    "large": (b"  notes: " + b"x" * 2**20, "is too large for a config"),
    "a number": None,
}


@pytest.mark.parametrize("name", CASES)
def test_an_option_beyond_the_limits_is_one_problem(name: str, tmp_path: Path) -> None:
    content, expected = CASES[name] or (b"", "cannot be read as YAML")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "x.yaml").write_bytes(HEAD + content if content else b"5\n")
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        Composer(str(tmp_path)).check_overrides(["experiment=x"]).composed()
    assert expected in str(caught.value) and len(caught.value.problems) == 1
    assert time.process_time() - start < 10
