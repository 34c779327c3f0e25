"""Input files of a worker: job.yaml, the complete config, and job.json, the provenance that goes into run.json.

Both are plain text that the worker reads without importing Hydra. They live in the run folder; on GKE, in a ConfigMap.
"""

import dataclasses
import json
from pathlib import Path

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.migrations import migrate_config, migrate_overrides
from maxhydra.config.serialize import from_yaml, to_yaml
from maxhydra.record.atomic_io import replace_file
from maxhydra.record.redact import redact_argv

CONFIG, FACTS = "job.yaml", "job.json"


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A valid config, the option chosen in each config group, and the overrides it was composed from."""

    config: Config
    choices: dict[str, str]
    overrides: list[str]
    config_dir: str | None

    def files(self) -> dict[str, str]:
        """Map file names to contents. Overrides are recorded for display only, so secrets in them are redacted."""
        facts = {"choices": self.choices, "overrides": redact_argv(self.overrides), "config_dir": self.config_dir}
        return {CONFIG: to_yaml(self.config), FACTS: json.dumps(facts, indent=1) + "\n"}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            replace_file(folder / name, content)


def read_job_spec(path: Path) -> JobSpec:
    """Read the job whose config is at `path`; job.json next to it is optional. Raises ConfigError."""
    try:
        config = from_yaml(path.read_text(encoding="utf-8"), str(path))
        # In a run folder, run.json holds the same keys for the run's config.yaml.
        candidates = [file for name in (FACTS, "run.json") if (file := path.with_name(name)).exists()]
        facts = json.loads(candidates[0].read_text(encoding="utf-8")) if candidates else {}
        overrides = migrate_overrides(facts.get("overrides", []))
        return JobSpec(config, migrate_config(facts.get("choices", {})), overrides, facts.get("config_dir"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(str(path), f"cannot be read: {error}")) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(Problem(str(path.parent), f"cannot be read: {error}")) from None
