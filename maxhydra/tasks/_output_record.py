"""A record in the output folder of task=convert: a digest of its inputs, and the digests of its files.

The folder gets its final name before the command ends, so a command that is killed in between, or repeated by a script,
finds a complete output. The record shows that it is the same and undamaged.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from maxhydra.config import Config
from maxhydra.config.serialize import stored_values
from maxhydra.convert.adapter_lineage import find_adapter_lineage, weights_record
from maxhydra.data.tokenizers import input_files, template_files
from maxhydra.record.atomic_io import migrate_format, read_json, replace_file, stamp
from maxhydra.record.checkpoint_manifest import digest_files
from maxhydra.record.fingerprint import fingerprint_files

# A hidden file is not part of a checkpoint's manifest, and other programs do not read it as a model file.
RECORD = ".conversion.json"
OUTPUT_FORMAT = 1


def inputs_digest(key: str, config: Config, source: str) -> str:
    """A digest of all that the output depends on: weights, the base of an adapter, settings, and tokenizer files.

    `key` is the config field that names the source.
    """
    values: dict[str, Any] = stored_values(config)
    del values["run"], values["checkpoint"], values["task"]["output"], values["task"]["push"]
    lineage = find_adapter_lineage(key, source)
    locations = [source, *([] if lineage is None else [lineage.base])]
    weights = [weights_record(key, location)["digest"] for location in locations]
    tokenizer = config.data.tokenizer
    files = fingerprint_files([*input_files(tokenizer), *template_files(tokenizer)], is_full=True)["digest"]
    return hashlib.sha256(json.dumps([values, weights, files], sort_keys=True).encode()).hexdigest()


def write_record(folder: Path, inputs: str) -> None:
    """Record the files of a complete output folder, and the digest of its inputs."""
    content = {**stamp(OUTPUT_FORMAT), "inputs": inputs, "files": digest_files(folder)}
    replace_file(folder / RECORD, json.dumps(content, indent=1) + "\n")


def describe_difference(folder: Path, inputs: str) -> str | None:
    """Why an existing folder is not the complete output for these inputs; None if it is."""
    try:
        record = migrate_format(read_json(folder / RECORD), current=OUTPUT_FORMAT, migrations={})
        if record["inputs"] != inputs:
            return "was written from other weights or with other settings"
        expected = dict(record["files"])
    except FileNotFoundError:
        return "was not written by task=convert"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"has a damaged {RECORD} ({error})"
    found = digest_files(folder)
    found.pop(RECORD, None)
    changed = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    return f"has changed since it was written: {changed[0]}" if changed else None
