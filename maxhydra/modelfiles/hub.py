"""Models on the Hugging Face hub: `ORG/NAME` or `ORG/NAME@REVISION` as a location of weights or of a tokenizer.

`huggingface_hub` keeps the files in its cache and checks them. Only configs, tokenizer files and safetensors are
downloaded, never code or pickles. The token comes from the environment variable HF_TOKEN, never from a file or the
config; HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE work as in the library.
"""

import functools
import importlib
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.values import HUB_NAME
from maxhydra.record.facts import DEFAULT_OUTPUTS

_LOCATION = re.compile(rf"(?P<repo>{HUB_NAME})(@(?P<revision>[\w.-]+(/[\w.-]+)*))?")
# A missing file with one of these endings is not the name of a repository.
FILE_ENDINGS = (".gguf", ".json", ".jsonl", ".model", ".safetensors", ".yaml")
METADATA = (
    *("config.json", "generation_config.json", "adapter_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
TOKEN = "HF_TOKEN"
log = logging.getLogger("maxhydra")


def is_hub_id(location: str) -> bool:
    """True for `ORG/NAME[@REVISION]`, unless it is a local path or ORG is a local folder or that of runs, outputs."""
    match, organization = _LOCATION.fullmatch(location), location.partition("/")[0]
    if match is None or location.endswith(FILE_ENDINGS) or organization == DEFAULT_OUTPUTS:
        return False
    return not Path(location).exists() and not Path(organization).is_dir()


def hub_folder(key: str, location: str, *, weights: bool) -> Path:
    """Download a repository into the cache and return its folder there; without weights, only configs and tokenizer.

    A session uses one commit of a repository, even if its branch moves. `key` is the config field, for errors.
    """
    folder = _download(key, location, METADATA)
    if not weights:
        return folder
    repo = location.partition("@")[0]
    return _download(key, f"{repo}@{folder.name}", WEIGHTS)


def hub_commit(key: str, location: str) -> str:
    """The commit that a location means in this session."""
    return hub_folder(key, location, weights=False).name


@functools.cache
def _download(key: str, location: str, patterns: tuple[str, ...]) -> Path:
    match = _LOCATION.fullmatch(location)
    assert match is not None
    hub = _library()
    try:
        folder = hub.snapshot_download(
            match["repo"],
            revision=match["revision"],
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
            token=os.environ.get(TOKEN) or False,
            library_name="maxhydra",
        )
    except Exception as error:  # of the library, of its HTTP client, or of the disk
        raise ConfigError(
            _problem(key, location, error, "is not a local path, and cannot be downloaded from")
        ) from error
    log.info("%s is %s", location, folder)
    return Path(folder)


def push_folder(key: str, repo: str, folder: Path, *, ignored: tuple[str, ...]) -> str:
    """Upload a folder as a commit to a repository, created private if it does not exist; return the commit's URL."""
    try:
        api = _library().HfApi(token=require_token(key, repo), library_name="maxhydra")
        api.create_repo(repo, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload the model", ignore_patterns=list(ignored)
        )
    except ConfigError:
        raise
    except Exception as error:  # of the library, of its HTTP client, or of the disk
        raise ConfigError(_problem(key, repo, error, "cannot be uploaded to")) from error
    return str(commit.commit_url)


def require_token(key: str, repo: str) -> str:
    """The token of the environment; ConfigError without one."""
    if token := os.environ.get(TOKEN, "").strip():
        return token
    reason = f"needs a token with write access in the environment variable {TOKEN}, which is not set"
    raise ConfigError(Problem(key, reason, value=repo, hint=f"export {TOKEN}=hf_..."))


def _library() -> Any:
    """The package, imported when it is needed: the import takes half a second."""
    hub = importlib.import_module("huggingface_hub")
    if not sys.stderr.isatty():
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    return hub


def _problem(key: str, location: str, error: Exception, failure: str) -> Problem:
    """Describe an error of the library in one sentence; `failure` begins the description of an unknown one."""
    errors = importlib.import_module("huggingface_hub.errors")
    constants = importlib.import_module("huggingface_hub.constants")
    repo, _, revision = location.partition("@")
    endpoint = constants.ENDPOINT
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.GatedRepoError):
        reason = "is a gated repository, and " + (
            f"the account of {TOKEN} has no access to it" if os.environ.get(TOKEN) else f"{TOKEN} is not set"
        )
        return Problem(key, reason, value=location, hint=f"accept its terms on {endpoint}/{repo}, then set {TOKEN}")
    if isinstance(error, errors.RevisionNotFoundError):
        return Problem(key, f"the repository {repo} has no revision {revision}", value=location)
    if isinstance(error, errors.RepositoryNotFoundError):
        reason = f"is neither a local path nor a repository on {endpoint}"
        return Problem(key, reason, value=location, hint=f"check the name; a private repository needs {TOKEN}")
    if status in (401, 403):
        reason = f"{endpoint} denied access with status {status}"
        return Problem(key, reason, value=location, hint=f"set {TOKEN} to a token with access to {repo}")
    if constants.HF_HUB_OFFLINE:
        reason = f"is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to download it"
        return Problem(key, reason, value=location, hint="unset HF_HUB_OFFLINE, or copy the cache to this machine")
    cause = error.__cause__ or error
    text = " ".join(str(cause).split())[:200]
    reason = f"{failure} {endpoint}: {type(cause).__name__}: {text}"
    return Problem(key, reason, value=location, hint="check the network and HF_ENDPOINT")
