"""What the bytes of one record hold: arrays of our own codec, a JSON object, or a tf.train.Example."""

import json
from typing import Any

from maxhydra.data.array_codec import MAGIC, decode_arrays
from maxhydra.data.formats.tf_example import parse_example
from maxhydra.data.records import Record


def decode(payload: bytes) -> Record:
    """The record that some bytes hold; ValueError says why there is none.

    The first bytes tell: no Example begins with `{` or with MAGIC, whose first letters are no field that it has.
    """
    if payload[:4] == MAGIC:
        return dict(decode_arrays(payload))
    if payload[:1] == b"{":
        return decode_json(payload)
    return parse_example(payload)


def decode_json(payload: bytes) -> Record:
    """The object of a JSON text."""
    try:
        value: Any = json.loads(str(payload, "utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"bad JSON: {error.msg.removesuffix(' at')} at column {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("bad JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {type(value).__name__}")
    return value
