"""Memory that a process may use."""

import math
from pathlib import Path

import pytest

from maxhydra.record.processes import group_limits


@pytest.mark.parametrize(
    ("membership", "files", "limits"),
    [
        ("0::/job", {"job/memory.max": "1000"}, [1000]),
        ("0::/", {"memory.max": "max"}, []),
        ("0::/kubepods/pod1", {"memory.max": "2000"}, [2000]),
        ("9:cpu:/x\n4:memory:/x", {"memory/x/memory.limit_in_bytes": "3000", "x/memory.max": "1"}, [3000]),
        ("", {}, []),
    ],
    ids=["version_2", "no_limit", "container", "version_1", "none"],
)
def test_limits_of_control_groups(membership: str, files: dict[str, str], limits: list, tmp_path: Path) -> None:
    for name, text in {
        "proc/self/cgroup": membership,
        **{f"groups/{name}": text for name, text in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert group_limits(tmp_path / "proc", tmp_path / "groups") == [math.inf, *limits]
    assert group_limits(tmp_path / "missing", tmp_path) == [math.inf]
