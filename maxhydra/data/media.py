"""Images, video and audio: reading their bytes, and the preprocessing settings of a Hugging Face model folder.

The settings name a processor class. `media_types.json` holds the mechanism of each supported class and its defaults,
so the code below `data/images` and `data/audio` implements mechanisms, not model families.
"""

import base64
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from maxhydra.config import ConfigError, Problem
from maxhydra.config.errors import did_you_mean

# A path, a `data:` URL, the bytes of a file, or {bytes, path} as in a column of Hugging Face datasets.
Source = str | Path | bytes | Mapping[str, Any]
# Size limit of a file.
MAX_BYTES = 256 * 2**20
TABLE = Path(__file__).with_name("media_types.json")
# Files of a model folder that hold preprocessing settings.
PROCESSOR_FILE, IMAGE_FILE, VIDEO_FILE = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
T = TypeVar("T")


class MediaError(ValueError):
    """An image, video or audio file cannot be used: its name, the reason, and accepted values."""

    def __init__(self, name: str, reason: str, *, accepted: str = "") -> None:
        super().__init__(f"{name}: {reason}" + (f"; accepted: {accepted}" if accepted else ""))


def read_bytes(source: Source, *, name: str | None = None, max_bytes: int = MAX_BYTES) -> tuple[bytes, str]:
    """Return the bytes of a source and its name in error messages. URLs other than `data:` are never fetched."""
    accepted = "a path, a data: URL with base64, or the bytes of a file"
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path") or {}
    if not isinstance(source, (str, Path, bytes)) or not source:
        raise MediaError(name or "file", f"is empty or of type {type(source).__name__}", accepted=accepted)
    if isinstance(source, bytes):
        name, content = name or f"{len(source)} bytes", source
    elif isinstance(source, str) and source[:5].lower() == "data:":
        name = name or f"{source[:40]}..."
        content = _decode_data_url(source, name)
    elif isinstance(source, str) and "://" in source:
        raise MediaError(name or source[:200], "URLs are not fetched", accepted=accepted)
    else:
        name = name or str(source)[:200]
        try:
            path = Path(source).expanduser()
            if not path.is_file():
                raise MediaError(name, "no such file" if not path.exists() else "not a regular file", accepted=accepted)
            _check_size(path.stat().st_size, name, max_bytes)
            content = path.read_bytes()
        except (OSError, RuntimeError) as error:  # RuntimeError: the home folder of an unknown user
            raise MediaError(name, getattr(error, "strerror", None) or str(error), accepted=accepted) from None
    _check_size(len(content), name, max_bytes)
    return content, name


def _check_size(size: int, name: str, limit: int) -> None:
    if size > limit:
        raise MediaError(name, f"{size} bytes are more than the limit", accepted=f"up to {limit} bytes")


def _decode_data_url(url: str, name: str) -> bytes:
    head, comma, payload = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaError(name, "not a data URL with base64", accepted="data:TYPE;base64,DATA")
    try:
        return base64.b64decode(payload, validate=True)
    except ValueError as error:
        raise MediaError(name, f"not base64: {error}", accepted="data:TYPE;base64,DATA") from None


@dataclasses.dataclass(frozen=True)
class ProcessorFiles:
    """Settings of a model folder, one mapping per medium; an empty mapping if the model does not use it.

    Keys of the processor, such as the number of tokens of an image, are part of every mapping.
    """

    image: Mapping[str, Any]
    video: Mapping[str, Any]
    audio: Mapping[str, Any]


