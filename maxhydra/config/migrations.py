"""Keys and options that were renamed, and the conversion of stored configs and overrides to the current names.

A renamed key is an error on the command line and in option files, where the message gives the new name. In files that
maxhydra wrote itself (config.yaml, job.yaml, run.json, sweep.json, index.json, quantization.yaml) it is converted when
the file is read, so that old runs, sweeps, shards and checkpoints stay usable. The files are never rewritten.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

# Old path -> new path. `*` matches one name; a rename never moves a key to another section.
RENAMED_KEYS = {
    "data.shape": "data.record_type",
    "data.sources.*.shape": "data.sources.*.record_type",
    "model.kernels.fused_product": "model.kernels.fused_linear",
    "model.kernels.rotated_heads": "model.kernels.qkv_rope",
    "model.kernels.tiles.triton.grouped_matmul.*.summed": "model.kernels.tiles.triton.grouped_matmul.*.contracted",
    "model.kernels.tiles.triton.grouped_matmul.products": "model.kernels.tiles.triton.grouped_matmul.forward",
    "model.kernels.tiles.triton.grouped_matmul.sums": "model.kernels.tiles.triton.grouped_matmul.weight_grad",
    "model.kernels.tiles.triton.linear_cross_entropy.at_once": "model.kernels.tiles.triton.linear_cross_entropy.unroll",
    "model.kernels.tiles.triton.rotated_heads": "model.kernels.tiles.triton.qkv_rope",
    "model.kinds.*.beside": "model.kinds.*.parallel_moe",
    "quantization.besides": "quantization.overrides",
    "task.engine.steady": "task.engine.deterministic",
}
# Old choice -> new choice, as on the command line. The option's name is also the value of GROUP.name.
RENAMED_OPTIONS = {"task=tokenizer": "task=train_tokenizer"}

RULES_PATH = "mesh.rules"
# Old default -> new default of a rule that new mesh axes extend. A config.yaml holds all rules, the defaults included.
EXTENDED_RULES: dict[str, tuple[list[str], list[str]]] = {
    "act_batch": (["data", "fsdp", "expert"], ["replica", "data", "stage", "fsdp", "expert"]),
    "layers": ([], ["stage"]),
    "embed": (["fsdp", "expert", "sequence"], ["stage", "fsdp", "expert", "sequence"]),
    "latent": (["fsdp", "expert", "sequence"], ["stage", "fsdp", "expert", "sequence"]),
}
# Rules of logical axes that older configs lack.
ADDED_RULES = {"act_stream_length": ["sequence", "tensor"], "replicas": ["replica"]}

# A quoted string, an interpolation, a bracket or separator, or a run of other characters.
_TOKENS = re.compile(r"\"(?:\\.|[^\"])*\"|'(?:\\.|[^'])*'|\$\{[^}]*\}|[{}\[\]:,]|[^{}\[\]:,\"'$]+|.", re.DOTALL)


def migrate_key(path: str) -> str:
    """Return the current name of a dotted key, or the key itself if no part of it was renamed."""
    return _migrate_key(path, reverse=False)


@cache
def _migrate_key(path: str, *, reverse: bool) -> str:
    names: list[str] = []
    for name in path.split("."):
        names.append(_last_name(".".join([*names, name]), reverse=reverse))
    return ".".join(names)


def _last_name(path: str, *, reverse: bool) -> str:
    """Return the last name of a path after renames; the names before it are renamed already."""
    names = path.split(".")
    for old, new in _renames(reverse).get(names[-1], ()):
        pattern = old.split(".")
        if len(pattern) == len(names) and all(part in ("*", name) for part, name in zip(pattern, names, strict=True)):
            return new.rpartition(".")[2]
    return names[-1]


@cache
def _renames(reverse: bool) -> dict[str, list[tuple[str, str]]]:
    """Renames by the last name of the path that they match: most keys need one dictionary lookup."""
    found: dict[str, list[tuple[str, str]]] = {}
    for old, new in RENAMED_KEYS.items():
        before, after = (new, old) if reverse else (old, new)
        found.setdefault(before.rpartition(".")[2], []).append((before, after))
    return found


def migrate_option(group: str, option: Any) -> Any:
    """Return the current name of a group's option."""
    return RENAMED_OPTIONS.get(f"{group}={option}", f"{group}={option}").partition("=")[2] if option else option


