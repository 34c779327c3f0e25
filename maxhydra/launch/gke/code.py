"""Changes to the code of an image: the difference between the revision it was built from and this checkout.

They travel as a compressed patch in the job's ConfigMap. An init container copies the source of the image (SOURCE, with
its revision in REVISION, as in the Dockerfile), checks the revision and applies the patch.
"""

import base64
import dataclasses
import gzip
import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import maxhydra
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import KEY
from maxhydra.launch.gke.settings import CONFIG
from maxhydra.record.atomic_io import replace_file
from maxhydra.record.provenance import REVISION
from maxhydra.record.redact import redact_text

SOURCE, CODE = "/opt/maxhydra", "/code"
PATCH = "code.patch.gz"
# File of a sweep's folder, so that all of its jobs run the same code, those of a later `sweep resume` too.
STORED = ".code.json"
# Folders under version control that .dockerignore keeps out of the image; a patch of them could not be applied.
NOT_IN_IMAGE = (".ci", "bench", "docs", "tests")
# A ConfigMap holds 1 MiB, with the job's config.
LIMIT = 900_000
GIT_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Code:
    """A full commit hash, and the compressed patch from it to the code of the jobs."""

    revision: str
    patch: bytes


def read_changes(revision: str, folder: Path | None = None) -> Code:
    """Difference of the checkout from a revision, with uncommitted and untracked files that git does not ignore."""
    folder = folder or Path(maxhydra.__file__).parent
    commit = _git(folder, revision, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").decode().strip()
    top = Path(_git(folder, revision, "rev-parse", "--show-toplevel").decode().strip())
    with tempfile.TemporaryDirectory() as scratch:
        # A separate index, so that the user's is not changed.
        index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        _git(top, revision, "read-tree", commit, **index)
        _git(top, revision, "add", "--all", **index)
        excluded = [f":(exclude,top){folder}" for folder in NOT_IN_IMAGE]
        options = ("--cached", "--binary", "--no-ext-diff", "--no-color")
        difference = _git(top, revision, "diff", *options, commit, "--", ":(top)", *excluded, **index)
    _check_secrets(difference.decode(errors="replace"), revision)
    # Without the time, equal changes give equal bytes.
    patch = gzip.compress(difference, mtime=0)
    if len(patch) > LIMIT:
        reason = f"differs from this checkout by {len(patch):,} compressed bytes, more than a ConfigMap can hold"
        hint = "build the image again (maxhydra launch image), or have git ignore large files"
        raise ConfigError(Problem(f"{KEY}.code", reason, revision, f"up to {LIMIT:,} bytes", hint))
    return Code(commit, patch)


def stored_changes(revision: str, sweep: Path) -> Code:
    """The changes stored in a sweep's folder; on the first call, those of the checkout now."""
    path = sweep / STORED
    if not path.exists():
        code = read_changes(revision)
        stored = {"revision": code.revision, "patch": base64.b64encode(code.patch).decode()}
        replace_file(path, json.dumps(stored) + "\n")
    stored = json.loads(path.read_text(encoding="utf-8"))
    return Code(stored["revision"], base64.b64decode(stored["patch"]))


def _check_secrets(difference: str, revision: str) -> None:
    added = [line[1:] for line in difference.splitlines() if line.startswith("+")]
    if any(redact_text(line) != line for line in added):
        reason = "cannot be sent: a changed line looks like a secret, and ConfigMaps are not confidential"
        hint = f"move it to a file that git ignores, and pass it by {KEY}.secrets"
        raise ConfigError(Problem(f"{KEY}.code", reason, revision, hint=hint))


def _git(folder: Path, revision: str, *arguments: str, **variables: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=GIT_SECONDS,
            env={**os.environ, **variables},
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        stderr = getattr(error, "stderr", None) or b""
        reason = stderr.decode(errors="replace").strip().replace("\n", "; ") or f"git {arguments[0]} failed"
        accepted = "a revision of the git checkout that contains maxhydra, such as HEAD"
        raise ConfigError(Problem(f"{KEY}.code", reason, revision, accepted)) from None
    return done.stdout


def init_container(code: Code, image: str) -> dict[str, Any]:
    """Container that writes the patched source to the volume `code`."""
    built = f"$(cat {SOURCE}/{REVISION} 2> /dev/null)"
    message = f"the image was built from revision '{built}', but the changes are relative to {code.revision}"
    script = [
        "set -e",
        f'if [ "{built}" != {shlex.quote(code.revision)} ]; then echo "maxhydra: {message}" >&2; exit 2; fi',
        f"cp -a {SOURCE}/. {CODE}",
        f"cd {CODE}",
        f"gunzip -c {CONFIG}/{PATCH} > /tmp/code.patch",
        # An empty patch is an error for git apply.
        f"if [ -s /tmp/code.patch ]; then git apply /tmp/code.patch; echo changed >> {REVISION}; fi",
    ]
    return {
        "name": "code",
        "image": image,
        "command": ["/bin/sh", "-c", "\n".join(script)],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
            {"name": "code", "mountPath": CODE},
        ],
    }


def mount_code(container: dict[str, Any]) -> dict[str, Any]:
    """The worker with the patched source in front of the installed package."""
    return {
        **container,
        "env": [*container["env"], {"name": "PYTHONPATH", "value": CODE}],
        "volumeMounts": [*container["volumeMounts"], {"name": "code", "mountPath": CODE}],
    }
