"""What a worker is handed: job.yaml, the whole config, and beside it job.json with what run.json will tell of it.

Both are plain text that the worker reads without Hydra. They lie in the run's folder, or wherever the place puts them.
"""

import dataclasses
import json
from pathlib import Path

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.migrations import migrate_config, migrate_overrides
from maxhydra.config.serialize import from_yaml, to_yaml
from maxhydra.record.atomic_io import replace_file
from maxhydra.record.redact import scrub_argv

CONFIG, FACTS = "job.yaml", "job.json"


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A valid config, the option chosen in each group, and what it was composed from."""

    config: Config
    choices: dict[str, str]
    overrides: list[str]
    config_dir: str | None

    def files(self) -> dict[str, str]:
        """Name -> content of the files to hand over. Overrides are there to be told, so secrets among them are not."""
        facts = {"choices": self.choices, "overrides": scrub_argv(self.overrides), "config_dir": self.config_dir}
        return {CONFIG: to_yaml(self.config), FACTS: json.dumps(facts, indent=1) + "\n"}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            replace_file(folder / name, content)


def read_order(path: Path) -> JobSpec:
    """The order whose config is at `path`; a config without a job.json beside it runs too. ConfigError otherwise."""
    try:
        config = from_yaml(path.read_text(encoding="utf-8"), str(path))
        # run.json, of a run whose own config.yaml this is, tells the same.
        beside = [file for name in (FACTS, "run.json") if (file := path.with_name(name)).exists()]
        facts = json.loads(beside[0].read_text(encoding="utf-8")) if beside else {}
        overrides = migrate_overrides(facts.get("overrides", []))
        return JobSpec(config, migrate_config(facts.get("choices", {})), overrides, facts.get("config_dir"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(str(path), f"cannot be read: {error}")) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(Problem(str(path.parent), f"cannot be read: {error}")) from None
