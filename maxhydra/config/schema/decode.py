"""How tokens are drawn, and how many sequences are decoded at once: for decode, serve and reinforcement learning."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.model import Model, Positions

# Numbers go to the device in float32, whose largest is 3.4e38.
LARGEST = 1e38


class CacheDtype(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"
    float8 = "float8"


@schema
class Sampling(Schema):
    """How the next token is drawn from the model's distribution."""

    max_tokens: int = option(256, ge=1)
    """Tokens to write at most."""
    temperature: float = option(0.0, ge=0, le=LARGEST)
    """Divides the logits; 0 takes the likeliest token."""
    top_k: int = option(0, ge=0)
    """Draw among so many likeliest tokens; 0: all."""
    top_p: float = option(1.0, gt=0, le=1)
    """Draw among the likeliest tokens whose probabilities reach this sum (Holtzman et al., 2020)."""
    min_p: float = option(0.0, ge=0, le=1)
    """Draw among tokens at least this share as likely as the likeliest."""
    repetition_penalty: float = option(1.0, gt=0, le=LARGEST)
    """Divides the logits of tokens seen before where positive, multiplies them where negative (Keskar et al., 2019)."""
    seed: int | None = option(None, ge=0)
    """Seed of the draw; the same seed gives the same tokens whatever else is decoded. null: by run.seed and the number
    of the prompt."""
    stop: list[str] = option([])
    """Texts that end the answer, and are not part of it."""
    ignore_eos: bool = False
    """Go on after the end token, to max_tokens."""


@schema
class Engine(Schema):
    """Sequences decoded together, and the memory they share."""

    max_batch: int = option(32, ge=1)
    """Sequences decoded at a time; others wait."""
    cache_tokens: int = option(32768, ge=1)
    """Tokens that all sequences together can keep; in whole pages."""
    page_size: int = option(16, ge=1)
    """Tokens in a page of the cache."""
    max_context: int | None = option(None, ge=2)
    """Longest prompt and answer together. null: model.context_length."""
    prefill_chunk: int = option(256, ge=1)
    """Prompt tokens taken in at a time, between two tokens of the other sequences."""
    burst: int | None = option(None, ge=1)
    """Tokens of each sequence that are decoded between two looks of the host, while no prompt waits: more are faster,
    and come out together. null: 8, and 1 on a CPU and with steady."""
    prefix_cache: bool | None = None
    """Keep the pages of finished prompts, for prompts that begin alike. null: unless the model has recurrent layers,
    whose state is of whole sequences and cannot be taken up in the middle."""
    cache_dtype: CacheDtype = CacheDtype.auto
    """Number format of cached keys and values; auto is that of the computation."""
    steady: bool = False
    """Take for every step the program of just its size, and wait for it, instead of one in hand that can do more: the
    same requests at once give the same tokens to the last bit, whatever was decoded before."""

    def check(self) -> Iterator[Problem]:
        if self.steady and self.burst is not None and self.burst > 1:
            reason = "depends on the time, which steady=true rules out"
            yield Problem("burst", reason, value=self.burst, accepted="1 or null")

    def check_model(self, model: Model) -> Iterator[Problem]:
        """What the engine asks of the model that it decodes."""
        if self.prefix_cache and model.is_recurrent:
            reason = "cannot be had of recurrent layers: their state is of a whole sequence, and no page holds it"
            yield Problem("engine.prefix_cache", reason, value=True, accepted="false or null")
        longest = model.context_length
        if model.embedding.positions is Positions.learned and (self.max_context or 0) > longest:
            reason = f"is over model.context_length={longest}, and the model has no vectors for later positions"
            yield Problem("engine.max_context", reason, value=self.max_context, accepted=f"2 to {longest}, or null")