def renamed_option(group: str, option: Any) -> str:
    """Return `task=a was renamed to task=b` for a choice that was renamed, and nothing for any other."""
    current = RENAMED_OPTIONS.get(f"{group}={option}")
    return f"{group}={option} was renamed to {current}" if current else ""


def migrate_config(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Rename keys and options in plain values: a config, its section at `path`, dotted keys, or group choices."""
    if path == RULES_PATH:
        return _migrate_rules(values)
    return {key: migrate_value(here, value) for here, key, value in migrated_entries(values, path)}


def _migrate_rules(rules: Mapping[str, Any]) -> dict[str, Any]:
    """Extend the rules that have their old default to the mesh axes that were added since."""
    if not EXTENDED_RULES.keys() <= rules.keys():
        return dict(rules)
    defaults = {name: new for name, (old, new) in EXTENDED_RULES.items() if rules[name] == old}
    return {**ADDED_RULES, **rules, **defaults}


def migrate_value(path: str, value: Any) -> Any:
    """Rename keys and options in the value of the key `path`."""
    if isinstance(value, Mapping):
        return migrate_config(value, path)
    return migrate_option(path.removesuffix(".name"), value) if isinstance(value, str) else value


def original_names(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Undo all renames of keys: fingerprints of a config are taken over these names, so that a rename keeps them."""
    return {
        key: original_names(value, here) if isinstance(value, Mapping) else value
        for here, key, value in migrated_entries(values, path, reverse=True)
    }


def migrated_entries(values: Mapping[str, Any], path: str, *, reverse: bool = False) -> Iterable[tuple[str, str, Any]]:
    """Yield the path and the key of every entry after renames, and its value."""
    for name, value in values.items():
        whole = f"{path}.{name}" if path else str(name)
        renamed = _migrate_key(whole, reverse=reverse)
        yield renamed, renamed.removeprefix(f"{path}.") if path else renamed, value


def migrate_overrides(overrides: Iterable[str]) -> list[str]:
    """Rename keys and options in overrides as on the command line, also within values such as `{a: {shape: chat}}`."""
    return [_migrate_override(override) for override in overrides]


def _migrate_override(override: str) -> str:
    head, equals, value = override.partition("=")
    key = head.lstrip("+~")
    sign, path = head[: len(head) - len(key)], migrate_key(key)
    for old, new in RENAMED_OPTIONS.items():
        group, _, option = old.partition("=")
        if path == group:
            value = re.sub(rf"(?<![\w-]){option}(?![\w-])", new.partition("=")[2], value)
    return sign + path + equals + (_migrate_literal(path, value) if "{" in value else value)


def _migrate_literal(path: str, text: str) -> str:
    """Rename the keys of a dict literal in Hydra's override grammar, and leave everything else as it was written."""
    tokens = _TOKENS.findall(text)
    scopes: list[tuple[str, bool]] = []  # path of each open bracket, and whether it is a dict
    key, expects_key = path, False
    for index, token in enumerate(tokens):
        if token in ("{", "["):
            expects_key = token == "{"
            scopes.append((key, expects_key))
        elif token in ("}", "]"):
            expects_key = False
            del scopes[-1:]
        elif token == ",":
            expects_key = bool(scopes) and scopes[-1][1]
        elif expects_key and (name := token.strip().strip("\"'")):
            key, expects_key = migrate_key(f"{scopes[-1][0]}.{name}"), False
            tokens[index] = token.replace(name, key.rpartition(".")[2])
    return "".join(tokens)
