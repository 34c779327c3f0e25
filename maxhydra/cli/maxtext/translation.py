"""The result of a translation: options of groups, values of keys, and notes about keys without an equivalent."""

import dataclasses
from typing import Any

from maxhydra.cli.maxtext.settings import Settings
from maxhydra.config.errors import quoted, show
from maxhydra.config.options import model_option
from maxhydra.config.schema.config import TRAINING_TASKS
from maxhydra.config.schema.model import Model
from maxhydra.record.redact import redact_config

# Characters of a value in a note; rules of sharding have thousands.
SHOWN = 60


@dataclasses.dataclass(frozen=True)
class Note:
    """A key of MaxText whose value is not part of the command."""

    key: str
    value: Any
    reason: str
    changes_run: bool
    """Whether the run differs from MaxText's for that reason."""

    def __str__(self) -> str:
        text = show(redact_config(self.value, self.key))
        return f"{self.key}={text if len(text) <= SHOWN else text[:SHOWN] + '...'}: {self.reason}"


class Translation:
    """Collects the results of the conversions. A later value of a key replaces an earlier one."""

    def __init__(self, settings: Settings, task: str):
        self.settings, self.task = settings, task
        self.choices: dict[str, str] = {"task": task}
        self.values: dict[str, Any] = {}
        self.required: set[str] = set()
        """Keys that the config sets itself; others follow from MaxText's defaults and are left out if equal to ours."""
        self.notes: list[Note] = []

    @property
    def trains(self) -> bool:
        return self.task in TRAINING_TASKS

    @property
    def model(self) -> Model:
        """Return the model option, before its keys are replaced."""
        return model_option(self.choices["model"])

    def choose(self, group: str, option: str) -> None:
        """Choose an option of a group."""
        self.choices[group] = option

    def set(self, path: str, value: Any, *, from_keys: tuple[str, ...] = ()) -> None:
        """Set a key of the run. `from_keys` are those of MaxText that the value comes from."""
        self.values[path] = value
        if self.settings.given(*from_keys):
            self.required.add(path)

    def unsupported(self, key: str, reason: str) -> None:
        """Note a key whose value maxhydra does not support."""
        self.notes.append(Note(key, self.settings[key], reason, changes_run=True))

    def mention(self, key: str, reason: str) -> None:
        """Note a key that is not needed, or is set in another way."""
        self.notes.append(Note(key, self.settings[key], reason, changes_run=False))

    def overrides(self) -> list[str]:
        """Return the arguments of the command: options first, then keys."""
        chosen = [f"{group}={option}" for group, option in self.choices.items()]
        return chosen + [f"{path}={override_text(value)}" for path, value in self.values.items()]


def override_text(value: Any) -> str:
    """Return a value in Hydra's override grammar."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, list | tuple):
        return f"[{','.join(map(override_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{quoted(key)}:{override_text(item)}' for key, item in value.items())}}}"
    return show(value)
