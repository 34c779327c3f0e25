"""Sampling parameters and engine sizes, shared by task=decode, task=serve and task=grpo."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.model import Mixer, Model, Positions

# Sampling parameters are sent to the device as float32, whose maximum is 3.4e38.
LARGEST = 1e38


class CacheDtype(Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    int8 = "int8"
    float8 = "float8"


class Pooling(Enum):
    last = "last"
    mean = "mean"


class SpeculationMethod(Enum):
    ngram = "ngram"
    mtp = "mtp"
    model = "model"


# Settings that a method of drafting uses.
USED = {
    SpeculationMethod.ngram: ("tokens", "max_ngram", "min_ngram"),
    SpeculationMethod.mtp: ("tokens",),
    SpeculationMethod.model: ("tokens", "weights", "model", "overrides"),
}


@schema
class Sampling(Schema):
    """Sampling parameters: how the next token is chosen from the model's distribution."""

    max_tokens: int = option(256, ge=1)
    """Maximum number of tokens to generate."""
    temperature: float = option(0.0, ge=0, le=LARGEST)
    """Divides the logits; 0 is greedy decoding."""
    top_k: int = option(0, ge=0)
    """Sample only from the k most likely tokens; 0: no limit."""
    top_p: float = option(1.0, gt=0, le=1)
    """Nucleus sampling: only the most likely tokens whose probabilities sum to this (Holtzman et al., 2020)."""
    min_p: float = option(0.0, ge=0, le=1)
    """Sample only tokens whose probability is at least this fraction of the most likely token's."""
    repetition_penalty: float = option(1.0, gt=0, le=LARGEST)
    """Penalty on tokens of the prompt and the completion so far: positive logits are divided by it, negative ones
    multiplied (Keskar et al., 2019)."""
    frequency_penalty: float = option(0.0, ge=-2, le=2)
    """Subtracted from the logit of a token for each of its occurrences in the completion so far."""
    presence_penalty: float = option(0.0, ge=-2, le=2)
    """Subtracted from the logits of all tokens of the completion so far."""
    seed: int | None = option(None, ge=0)
    """Sampling seed; a seed gives the same tokens whatever else is in the batch. null: derived from run.seed and the
    index of the prompt."""
    stop: list[str] = option([])
    """Stop strings: generation ends at the first one, which is not part of the output."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token, up to max_tokens."""


@schema
class Speculation(Schema):
    """Speculative decoding: drafted tokens are verified together in one forward pass, so that a decode step generates
    several tokens, where enough of them are accepted to pay for it. Completions are those of plain decoding."""

    method: SpeculationMethod | None = None
    """How tokens are drafted. ngram: the tokens that followed an earlier occurrence of the last tokens in the prompt or
    the completion (prompt lookup decoding, Saxena, 2023). mtp: those that the model's first multi-token prediction
    layer predicts (model.mtp.depth of 1 or more). model: those that a smaller model predicts (Leviathan et al., 2023).
    null: no speculative decoding."""
    tokens: int = option(4, ge=1, le=64)
    """Maximum number of tokens that are drafted per decode step and sequence."""
    max_ngram: int = option(3, ge=1, le=16)
    """Maximum number of last tokens to look up. The longest n-gram that occurs before is used, and of its occurrences
    the latest one."""
    min_ngram: int = option(2, ge=1, le=16)
    """Minimum number of last tokens to look up; without an occurrence nothing is drafted."""
    weights: str | None = None
    """Weights of the draft model, as for checkpoint.load_parameters. Its tokenizer must be that of the model."""
    model: str | None = None
    """Model option of the draft model. null: the model of the run or Hugging Face folder in weights."""
    overrides: list[str] = option([])
    """Overrides of this option, quoted, such as ["model.num_layers=2"]."""

    def check(self) -> Iterator[Problem]:
        if self.min_ngram > self.max_ngram:
            reason = f"exceeds max_ngram={self.max_ngram}"
            yield Problem("min_ngram", reason, value=self.min_ngram, accepted=f"1 to {self.max_ngram}")
        used = () if self.method is None else USED[self.method]
        for field in fields(self):
            value, methods = getattr(self, field.name), [m.value for m in USED if field.name in USED[m]]
            default = field.default if field.default_factory is MISSING else field.default_factory()
            if methods and field.name not in used and value != default:
                reason = f"has no effect with method={self.method.value if self.method else 'null'}"
                yield Problem(field.name, reason, value=value, hint=f"set method={' or '.join(methods)}")
        if self.method is SpeculationMethod.model and self.weights is None:
            accepted = "a run, a Hugging Face folder or hub id, or a GGUF file"
            yield Problem("weights", "is required with method=model", value=None, accepted=accepted)
        for override in self.overrides:
            if self.model is None or override.lstrip("+").partition(".")[0] != "model":
                reason = f"{override!r} is not a key of a model option that is set"
                yield Problem("overrides", reason, value=self.overrides, accepted="keys of model, if model is set")


