"""sweep.json with damage of any kind is read, or rejected with one message, and stays as it is."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st

from maxhydra.sweep.plan import FILE, Settings, SweepPlan, read_plan, write_plan
from tests.support.fuzzing import fuzz

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def stored_plan() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        plan = SweepPlan(Path(folder), ("train.steps=3",), {"a": "1,2"}, (), (), ("eval/loss",), Settings(), None)
        write_plan(plan)
        return json.loads(Path(folder, FILE).read_text())


PLAN = stored_plan()
TEXT = json.dumps(PLAN).encode()
EDITS = st.dictionaries(st.sampled_from(sorted(PLAN)) | st.text(max_size=8), JSON, max_size=3)
SETTINGS = st.dictionaries(st.sampled_from(sorted(PLAN["settings"])) | st.text(max_size=8), JSON, max_size=3)
FLIPS = st.lists(st.tuples(st.integers(0, len(TEXT) - 1), st.integers(0, 255)), max_size=4)


def read(content: bytes, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as sweep:
        path = Path(sweep, FILE)
        path.write_bytes(content)
        try:
            plan = read_plan(Path(sweep))
            assert isinstance(plan, SweepPlan)
        finally:
            assert path.read_bytes() == content


@pytest.mark.slow
@fuzz(cases=100, edits=EDITS, settings=SETTINGS, removed=st.sets(st.sampled_from(sorted(PLAN)), max_size=2))
def test_changed_values(edits, settings, removed, tmp_path):
    changed = {**PLAN, "settings": {**PLAN["settings"], **settings}, **edits}
    content = json.dumps({key: value for key, value in changed.items() if key not in removed})
    read(content.encode("utf-8", "surrogatepass"), tmp_path)


@fuzz(cases=100, flips=FLIPS, length=st.integers(0, len(TEXT)))
def test_changed_bytes(flips, length, tmp_path):
    content = bytearray(TEXT)
    for place, value in flips:
        content[place] = value
    read(bytes(content[:length]), tmp_path)
