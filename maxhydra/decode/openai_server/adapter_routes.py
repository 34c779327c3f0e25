"""Adapters in the HTTP API: their cards in the list of models, and the requests that load and unload them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from maxhydra.config import ConfigError
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.request_schema import bad_field, parse_object
from maxhydra.decode.request import AdapterError, LoadedAdapter, RequestRejectedError

# Paths, fields and status codes are those of vLLM.
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
NAME, LOCATION = "lora_name", "lora_path"
MAX_NAME = 256


class AdapterEngine(Protocol):
    """The part of the engine that holds adapters."""

    @property
    def adapters(self) -> Mapping[str, LoadedAdapter]: ...

    def load_adapter(self, name: str, location: str, weights: Any) -> None: ...

    def unload_adapter(self, name: str) -> None: ...


class AdapterRoutes:
    """Loads and unloads the adapters of an engine. Methods raise HttpError and may be called in any thread."""

    def __init__(self, engine: AdapterEngine, read: Callable[[str], Any], *, model: str, is_live: bool):
        """`read`: weights of a location; ConfigError if they do not fit. `model`: name of the model without adapters.
        `is_live`: whether clients may load and unload adapters."""
        self._engine, self._read, self._model, self.is_live = engine, read, model, is_live

    @property
    def models(self) -> list[str]:
        """Names of the model and of its adapters."""
        return [self._model, *self._engine.adapters]

    def cards(self, card: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """By name, the cards of the loaded adapters, with the fields of `card`."""
        return {
            name: {"id": name, **card, "root": adapter.location, "parent": self._model}
            for name, adapter in self._engine.adapters.items()
        }

    def load(self, body: bytes) -> str:
        """Load the adapter that a body names, and return a message."""
        name, location = self._parse(body, (NAME, LOCATION))
        if name == self._model or len(name) > MAX_NAME:
            raise bad_field(NAME, f"is the name of the model, or has more than {MAX_NAME} characters")
        try:
            self._engine.load_adapter(name, location, self._read(location))
        except ConfigError as error:
            problem = error.problems[0]
            raise bad_field(LOCATION, f"{location[:200]!r} {problem.reason}. {problem.hint}".rstrip(". ")) from None
        except AdapterError as error:
            raise HttpError(400, str(error), param=NAME, code="adapter_not_loaded") from None
        except RequestRejectedError as error:
            raise HttpError(503, str(error), code="engine_failed") from None
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, body: bytes) -> str:
        """Unload the adapter that a body names, and return a message."""
        (name,) = self._parse(body, (NAME,))
        try:
            self._engine.unload_adapter(name)
        except RequestRejectedError:
            raise unknown_model(name, self.models) from None
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _parse(self, body: bytes, fields: tuple[str, ...]) -> list[str]:
        values = parse_object(body)
        # vLLM's clients also send lora_int_id when they unload.
        if unknown := sorted(set(values) - {NAME, LOCATION, "lora_int_id"}):
            raise bad_field(unknown[0][:100], f"is an unknown field; accepted: {', '.join(fields)}")
        for field in fields:
            if not isinstance(values.get(field), str) or not values[field]:
                raise bad_field(field, "must be a non-empty string")
        return [values[field] for field in fields]


def unknown_model(name: str, models: Iterable[str]) -> HttpError:
    """The error for a model that is none of the available ones."""
    reason = f"model {name[:100]!r} is not available; accepted: {', '.join(map(repr, models))}"
    return HttpError(404, reason, param="model", code="model_not_found")