def read_processor_files(folder: Path) -> ProcessorFiles:
    """Read the preprocessing settings of a Hugging Face folder.

    Older folders describe image and audio in one file, newer ones nest all media in `processor_config.json`.
    """
    processor, own, video = (_read_json(folder / name) for name in (PROCESSOR_FILE, IMAGE_FILE, VIDEO_FILE))
    shared = {key: value for key, value in processor.items() if not isinstance(value, Mapping)}

    def settings_of(part: str, type_key: str, *files: Mapping[str, Any]) -> Mapping[str, Any]:
        nested = processor.get(part)
        parts = (shared, *files, nested if isinstance(nested, Mapping) else {})
        merged = {key: value for settings in parts for key, value in settings.items()}
        return merged if merged.get(type_key) else {}

    return ProcessorFiles(
        image=settings_of("image_processor", "image_processor_type", own),
        video=settings_of("video_processor", "video_processor_type", video),
        audio=settings_of("feature_extractor", "feature_extractor_type", own),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(str(path), f"not readable as JSON: {error}")) from None
    if not isinstance(content, dict):
        raise ConfigError(Problem(str(path), f"holds a {type(content).__name__}", accepted="a JSON object"))
    return content


@functools.cache
def _table() -> Mapping[str, Mapping[str, Any]]:
    return json.loads(TABLE.read_text())


def class_entry(section: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return mechanism and defaults of the class that `settings` names under the key `section`.

    Backends of one class share an entry: transformers marks them by a suffix. Settings without a class name their
    `mechanism` themselves.
    """
    entries = _table()[section]
    known = list(dict.fromkeys(entry["mechanism"] for entry in entries.values() if "mechanism" in entry))
    if known and settings.get(section) is None and (mechanism := settings.get("mechanism")) is not None:
        if mechanism not in known:
            raise ConfigError(Problem("mechanism", "unknown", value=mechanism, accepted=", ".join(known)))
        return {"mechanism": mechanism}
    name = str(settings.get(section)).removesuffix("Fast").removesuffix("Pil")
    if name not in entries:
        reason = "no such key" if settings.get(section) is None else "unsupported class"
        hint = did_you_mean(name, entries)
        raise ConfigError(Problem(section, reason, value=settings.get(section), accepted=", ".join(entries), hint=hint))
    return entries[name]


def setting(read: Callable[[Any], Any], default: Any = dataclasses.MISSING) -> Any:
    """Field of a settings dataclass; `read` converts a JSON value or raises ValueError with the accepted values."""
    return dataclasses.field(default=default, metadata={"read": read})


def parse_settings(
    kind: type[T],
    settings: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    required: Mapping[str, Any] | None = None,
    others: tuple[str, ...] = (),
) -> T:
    """Build a settings dataclass from a mapping of JSON values; null means the default.

    `required` are keys with their only supported value. `others` are sections of `keys_of` in the table, whose keys
    are ignored: media that the same file describes. The neutral ones name classes, or the array type of the output.
    """
    values = {**(defaults or {}), **{key: value for key, value in settings.items() if value is not None}}
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    ignored = {key for section in ("neutral", *others) for key in _table()["keys_of"][section]}
    problems, parsed = [], {}
    for key, value in values.items():
        if key in fields:
            try:
                parsed[key] = fields[key].metadata["read"](value)
            except ValueError as error:
                problems.append(Problem(key, "not valid", value=value, accepted=str(error)))
        elif required and key in required:
            if value != required[key]:
                problems.append(Problem(key, "not supported", value=value, accepted=json.dumps(required[key])))
        elif key not in ignored:
            hint = did_you_mean(key, fields)
            problems.append(Problem(key, "unknown setting", value=value, accepted=", ".join(sorted(fields)), hint=hint))
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]
    problems += [Problem(name, "missing", hint="add the key to the settings") for name in missing]
    if problems:
        raise ConfigError(problems)
    return kind(**parsed)


def boolean(value: Any) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def positive_int(value: Any) -> int:
    """Read a whole number from 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("a whole number from 1")
    return value


def number(value: Any) -> float:
    """Read a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError("a finite number")
    return value


def positive_number(value: Any) -> float:
    """Read a finite number above 0."""
    if number(value) <= 0:
        raise ValueError("a number above 0")
    return number(value)


def numbers(value: Any) -> tuple[float, ...]:
    """Read a list of numbers."""
    if not isinstance(value, (list, tuple)):
        raise ValueError("a list of numbers")
    return tuple(map(number, value))
