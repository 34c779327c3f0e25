"""Redact secrets from configs, commands, diffs and URLs before they are stored.

A value is secret if its key says so (`api_key=`, `--token`), or if it has the format of a well-known token. Keys are
matched word by word, so that `train.sample.tokens`, `data.tokenizer.kind` and `pad_token_id` are not redacted. Values
that a config reads from environment variables are stored as the reference, `${oc.env:NAME}`, instead.
"""

import itertools
import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "***"
# Config values that are names of folders anyway.
_NOT_REFERENCES = frozenset(("run.name", "run.outputs"))

# A key with one of these words, or these consecutive pairs of words, has a secret value.
_SECRET_WORDS = frozenset(
    ("secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey", "webhook")
)
_SECRET_PAIRS = frozenset((("api", "key"), ("access", "key"), ("private", "key"), ("auth", "key")))
# So does a key with `token`, unless one of these words marks it as a text token or a count.
_TEXT_TOKENS = frozenset(("bos", "eos", "pad", "unk", "sep", "cls", "mask", "id", "ids", "per", "next", "special"))
# Values that are not secret: null values, or a type in source code.
_HARMLESS_VALUES = frozenset(
    ("", "none", "null", "true", "false", "???", HIDDEN, "str", "int", "float", "bool", "bytes")
)

# Nor are references to a value elsewhere: $NAME, ${...}, $(command).
_REFERENCE = re.compile(r"\$(?:[A-Z_][A-Z0-9_]*|\{[^{}]*\}|\(.*\))")
# W&B keys of the old form, which look like a git commit; the words before them distinguish the two.
_HEX_KEY = re.compile(r"\b[0-9a-f]{40}\b")
_HEX_CONTEXT = re.compile(
    r"(?i)(\b(?:wandb|w&b|key|token|secret|login|credentials?)\b[^\n\w]{0,8}(?:\w{1,10}[^\n\w]{1,4})?)[0-9a-f]{40}\b"
)
_COMMIT_NAME = re.compile(r"(?i)commit|sha|git|rev|hash|digest|version|tag")
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([^{},\s]+)\s*(,[^{}]*)?\}")

