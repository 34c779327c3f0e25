"""Redact secrets from commands, diffs and URLs before they are stored.

A value is secret if its key says so (`api_key=`, `--token`), or if it has the format of a well-known token. Keys are
matched word by word, so that `train.sample.tokens`, `data.tokenizer.kind` and `pad_token_id` are not redacted.
"""

import itertools
import re

HIDDEN = "***"

# A key with one of these words, or these consecutive pairs of words, has a secret value.
_SECRET_WORDS = frozenset(("secret", "password", "passwd", "passphrase", "credential", "credentials", "apikey"))
_SECRET_PAIRS = frozenset((("api", "key"), ("access", "key"), ("private", "key"), ("auth", "key")))
# So does a key with `token`, unless one of these words marks it as a text token or a count.
_TEXT_TOKENS = frozenset(("bos", "eos", "pad", "unk", "sep", "cls", "mask", "id", "ids", "per", "next", "special"))
# Values that are not secret: null values, or a type in source code.
_HARMLESS = frozenset(("", "none", "null", "true", "false", "???", HIDDEN, "str", "int", "float", "bool", "bytes"))

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
    "(?P<double>(?:\\.|[^"\\\n])*+)" | '(?P<single>(?:\\.|[^'\\\n])*+)' | ["']?(?P<bare>[^\s"',;()\[\]{}]++)(?![(\[])
    """,
    re.VERBOSE,
)


def is_secret_name(key: str) -> bool:
    """True if a key (dotted, dashed, snake or camel case) names a secret."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", key)
    parts = [word.lower() for word in re.split(r"[^A-Za-z0-9]+", words) if word]
    if _SECRET_WORDS.intersection(parts) or _SECRET_PAIRS.intersection(itertools.pairwise(parts)):
        return True
    return "token" in parts and not _TEXT_TOKENS.intersection(parts)


def redact_text(text: str) -> str:
    """Redact secrets anywhere in a text, such as a diff, a URL or a YAML file."""
    text = _PRIVATE_KEY.sub(rf"\1{HIDDEN}\3", text)
    text = _URL_CREDENTIALS.sub(rf"\g<scheme>{HIDDEN}@", text)
    text = _AUTHORIZATION.sub(rf"\1{HIDDEN}", text)
    return _TOKENS.sub(HIDDEN, _redact_named(text))


def _redact_named(text: str) -> str:
    pieces, position = [], 0
    for name in _NAME.finditer(text):
        value = _VALUE.match(text, name.end()) if name.start() >= position and is_secret_name(name["key"]) else None
        if value is not None and value[value.lastgroup or 0].lower() not in _HARMLESS:
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
        elif equals and is_secret_name(key) and value.lower() not in _HARMLESS:
            clean.append(f"{key}={HIDDEN}")
        else:
            clean.append(redact_text(word))
    return clean
