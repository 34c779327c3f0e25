"""Settings that weights were trained with, and that the model config must share for them to mean anything."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config import model as config
from maxhydra.layers import AttentionSpec, MlpSpec

SIZES = ("num_layers", "emb_dim", "vocab_size", "norm_eps")
# Rounded through float32 in some files.
TOLERANCE = 1e-5
# Base of rotary wavelengths where files do not state one (Su et al., 2021).
THETA = 10000.0


def derived(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Stated facts, and those that follow from them: heads share keys unless said otherwise, and fill the stream."""
    known = {name: value for name, value in facts.items() if value is not None or name == "window"}
    known.setdefault("num_kv_heads", known.get("num_heads"))
    if "head_dim" not in known and known.get("num_heads"):
        known["head_dim"] = known["emb_dim"] // known["num_heads"]
    return known


def require_same(facts: Mapping[str, Any], model: config.Model, *, location: str) -> None:
    """Refuse a model that differs from what the files state, naming every setting that does."""
    if problems := list(_differences(facts, model, location)):
        raise ConfigError(problems)


def stated(model: config.Model) -> dict[str, Any] | None:
    """What files would state of a model, by name; None where its layers differ in it, or where no table has words for
    it."""
    facts: dict[str, Any] = {name: getattr(model, name) for name in SIZES}
    if model.logit_softcap is not None:
        return None
    for kind in (model.kinds[name] for name in dict.fromkeys((*model.prefix, *model.pattern))):
        own = dict(_of_kind(model, kind, "").values())
        is_plain = kind.attention.softcap is None and kind.attention.scale is None
        if not is_plain or own["frequencies"] is None or any(facts.get(name, own[name]) != own[name] for name in own):
            return None
        facts |= own
    return facts


def _differences(facts: Mapping[str, Any], model: config.Model, location: str) -> Iterator[Problem]:
    ours: dict[str, Any] = {f"model.{name}": (name, getattr(model, name)) for name in SIZES}
    ours["model.head"] = ("head", model.head.value)
    for name in dict.fromkeys((*model.prefix, *model.pattern)):
        ours |= _of_kind(model, model.kinds[name], f"model.kinds.{name}")
    for path, (name, value) in ours.items():
        if name not in facts or _is_same(facts[name], value):
            continue
        if name == "frequencies":
            theta = 0.0 if value is None else value[1] ** (-len(value))
            yield Problem(path, f"turns positions at other speeds than {location} was trained with", value=_rope(theta))
        else:
            yield Problem(path, f"differs from {location}", value=value, accepted=_shown(facts[name]))


def _of_kind(model: config.Model, kind: config.Kind, where: str) -> dict[str, tuple[str, Any]]:
    """Config path -> name of the fact, our value; a size stands at the model's top unless the kind has one."""
    attention, mlp = AttentionSpec.of(model, kind), MlpSpec.of(model, kind)
    found: dict[str, tuple[str, Any]] = {}
    for name in ("num_heads", "num_kv_heads", "head_dim"):
        own = getattr(kind.attention, name) is not None
        found[f"{where}.attention.{name}" if own else f"model.{name}"] = (name, getattr(attention, name))
    found["model.mlp_dim" if kind.mlp.dim is None else f"{where}.mlp.dim"] = ("mlp_dim", mlp.dim)
    found[f"{where}.mlp.activation"] = ("activation", mlp.activation.value)
    found[f"{where}.attention.window"] = ("window", attention.window)
    found[f"{where}.attention.rope"] = ("frequencies", attention.rotation and attention.rotation.frequencies)
    return found


def _is_same(theirs: Any, ours: Any) -> bool:
    if isinstance(theirs, (float, tuple)) and ours is not None:
        return np.shape(theirs) == np.shape(ours) and bool(np.allclose(theirs, ours, rtol=TOLERANCE, atol=0))
    return bool(theirs == ours)


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _rope(theta: float) -> str:
    return f"theta {theta:g}"