_TOKENS = re.compile(
    r"""
    \bhf_[A-Za-z0-9]{16,}                                   # Hugging Face
    | \bsk-[A-Za-z0-9_-]{16,}                               # OpenAI, Anthropic
    | \b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,})   # GitHub
    | \bglpat-[A-Za-z0-9_-]{16,}                            # GitLab
    | \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                         # AWS
    | \bAIza[0-9A-Za-z_-]{30,}                              # Google
    | \bya29\.[0-9A-Za-z_-]{20,}                            # Google OAuth
    | \bxox[abeoprs]-[A-Za-z0-9-]{10,}                      # Slack
    | \bpypi-[A-Za-z0-9_-]{40,}                             # PyPI
    | \bwandb_v1_[A-Za-z0-9_]{20,}                          # W&B
    | \beyJ[A-Za-z0-9_-]{10,2000}\.[A-Za-z0-9_-]{10,2000}\.[A-Za-z0-9_-]+  # JSON web token
    """,
    re.VERBOSE,
)
_PRIVATE_KEY = re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)(.*?)(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_URL_CREDENTIALS = re.compile(r"""(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.]{0,15}://)[^/\s:@'"]*(?::[^/\s@'"]*)?@""")
_AUTHORIZATION = re.compile(r"""(?i)(\bbearer\s+|\bauthorization["']?\s*[:=]\s*["']?basic\s+)[A-Za-z0-9+/=._~-]{8,}""")
# key=value, key: "value", "key": 'value', key: str = "value", ("key", "value").
# Possessive and bounded quantifiers keep matching linear: a diff may be one long line.
_NAME = re.compile(
    r"""
    (?<![\w./])(?P<key>[A-Za-z_][\w./]*+(?:-[\w./]++){0,6}+)
    (?:["']?\]?[ \t]*+(?::[ \t]*+(?:str|bytes)[ \t]*+(?:\|[ \t]*+None)?[ \t]*+=|=|:(?!:))[ \t]*+
       |["'][ \t]*+,[ \t]*+(?=["']))
    """,
    re.VERBOSE,
)
# A bare value that is called or indexed is code, not a secret.
_VALUE = re.compile(
    r"""
    "(?P<double>(?:\\.|[^"\\\n])*+)" | '(?P<single>(?:\\.|[^'\\\n])*+)'
    | (?!\$[{(]) ["']?(?P<bare>[^\s"',;()\[\]{}]++)(?![(\[])
    """,
    re.VERBOSE,
)


def is_secret_name(key: str) -> bool:
    """True if a key (dotted, dashed, snake or camel case) names a secret."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", key)
    parts = [word.lower() for word in re.split(r"[^A-Za-z0-9]+", spaced) if word]
    if _SECRET_WORDS.intersection(parts) or _SECRET_PAIRS.intersection(itertools.pairwise(parts)):
        return True
    return "token" in parts and not _TEXT_TOKENS.intersection(parts)


class EnvironmentValues:
    """Values that configs of this process have read with `${oc.env:NAME}`."""

    def __init__(self) -> None:
        self.num_reads = 0
        self._secrets: dict[str, str] = {}
        self._references: dict[str, tuple[Any, Any]] = {}

    def add_read(self, name: str, value: str) -> None:
        """Record the value of a variable. If its name says that it is secret, the value is replaced in every text."""
        self.num_reads += 1
        if is_secret_name(name) and len(value) >= 4 and value.lower() not in _HARMLESS_VALUES:
            self._secrets[value] = f"${{oc.env:{name}}}"

    def add_reference(self, path: str, value: Any, reference: Any) -> None:
        """Record that the config has the value of `reference` at a dotted path."""
        if path not in _NOT_REFERENCES:
            self._references[path] = value, reference

    def reference(self, path: str, value: Any) -> Any:
        """The reference that a config value was read from, or None."""
        known, reference = self._references.get(path, (None, None))
        return reference if known == value else None

    def replace(self, text: str) -> str:
        """Replace secret values in a text by their references."""
        for value, reference in self._secrets.items():
            text = text.replace(value, reference)
        return text


ENVIRONMENT = EnvironmentValues()


def variables_in(text: str) -> list[str]:
    """Names of the environment variables without a default that a config refers to."""
    return [match[1] for match in _VARIABLE.finditer(text) if match[2] is None]


def redact_config(values: Any, path: str = "") -> Any:
    """Return the plain values of a config with references instead of values from variables, and secrets redacted."""
    if isinstance(values, dict):
        return {key: redact_config(value, f"{path}.{key}" if path else str(key)) for key, value in values.items()}
    if (reference := ENVIRONMENT.reference(path, values)) is not None:
        return reference
    if isinstance(values, list):
        return [redact_config(item, path) for item in values]
    return redact_value(path, values) if isinstance(values, str) else values


def secret_paths(values: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted paths of values with a secret that is not a reference to a variable."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from secret_paths(value, f"{path}.{key}" if path else str(key))
    elif ENVIRONMENT.reference(path, values) is None:
        items = [item for item in (values if isinstance(values, list) else [values]) if isinstance(item, str)]
        if any(HIDDEN in redact_value(path, item) and HIDDEN not in item for item in items):
            yield path


def redact_facts(values: Any, key: str = "") -> Any:
    """Return plain values, such as those of run.json, with secrets redacted."""
    if isinstance(values, dict):
        return {name: redact_facts(value, str(name)) for name, value in values.items()}
    if isinstance(values, list):
        return [redact_facts(item, key) for item in values]
    return redact_value(key, values) if isinstance(values, str) else values


def redact_value(key: str, value: str) -> str:
    """Redact a text whose key is known."""
    if is_secret_name(key) and not _is_harmless(value):
        return ENVIRONMENT.replace(value) if ENVIRONMENT.replace(value) != value else HIDDEN
    return redact_text(_HEX_KEY.sub(HIDDEN, value) if key.startswith("tracker.") else value)


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable with this name and value is a secret; commit hashes are not."""
    is_key = _HEX_KEY.fullmatch(value) is not None and not _COMMIT_NAME.search(name)
    return is_key or (is_secret_name(name) and not _is_harmless(value)) or redact_text(value) != value


def _is_harmless(value: str) -> bool:
    return value.lower() in _HARMLESS_VALUES or _REFERENCE.fullmatch(value) is not None


def redact_text(text: str) -> str:
    """Redact secrets anywhere in a text, such as a diff, a URL or a YAML file."""
    text = ENVIRONMENT.replace(text)
    text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}\3", text)
    text = _URL_CREDENTIALS.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    return _HEX_CONTEXT.sub(rf"\1{HIDDEN}", _TOKENS.sub(HIDDEN, _redact_named(text)))


def _redact_named(text: str) -> str:
    pieces, position = [], 0
    for name in _NAME.finditer(text):
        value = _VALUE.match(text, name.end()) if name.start() >= position and is_secret_name(name["key"]) else None
        if value is not None and not _is_harmless(value[value.lastgroup or 0]):
            start, end = value.span(value.lastgroup or 0)
            pieces += [text[position:start], HIDDEN]
            position = end
    return "".join([*pieces, text[position:]])


def redact_argv(argv: list[str]) -> list[str]:
    """Redact a command line: `key=value`, `--key=value`, `--key value`, and known tokens anywhere."""
    clean: list[str] = []
    for previous, word in zip(["", *argv], argv, strict=False):
        key, equals, value = word.partition("=")
        is_flag = previous.startswith("--") and "=" not in previous
        if is_flag and is_secret_name(previous) and not word.startswith("--"):
            clean.append(HIDDEN)
        elif equals and is_secret_name(key) and not _is_harmless(value.strip("\"'")):
            clean.append(f"{key}={HIDDEN}")
        else:
            clean.append(redact_text(word))
    return clean
