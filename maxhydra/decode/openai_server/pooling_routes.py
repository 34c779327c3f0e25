"""/v1/embeddings as OpenAI has it, and /v1/score as vLLM has it: similarity of two texts, or a reward model's score."""

import base64
import dataclasses
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from maxhydra.config.schema.decode import Pooling
from maxhydra.data.record_types import Rejected
from maxhydra.decode.openai_server.fields import bad_field, get_typed
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.openai_server.request_schema import (
    IGNORED,
    Prompt,
    ServerDefaults,
    check_model,
    encode_with,
    parse_object,
    parse_prompts,
)
from maxhydra.decode.request import RequestRejectedError
from maxhydra.decode.sampling_params import PromptEncoder

EMBEDDINGS, SCORE = "/v1/embeddings", "/v1/score"
EMBEDDING_FIELDS = ("model", "input", "encoding_format", "dimensions", *IGNORED)
SCORE_FIELDS = ("model", "text_1", "text_2", *IGNORED)
ENCODINGS = ("float", "base64")
# Texts of one request, as in OpenAI's API.
MAX_TEXTS = 2048


class PoolingEngine(Protocol):
    """The part of the engine that pools hidden states."""

    def pool(self, rows: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class PoolingRoutes:
    """Embeds and scores texts. Methods raise HttpError and may be called in any thread."""

    engine: PoolingEngine
    prompts: PromptEncoder
    defaults: ServerDefaults
    pooling: Pooling
    is_reward_model: bool = False
    """The model scores a completion of a prompt, and has no embeddings."""

    def respond(self, path: str, body: bytes) -> dict[str, Any]:
        """Return the response to a request."""
        given = {name: value for name, value in parse_object(body).items() if value is not None}
        fields = EMBEDDING_FIELDS if path == EMBEDDINGS else SCORE_FIELDS
        if unknown := next((name for name in given if name not in fields), None):
            reason = f"is an unknown field; accepted: {', '.join(fields)}"
            raise bad_field(unknown[:100], reason, code="unknown_parameter")
        check_model(given, dataclasses.replace(self.defaults, has_adapters=False))
        return self._embed(given) if path == EMBEDDINGS else self._score(given)

    def _embed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        encoding = given.get("encoding_format", "float")
        if encoding not in ENCODINGS:
            raise bad_field("encoding_format", f"is not one of {', '.join(ENCODINGS)}")
        texts = parse_prompts(given, self.defaults, field="input", most=MAX_TEXTS, limit=f"{MAX_TEXTS}")
        rows = [self._encode("input", text) for text in texts]
        vectors = self._pool(rows)
        if (size := given.get("dimensions", vectors.shape[1])) != vectors.shape[1]:
            accepted = f"{vectors.shape[1]}, the width of the model"
            raise bad_field("dimensions", f"is {size!r}; accepted: {accepted}", code="unsupported_parameter")
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, encoding)}
            for index, vector in enumerate(vectors)
        ]
        count = sum(map(len, rows))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return {"object": "list", "data": data, "model": self.defaults.model, "usage": usage}

    def _score(self, given: Mapping[str, Any]) -> dict[str, Any]:
        first, second = self._texts(given, "text_1"), self._texts(given, "text_2")
        if len(first) not in (1, len(second)):
            reason = f"has {len(first)} texts, and text_2 has {len(second)}; accepted: 1, or as many as text_2"
            raise bad_field("text_1", reason)
        first = first * len(second) if len(first) == 1 else first
        if self.is_reward_model:
            rows = [self._encode_pair(*pair) for pair in zip(first, second, strict=True)]
            scores = self._pool(rows)[:, 0]
        else:
            distinct = list(dict.fromkeys([*first, *second]))
            rows = [self._encode("text_1" if text in first else "text_2", text) for text in distinct]
            vectors = dict(zip(distinct, self._pool(rows), strict=True))
            scores = np.array([vectors[one] @ vectors[other] for one, other in zip(first, second, strict=True)])
        count = sum(map(len, rows))
        return {
            "id": f"score-{secrets.token_hex(16)}",
            "object": "list",
            "created": int(time.time()),
            "model": self.defaults.model,
            "data": [{"index": index, "object": "score", "score": float(each)} for index, each in enumerate(scores)],
            "usage": {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0},
        }

    def _texts(self, given: Mapping[str, Any], field: str) -> list[str]:
        value = given.get(field)
        texts = [value] if isinstance(value, str) else get_typed(given, field, list, [])
        if not 0 < len(texts) <= MAX_TEXTS or not all(isinstance(text, str) and text for text in texts):
            raise bad_field(field, f"must be a non-empty string, or a list of 1 to {MAX_TEXTS} of them")
        return texts

    def _encode(self, field: str, text: Prompt) -> list[int]:
        if not isinstance(text, str):
            return text
        limit = self.defaults.max_context
        return self._checked(field, encode_with(field, lambda: self.prompts.encode_text(text, max_tokens=limit)))

    def _encode_pair(self, prompt: str, completion: str) -> list[int]:
        """A prompt with its completion, as in the training of reward models: the end of the turn is the last token."""
        prompts, tokenizer = self.prompts, self.prompts.tokenizer
        if not prompts.has_template:
            end = [] if tokenizer.eos is None or not prompts.data.tokenizer.add_eos else [tokenizer.eos]
            ids = self._encode("text_1", prompt)
            return self._checked("text_2", [*ids, *tokenizer.encode(completion), *end])
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        limit = prompts.data.max_characters
        document = encode_with("text_2", lambda: prompts.template.encode(messages, known=1, max_characters=limit))
        if isinstance(document, Rejected):
            raise bad_field("text_2", f"is invalid: {document.reason}")
        assert document.weights is not None
        num_tokens = int(max(np.flatnonzero(document.weights), default=-1)) + 1
        return self._checked("text_2", document.tokens[:num_tokens].tolist())

    def _checked(self, field: str, ids: list[int]) -> list[int]:
        limit = self.defaults.max_context
        if not 0 < len(ids) <= limit:
            raise bad_field(field, f"has {len(ids)} tokens; accepted: 1 to task.engine.max_context={limit}")
        return ids

    def _pool(self, rows: list[list[int]]) -> np.ndarray:
        try:
            return self.engine.pool(rows, self.pooling)
        except RequestRejectedError as error:
            raise HttpError(503, str(error), code="engine_failed") from None


def _encoded(vector: np.ndarray, encoding: str) -> Any:
    """A vector as a list of numbers, or its little-endian float32 bytes in base64, which clients ask for by default."""
    return vector.tolist() if encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()