@schema
class Engine(Schema):
    """Batch size, KV cache and compilation settings of the decode engine."""

    max_batch: int = option(32, ge=1)
    """Maximum number of sequences decoded together, rounded up to a multiple of the groups of devices that share a
    batch; further ones wait in a queue."""
    cache_tokens: int = option(32768, ge=1)
    """Capacity of the KV cache in tokens over all sequences and devices, rounded up to whole pages. Each group of
    devices that share a batch (mesh.data x mesh.fsdp x mesh.expert groups) holds an equal part, but at least one
    sequence of max_context tokens, up to cache_tokens."""
    page_size: int = option(16, ge=1)
    """Tokens per page of the KV cache."""
    max_context: int | None = option(None, ge=2)
    """Maximum length of prompt plus completion. null: model.context_length."""
    prefill_chunk: int | None = option(None, ge=1)
    """Maximum number of prompt tokens per prefill call and group of devices; decode steps of other sequences run
    between the chunks. null: 1024, or 256 on a CPU."""
    burst: int | None = option(None, ge=1)
    """Multi-step decoding: decode steps per call. More steps need less host time, but their tokens arrive together, and
    a new prompt waits for them. null: 8, or 1 on a CPU."""
    warm_up: bool | None = None
    """Compile a program for every batch before the first request, so that nothing is compiled afterwards. null: on for
    task=serve on an accelerator."""
    prefix_cache: bool | None = None
    """Reuse KV cache pages between prompts with a common prefix. null: on, unless the model has recurrent layers, whose
    state belongs to a whole sequence and cannot be resumed at a page boundary."""
    cache_dtype: CacheDtype = CacheDtype.auto
    """Data type of the KV cache; auto: model.dtypes.compute."""
    deterministic: bool = False
    """Always wait for the exact-size compiled step instead of reusing a larger one, so that identical requests
    submitted together give bit-identical tokens whatever was decoded before."""

    prefill_devices: int | None = option(None, ge=1)
    """Devices that only prefill prompts, with their own copy of the weights and their own KV cache of cache_tokens
    tokens; the others only decode, and long prompts do not delay them. The section mesh describes each of the two
    groups. null: every device does both."""
    speculation: Speculation = section(Speculation)

    def check(self) -> Iterator[Problem]:
        if self.deterministic and self.warm_up:
            reason = "chooses among compiled programs, while deterministic=true always uses the exact-size one"
            yield Problem("warm_up", reason, value=True, accepted="false or null")
        if self.deterministic and self.prefill_devices is not None:
            reason = "makes the batches depend on timing, which deterministic=true rules out"
            yield Problem("prefill_devices", reason, value=self.prefill_devices, accepted="null")

    def check_one_group(self) -> Iterator[Problem]:
        """Yield settings that tasks other than decode and serve do not support."""
        if self.prefill_devices is not None:
            reason = "is only supported by task=decode and task=serve"
            yield Problem("engine.prefill_devices", reason, value=self.prefill_devices, accepted="null")

    def check_model(self, model: Model) -> Iterator[Problem]:
        """Yield settings that this model does not support."""
        if self.prefix_cache and model.is_recurrent:
            reason = "is not supported with recurrent layers, whose state covers a whole sequence and is not paged"
            yield Problem("engine.prefix_cache", reason, value=True, accepted="false or null")
        method = self.speculation.method
        if method is not None and model.is_recurrent:
            reason = "is not supported with recurrent layers, whose state cannot be reset to before a rejected token"
            yield Problem("engine.speculation.method", reason, value=method.value, accepted="null")
        if method is not None and model.diffusion.block_size is not None:
            reason = "is not supported with model.diffusion.block_size, which decodes blocks of tokens"
            yield Problem("engine.speculation.method", reason, value=method.value, accepted="null")
        is_autoregressive = not model.is_recurrent and model.diffusion.block_size is None
        if method is SpeculationMethod.mtp and is_autoregressive and not model.mtp.depth:
            reason = "drafts with a multi-token prediction layer, and the model has none (model.mtp.depth=0)"
            hint = "set model.mtp.depth=1 if the weights have such a layer"
            yield Problem("engine.speculation.method", reason, value="mtp", accepted="ngram, null", hint=hint)
        used = [model.kinds[name] for name in {*model.prefix, *model.pattern} if name in model.kinds]
        rates = {kind.compressed.rate or 1 for kind in used if kind.mixer is Mixer.compressed}
        for rate in sorted(rate for rate in rates if self.page_size % rate):
            reason = f"is not a multiple of compressed.rate={rate}, so that entries would be split between pages"
            yield Problem("engine.page_size", reason, value=self.page_size, accepted=f"a multiple of {rate}")
        longest = model.context_length
        if model.embedding.positions is Positions.learned and (self.max_context or 0) > longest:
            reason = f"exceeds model.context_length={longest}, and learned position embeddings end there"
            yield Problem("engine.max_context", reason, value=self.max_context, accepted=f"2 to {longest}, or null")
