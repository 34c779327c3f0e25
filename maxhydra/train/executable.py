"""A compiled training step on disk: `task=compile` writes it, `hardware.compiled` loads it instead of compiling.

A folder with `executable.bin` and `manifest.json`. The manifest states the inputs of the compilation: the config
keys that it depends on, a digest of this package's source, the versions of jax and its plugin, and the devices. All of
them must be equal at the start of a run; every difference is reported with both values.

The executable contains machine code, and jax wraps it in a pickle (jax.experimental.serialize_executable): loading one
runs its author's code, with or without the pickle. So the question is who may write the folder. A folder or file
that another user than the current one or root owns, or that group or others may write, is rejected before it is read,
and the bytes must have the digest in the manifest. The trees of arguments and results are not stored; they come from
tracing the step again, which takes seconds.
"""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.serialize import stored_values
from maxhydra.sharding import Sharder

KEY = "hardware.compiled"
EXECUTABLE, MANIFEST = "executable.bin", "manifest.json"
FORMAT = 1
# Config keys that the compiled step depends on, and those among them that it does not depend on.
KEYS = (
    *("model.*", "optimizer.*", "train.*", "mesh.*", "adapter.*", "quantization.*"),
    *("hardware.xla_flags", "hardware.matmul_precision", "hardware.debug_nans"),
)
OTHER_KEYS = (
    *("model.path", "model.context_length", "train.log_every", "train.progress", "train.sample.*"),
    *("train.eval_*", "train.target_eval_loss", "train.early_stop.*", "train.allow_no_learning"),
)
PLUGINS = {"gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "tpu": ("libtpu",)}
PACKAGE = Path(__file__).resolve().parent.parent
HINT = "compile again with task=compile and this config, or leave hardware.compiled null"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything that a compiled step depends on."""

    devices: int
    device_kind: str
    mesh: dict[str, int]
    versions: dict[str, str]
    source: str
    """SHA-256 of the Python files of this package."""
    config: dict[str, Any]
    """The values of KEYS, by dotted key."""

    @classmethod
    def of(cls, config: Config, sharder: Sharder) -> "Manifest":
        """The manifest of a step that is compiled now."""
        device: Any = sharder.mesh.abstract_mesh.abstract_device
        kind = jax.devices()[0].device_kind if device is None else device.device_kind
        return cls(
            devices=sharder.mesh.size,
            device_kind=kind,
            mesh=dict(sharder.mesh.shape),
            versions=_versions(sharder.platform),
            source=_source_digest(),
            config=dict(_relevant_values(config)),
        )

    def differences(self, now: "Manifest") -> Iterator[Problem]:
        """Every difference between the stored manifest and that of the current run."""
        pairs: dict[str, tuple[Any, Any]] = {
            "device kind": (self.device_kind, now.device_kind),
            "number of devices": (self.devices, now.devices),
            "mesh": (_shown_mesh(self.mesh), _shown_mesh(now.mesh)),
            "source of maxhydra (SHA-256)": (self.source[:12], now.source[:12]),
        }
        for name in sorted({*self.versions, *now.versions}):
            pairs[f"version of {name}"] = (self.versions.get(name), now.versions.get(name))
        for name, (then, current) in pairs.items():
            if then != current:
                yield Problem(KEY, f"was compiled for another {name}: {then}, now {current}", hint=HINT)
        for key in sorted({*self.config, *now.config}):
            then, current = self.config.get(key), now.config.get(key)
            if then != current:
                yield Problem(key, f"{KEY} was compiled with {then}", value=current, accepted=str(then), hint=HINT)


def write_executable(folder: Path, compiled: jax.stages.Compiled, manifest: Manifest) -> int:
    """Write a compiled step and its manifest to a new folder; returns the bytes of the executable."""
    payload = serialize_executable.serialize(compiled)[0]
    folder.mkdir(parents=True, mode=0o755)
    digest = hashlib.sha256(payload).hexdigest()
    content = {"format": FORMAT, "sha256": digest, **dataclasses.asdict(manifest)}
    for name, data in ((EXECUTABLE, payload), (MANIFEST, json.dumps(content, indent=1).encode())):
        path = folder / name
        path.write_bytes(data)
        path.chmod(0o644)
    return len(payload)


def check_executable(path: str, config: Config, sharder: Sharder) -> None:
    """Raise a ConfigError unless the folder holds a step that was compiled for this run."""
    folder = Path(path).expanduser()
    if config.task.name != "pretrain":
        reason = f"holds the step of task=pretrain, not of task={config.task.name}"
        raise ConfigError(Problem(KEY, reason, value=path, hint="leave hardware.compiled null"))
    if config.train.ramp.start is not None:
        reason = "holds a step for one batch size, but train.ramp.start is set"
        raise ConfigError(Problem(KEY, reason, value=path, hint="leave one of the two null"))
    if config.train.checks:
        reason = "holds a step without checks, but train.checks is set"
        raise ConfigError(Problem(KEY, reason, value=path, hint="leave hardware.compiled null, or train.checks empty"))
    _check_owner(folder, path)
    manifest = _read_manifest(folder, path)
    if problems := list(manifest.differences(Manifest.of(config, sharder))):
        raise ConfigError(problems)


def load_executable(path: str, traced: jax.stages.Traced, sharder: Sharder) -> jax.stages.Compiled:
    """Load the step of a folder that `check_executable` accepted.

    `traced`: the same step, traced for the batches of the run, which has the trees of arguments and results.
    """
    folder = Path(path).expanduser()
    payload = (folder / EXECUTABLE).read_bytes()
    if hashlib.sha256(payload).hexdigest() != json.loads((folder / MANIFEST).read_text())["sha256"]:
        raise ConfigError(Problem(KEY, f"{EXECUTABLE} is damaged: not the digest in {MANIFEST}", value=path, hint=HINT))
    assert isinstance(sharder.mesh, jax.sharding.Mesh)
    devices = sharder.mesh.devices.flatten().tolist()
    in_tree, out_tree = (jax.tree.structure(info) for info in (traced.args_info, traced.out_info))
    try:
        return serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
    except ValueError as error:
        # The one part of the arguments that does not follow from the config: data decides whether rows have segments.
        reason = f"was compiled for batches with other columns than those of the data: {error}"
        hint = "compile again with task.segments=true for packed rows, false for rows of one document"
        raise ConfigError(Problem(KEY, reason, value=path, hint=hint)) from None


def _check_owner(folder: Path, shown: str) -> None:
    for path in (folder, folder / MANIFEST, folder / EXECUTABLE):
        if not path.exists():
            reason = f"{path} does not exist"
            hint = "write it with task=compile task.output=FOLDER"
            raise ConfigError(Problem(KEY, reason, value=shown, accepted="a folder of task=compile", hint=hint))
        status = path.stat()
        if status.st_uid not in (0, os.getuid()):
            reason = f"{path} belongs to another user (uid {status.st_uid}), whose machine code would be run"
            raise ConfigError(Problem(KEY, reason, value=shown, hint="copy it if you trust its author"))
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            reason = f"other users may write {path} (mode {stat.S_IMODE(status.st_mode):o}), and it contains code"
            raise ConfigError(Problem(KEY, reason, value=shown, hint=f"chmod go-w {path}"))


def _read_manifest(folder: Path, shown: str) -> Manifest:
    names = {field.name for field in dataclasses.fields(Manifest)}
    try:
        content = json.loads((folder / MANIFEST).read_text())
        stored = content.pop("format")
        if stored != FORMAT:
            reason = f"{MANIFEST} has format {stored}, this version reads {FORMAT}"
            raise ConfigError(Problem(KEY, reason, value=shown, hint=HINT))
        return Manifest(**{name: content[name] for name in names})
    except (ValueError, KeyError, TypeError, AttributeError):
        reason = f"{folder / MANIFEST} is not a manifest of task=compile"
        raise ConfigError(Problem(KEY, reason, value=shown, hint=HINT)) from None


def _versions(platform: str) -> dict[str, str]:
    """Versions of jax and of the compiler plugin of the platform."""
    versions = {}
    for name in ("jax", "jaxlib", *PLUGINS.get(platform, ())):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _source_digest() -> str:
    digest = hashlib.sha256()
    files = {path.relative_to(PACKAGE): path for path in PACKAGE.rglob("*.py")}
    kernels = (PACKAGE / "kernels").resolve()
    files |= {Path("kernels") / path.relative_to(kernels): path for path in kernels.rglob("*.py")}
    for name in sorted(files):
        digest.update(f"{name}\0".encode() + files[name].read_bytes())
    return digest.hexdigest()


def _relevant_values(config: Config) -> Iterator[tuple[str, Any]]:
    for key, value in _flat(stored_values(config), ""):
        is_relevant = any(fnmatch(key, pattern) for pattern in KEYS)
        if is_relevant and not any(fnmatch(key, pattern) for pattern in OTHER_KEYS):
            yield key, value


def _flat(values: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, values


def _shown_mesh(mesh: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "one device"
