"""Random JSON schemas: nested objects and arrays, enums, references, optional properties; every value is short."""

import random
from typing import Any

NAMES = ("name", "age", "tags", "city", "id", "kind", "größe", "a b", 'quo"te', "x")


def random_schema(seed: int, *, depth: int = 3) -> dict[str, Any]:
    """Return a schema of an object, with definitions that its parts may refer to."""
    rng = random.Random(seed)
    definitions = {f"part{number}": _schema(rng, 1, ()) for number in range(rng.randint(0, 2))}
    schema = _object(rng, depth, tuple(definitions))
    return {**schema, "$defs": definitions} if definitions else schema


def _schema(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    kinds = [_text, _integer, _enum, _constant, _scalar, _pattern]
    if depth > 0:
        kinds += [_object, _object, _array, _any_of]
    if names and rng.random() < 0.2:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    return rng.choice(kinds)(rng, depth, names)


def _object(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    keys = rng.sample(NAMES, rng.randint(0, 4))
    required = [key for key in keys if rng.random() < 0.6]
    properties = {key: _schema(rng, depth - 1, names) for key in keys}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _schema(rng, depth - 1, names), "minItems": low, "maxItems": low + 2}


def _any_of(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1, names) for _ in range(rng.randint(1, 3))]}


def _text(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + 4}


def _pattern(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(("^[a-f]{2,4}$", "^(ab|c)+d?$", "^\\d{4}-\\d\\d$"))}


def _integer(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    low = rng.randint(-100, 100)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}


def _enum(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "blue", 1, 2.5, None, True, "ü", "a\nb"], rng.randint(1, 4))}


def _constant(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {"const": rng.choice(["fixed", 0, False])}


def _scalar(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {"type": rng.choice((["boolean", "null"], "boolean", "null"))}
