"""Decode the bytes of one record: arrays of task=tokenize, a JSON object, or a tf.train.Example."""

import json
from typing import Any

from maxhydra.data.array_codec import MAGIC, decode_arrays
from maxhydra.data.formats.tf_example import parse_example
from maxhydra.data.records import Record


def decode(payload: bytes) -> Record:
    """Decode a record by its first bytes; ValueError says why it cannot be decoded.

    No Example starts with `{` or with MAGIC, whose first bytes are not a field of it.
    """
    if payload[:4] == MAGIC:
        return dict(decode_arrays(payload))
    if payload[:1] == b"{":
        return decode_json(payload)
    return parse_example(payload)


def decode_json(payload: bytes) -> Record:
    """Decode a JSON object."""
    try:
        value: Any = json.loads(str(payload, "utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"is not valid UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON: {error.msg.removesuffix(' at')} at column {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("is not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value
