"""/tokenize and /detokenize, as vLLM has them."""

from typing import Any

from maxhydra.config import ConfigError
from maxhydra.decode.openai_server.fields import bad_field
from maxhydra.decode.openai_server.messages import parse_audios, parse_images, parse_messages, parse_tools
from maxhydra.decode.openai_server.request_schema import ServerDefaults, parse_object
from maxhydra.decode.sampling_params import PromptEncoder, PromptError


def tokenize(body: bytes, prompts: PromptEncoder, defaults: ServerDefaults) -> dict[str, Any]:
    """Return the token ids of a prompt or of messages, as a completion would get them."""
    given = parse_object(body)
    try:
        if "messages" in given:
            ids = prompts.encode_messages(parse_messages(given), tools=parse_tools(given))
            ids = prompts.insert_media(ids, images=parse_images(given), audios=parse_audios(given)).prompt
        elif isinstance(given.get("prompt"), str):
            ids = prompts.encode_text(given["prompt"])
        else:
            raise bad_field("prompt", "must be a string; or send messages")
    except PromptError as error:
        raise bad_field("messages" if "messages" in given else "prompt", f"is invalid: {error}") from None
    except ConfigError as error:
        raise bad_field("messages", f"is invalid: {error.problems[0]}") from None
    return {"tokens": ids, "count": len(ids), "max_model_len": defaults.max_context}


def detokenize(body: bytes, prompts: PromptEncoder, defaults: ServerDefaults) -> dict[str, Any]:
    """Return the text of token ids, with the names of special tokens."""
    tokens, limit = parse_object(body).get("tokens"), defaults.vocab_size
    if not isinstance(tokens, list) or not all(type(id) is int and 0 <= id < limit for id in tokens):
        raise bad_field("tokens", f"must be a list of token ids from 0 to {limit - 1}")
    return {"prompt": prompts.text_with_names(tokens)}
