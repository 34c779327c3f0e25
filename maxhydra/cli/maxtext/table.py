"""The table of MaxText's keys: keys.yaml has those of its config reference, newer.yaml those added since."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from maxhydra.config.errors import UNSET
from maxhydra.config.yaml_files import FAST_LOADER

FOLDER = Path(__file__).parent
# States of a key, in the order in which docs/maxtext.md lists them.
HOME, OTHER, DERIVED, CLOUD, NONE = "home", "another way", "derived", "cloud", "none"
STATES = (HOME, OTHER, DERIVED, CLOUD, NONE)


@dataclasses.dataclass(frozen=True)
class Row:
    """What one key of MaxText is here. Exactly one of to, fixed, instead, derived, cloud and none is set."""

    default: Any = UNSET
    """MaxText's default; UNSET for a key that only MaxText computes, or whose default is a long list."""
    to: str = ""
    """Key that has the value. With `by`, the keys that the function sets."""
    by: str = ""
    """Function of conversions.FUNCTIONS that translates the key together with others."""
    values: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """Our value for each of MaxText's. Empty: the same values."""
    null_at: float | None = None
    """Value that means null here."""
    always: bool = False
    """The default is set too where ours differs, because it changes training."""
    fixed: list[Any] = dataclasses.field(default_factory=list)
    """Values that describe what maxhydra always does."""
    why: str = ""
    """What maxhydra always does."""
    instead: str = ""
    """The way to the same thing, if the value cannot be translated."""
    derived: str = ""
    """The source of the value, or the part of MaxText that it belongs to."""
    cloud: str = ""
    """The service of Google that it belongs to."""
    none: str = ""
    """Why it has no equivalent."""

    @property
    def state(self) -> str:
        """Return the state under which the documentation counts the key."""
        named = {OTHER: self.instead, DERIVED: self.derived, CLOUD: self.cloud, NONE: self.none}
        return next((state for state, text in named.items() if text), HOME)

    @property
    def text(self) -> str:
        """Return the text of the documentation about the key."""
        return self.why or self.instead or self.derived or self.cloud or self.none


@cache
def reference_rows() -> dict[str, Row]:
    """Return the rows of MaxText's config reference."""
    return _read("keys.yaml")


@cache
def newer_rows() -> dict[str, Row]:
    """Return the rows of keys that the config reference does not list yet."""
    return _read("newer.yaml")


@cache
def rows() -> dict[str, Row]:
    """Return all rows by key."""
    return reference_rows() | newer_rows()


@cache
def families() -> dict[str, str]:
    """Return the model option that has the architecture of each decoder block."""
    found: dict[str, str] = _load("families.yaml")
    return found


@cache
def layer_counts() -> dict[str, int]:
    """Return the layers that one of base_num_decoder_layers stands for, by the name of a family; 1 if not listed."""
    found: dict[str, int] = _load("layer_counts.yaml")
    return found


def _read(name: str) -> dict[str, Row]:
    return {key: Row(**fields) for key, fields in _load(name).items()}


def _load(name: str) -> Any:
    return yaml.load((FOLDER / name).read_text(encoding="utf-8"), Loader=FAST_LOADER)
