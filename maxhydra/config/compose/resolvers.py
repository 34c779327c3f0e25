"""OmegaConf resolvers for YAML values, such as `${min:20,${train.steps}}`."""

import hashlib
import re
import time

from omegaconf import ListConfig, OmegaConf

LONGEST = 100


def sweep_folder(outputs: str, name: str | None) -> str:
    """Return the folder of a sweep's jobs, named after `run.name` or, without one, the current time."""
    return f"{outputs}/{name or time.strftime('sweep-%Y%m%d-%H%M%S')}"


def job_folder(number: int, overrides: ListConfig | list[str], constant: ListConfig | list[str]) -> str:
    """Return a job's folder name, its number and swept values: `3_learning_rate=0.01,num_layers=2`.

    Names over LONGEST characters are cut and end in a hash, because file systems limit the length of a name.
    """
    pairs = [line.lstrip("+").partition("=")[::2] for line in overrides]
    swept = [(key, value) for key, value in pairs if key.partition("@")[0] not in constant]
    short = [re.split(r"[./]", key)[-1] for key, _ in swept]
    names = [name if short.count(name) == 1 else key for name, (key, _) in zip(short, swept, strict=True)]
    label = ",".join(f"{name}={value}" for name, (_, value) in zip(names, swept, strict=True))
    safe = re.sub(r"[^-\w.=,+]", "_", label)
    folder = f"{number}_{safe}" if safe else str(number)
    if len(folder) <= LONGEST:
        return folder
    return f"{folder[: LONGEST - 9]}_{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def register() -> None:
    """Register the resolvers. The sweep folder is cached, so that all jobs of a sweep get the same time."""
    OmegaConf.register_new_resolver("min", lambda *values: min(values), replace=True)
    OmegaConf.register_new_resolver("sweep_folder", sweep_folder, replace=True, use_cache=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)
