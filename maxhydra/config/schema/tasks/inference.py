"""Fields of the tasks that run a model: task=decode, serve, score and convert."""

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

from maxhydra.config.declare import MAX_WIDTH, Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.decode import Engine, Pooling, Sampling, SpeculationMethod
from maxhydra.config.schema.model import Dtype, Head, Mixer, Model
from maxhydra.config.schema.run import Progress, Task
from maxhydra.config.values import HUB_NAME, regex_problems


class Chat(Enum):
    auto = "auto"
    on = "on"
    off = "off"


@schema
class SpeechOutput(Schema):
    """Speech of the completions of task.prompt, for models with model.speech."""

    folder: str | None = None
    """Folder for a WAV file of each completion, 0.wav, 1.wav and so on; files of that name are replaced. null: text
    only."""
    speaker: str | None = None
    """Voice, one of model.speech.talker.speakers. null: the first of them."""
    temperature: float = option(0.9, ge=0)
    """Sampling temperature of the talker. 0: the most likely codes, also of the code predictor."""
    top_k: int = option(50, ge=0)
    """Sample from the k most likely codes of the talker; 0: from all."""
    top_p: float = option(1.0, gt=0, le=1)
    """Sample from the most likely codes of the talker whose probabilities add up to this."""
    repetition_penalty: float = option(1.05, gt=0)
    """Divide positive logits of codes that the talker sampled before, and multiply negative ones."""
    max_frames: int = option(4096, ge=1)
    """Maximum number of frames; fewer if the context of the talker ends before."""


@schema
class DecodeTask(Task):
    """Generates completions for one prompt or a file of prompts; without either, a chat at the terminal."""

    prompt: str | None = None
    """Prompt to complete; with a chat template, the user message to reply to."""
    images: list[str] = option([])
    """Files of images before the text of task.prompt, for models with model.vision."""
    videos: list[str] = option([])
    """Videos after the images of task.prompt, for models with model.vision.video_id: animations (GIF, WebP, PNG),
    folders of images, .npy files of frames, and with PyAV MP4, MOV, MKV and WebM."""
    audios: list[str] = option([])
    """WAV and FLAC files before the text of task.prompt, for models with model.audio."""
    input: str | None = None
    """JSON Lines file of prompts; each record has `prompt` or `messages`, and optionally `id` and `sampling` (overrides
    of task.sampling for this record)."""
    output: str | None = None
    """JSON Lines file to which completions of task.input are appended as they finish; the same command resumes."""
    samples: int = option(1, ge=1)
    """Completions per prompt, each with a different seed."""
    chat: Chat = Chat.auto
    """on: a prompt is a user message, formatted with the tokenizer's chat template; off: a prompt is plain text; auto:
    on if the tokenizer has a template."""
    system: str | None = None
    """System message of a chat. null: none."""
    logprobs: int | None = option(None, ge=0, le=20)
    """task.output: write each token's log-probability and those of the n most likely tokens. null: write neither."""
    progress: Progress = Progress.auto
    """task.input: bar, lines or none; auto: a bar on a terminal, otherwise lines."""
    denoise_steps: int | None = option(None, ge=1)
    """model.diffusion: denoising steps per block, at most model.diffusion.block_size. Each step unmasks the tokens of
    the highest probability. null: one token per step."""
    speech: SpeechOutput = section(SpeechOutput)
    sampling: Sampling = section(Sampling)
    engine: Engine = section(Engine)

    @property
    def visual_media(self) -> list[Any]:
        """Images and videos of task.prompt in order."""
        return [*self.images, *({"video": path} for path in self.videos)]

    def check(self) -> Iterator[Problem]:
        if self.prompt is not None and self.input is not None:
            reason = "cannot be combined with task.input"
            yield Problem("prompt", reason, value=self.prompt, hint="remove one of the two")
        for name, files in {"images": self.images, "videos": self.videos, "audios": self.audios}.items():
            if files and (self.prompt is None or self.chat is Chat.off):
                hint = "set task.prompt, and leave task.chat=auto"
                yield Problem(name, "requires a prompt that is a message of a chat", value=files, hint=hint)
        if (self.input is None) != (self.output is None):
            given, absent = ("input", "output") if self.output is None else ("output", "input")
            reason = f"is required with task.{given}={getattr(self, given)}"
            yield Problem(absent, reason, value=None, accepted="a JSON Lines file")
        if self.logprobs is not None and self.output is None:
            reason = "is only written to task.output, which is not set"
            yield Problem("logprobs", reason, value=self.logprobs, accepted="null")
        if self.samples > 1 and self.prompt is None and self.input is None:
            reason = "is not supported in a terminal chat"
            yield Problem("samples", reason, value=self.samples, accepted="1", hint="set task.prompt or task.input")
        if self.speech.folder is not None and (self.prompt is None or self.chat is Chat.off):
            hint = "set task.prompt, and leave task.chat=auto"
            reason = "requires a prompt that is a message of a chat"
            yield Problem("speech.folder", reason, value=self.speech.folder, hint=hint)
        if self.speech.folder == "":
            yield Problem("speech.folder", "is empty", value="", accepted="a folder, or null")
        if self.system is not None and self.chat is Chat.off:
            yield Problem("system", "has no effect with chat=off", value=self.system, accepted="null")
        if self.prompt == "":
            yield Problem("prompt", "is empty", value="", accepted="at least one character")
        if "" in self.sampling.stop:
            yield Problem("sampling.stop", "contains an empty string", value=self.sampling.stop)

    def _check_speech(self, model: Model) -> Iterator[Problem]:
        speakers, speaker = model.speech.talker.speakers, self.speech.speaker
        if self.speech.folder is None:
            return
        if model.speech.codebooks is None:
            reason, hint = "requires a model that speaks (model.speech)", "choose model=from_hf_speech"
            yield Problem("speech.folder", reason, value=self.speech.folder, accepted="null", hint=hint)
            return
        if model.diffusion.block_size is not None:
            size, reason = model.diffusion.block_size, "is not supported with model.diffusion.block_size"
            yield Problem("speech.folder", f"{reason}={size}", value=self.speech.folder, accepted="null")
        if self.sampling.stop:
            reason = "is not supported with task.speech.folder, which speaks all tokens of a completion"
            yield Problem("sampling.stop", reason, value=self.sampling.stop, accepted="[]")
        if not speakers:
            reason = "needs a voice, and model.speech.talker.speakers={} has none"
            hint = "set model.speech.talker.speakers={NAME: CODE}"
            yield Problem("speech.folder", reason, value=self.speech.folder, accepted="null", hint=hint)
        elif speaker not in (None, *speakers):
            reason = "is not one of model.speech.talker.speakers"
            yield Problem("speech.speaker", reason, value=speaker, accepted=", ".join(speakers))

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
        yield from self._check_speech(model)
        size = model.diffusion.block_size
        if self.denoise_steps is not None and (size is None or self.denoise_steps > size):
            reason = (
                "needs model.diffusion.block_size" if size is None else f"exceeds model.diffusion.block_size={size}"
            )
            accepted = "null" if size is None else f"1 to {size}, or null"
            yield Problem("denoise_steps", reason, value=self.denoise_steps, accepted=accepted)
        if size is not None and self.logprobs is not None:
            reason = "is not supported with model.diffusion.block_size"
            yield Problem("logprobs", reason, value=self.logprobs, accepted="null")


LORA_DEFAULTS: dict[str, Any] = {"slots": 8, "max_rank": 16, "targets": ["attention/", "mlp/"]}


@schema
class LoraSlots(Schema):
    """Room for LoRA adapters that requests name: their matrices are stacked, and decoded together in one batch."""

    slots: int = option(LORA_DEFAULTS["slots"], ge=1, le=4096)
    """Maximum number of adapters that are loaded at the same time."""
    max_rank: int = option(LORA_DEFAULTS["max_rank"], ge=1, le=MAX_WIDTH)
    """Maximum rank of an adapter; adapters of a lower rank are padded to it."""
    targets: list[str] = option(LORA_DEFAULTS["targets"])
    """Projections that adapters may change, as for adapter.targets."""
    live: bool = False
    """Accept POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with which clients load adapters from any folder
    that the server can read."""

    def check(self) -> Iterator[Problem]:
        yield from regex_problems("targets", self.targets)


@schema
class ServeTask(Task):
    """Serves a model over an OpenAI-compatible HTTP API."""

    host: str = "127.0.0.1"
    """Address to listen on; 127.0.0.1 accepts only local clients, 0.0.0.0 listens on all interfaces."""
    port: int = option(8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    model_name: str | None = None
    """Model name that clients use. null: the chosen option of the config group model."""
    api_key_env: str | None = None
    """Environment variable with the API key that requests must send. null: no key is required."""
    queue: int = option(256, ge=0)
    """Sequences that may wait in addition to the task.engine.max_batch running ones; beyond that, requests get status
    429."""
    max_samples: int = option(16, ge=1)
    """Maximum number of sequences per request: n times the number of prompts."""
    max_body_mib: float = option(4.0, gt=0)
    """Maximum size of a request body, in MiB."""
    max_connections: int = option(1024, ge=1)
    """Maximum number of open connections."""
    timeout: float = option(30.0, gt=0)
    """Seconds that a client may take to send a request or to read a response."""
    http_processes: int | None = option(None, ge=0, le=64)
    """Processes of the HTTP server, which parse and tokenize requests, detokenize and send responses; 0: it runs in the
    engine's process. null: on an accelerator one for every 4 cores, at most 2; otherwise 0."""
    keep_alive: float = option(75.0, gt=0)
    """Seconds that an idle connection stays open between requests."""
    drain: float = option(10.0, ge=0)
    """Seconds that running requests may take to finish after SIGTERM, SIGUSR1, SIGHUP or Ctrl-C; then they are
    cancelled."""
    adapters: dict[str, str] = option({})
    """LoRA adapters by name, each a PEFT folder or a run: a request whose `model` is the name uses the adapter."""
    lora: LoraSlots = section(LoraSlots)
    pooling: Pooling = Pooling.last
    """Embedding of a text: the hidden state of its last token, or the mean over its tokens; normalized to length 1."""
    sampling: Sampling = section(Sampling)
    engine: Engine = section(Engine)

    @property
    def has_adapters(self) -> bool:
        """Whether requests may name adapters."""
        return bool(self.adapters) or self.lora.live

    def check(self) -> Iterator[Problem]:
        if "" in self.sampling.stop:
            yield Problem("sampling.stop", "contains an empty string", value=self.sampling.stop)
        if len(self.adapters) > self.lora.slots:
            reason = f"has {len(self.adapters)} adapters, more than lora.slots={self.lora.slots}"
            yield Problem("adapters", reason, value=list(self.adapters), hint="raise task.lora.slots")
        if self.model_name in self.adapters:
            yield Problem("adapters", "has the name of the model", value=self.model_name)
        for name, default in LORA_DEFAULTS.items():
            value = getattr(self.lora, name)
            if not self.has_adapters and value != default:
                hint = "set task.adapters, or task.lora.live=true to load them later"
                yield Problem(f"lora.{name}", "has no effect without adapters", value=value, hint=hint)
        if self.max_samples > self.engine.max_batch + self.queue:
            reason = f"exceeds engine.max_batch + queue = {self.engine.max_batch + self.queue}, so it can never fit"
            yield Problem("max_samples", reason, value=self.max_samples)

    def check_model(self, model: Model) -> Iterator[Problem]:
        yield from self.engine.check_model(model)
        kinds = [model.kinds[name] for name in {*model.prefix, *model.pattern}]
        if model.head is Head.score:
            reason = "is not used with model.head=score: a reward model only scores completions, at their last token"
            unused: dict[str, tuple[Any, tuple[Any, ...], str]] = {
                "engine.warm_up": (self.engine.warm_up, (None, False), "false or null"),
                "engine.speculation.method": (self.engine.speculation.method, (None,), "null"),
                "pooling": (self.pooling, (Pooling.last,), "last"),
                "adapters": (list(self.adapters), ([],), "{}"),
                "lora.live": (self.lora.live, (False,), "false"),
            }
            for path, (value, neutral, accepted) in unused.items():
                if value not in neutral:
                    yield Problem(path, reason, value=value, accepted=accepted)
        if self.has_adapters and any(kind.mixer in (Mixer.compressed, Mixer.mla) for kind in kinds):
            reason = "are not supported with mixer=mla or compressed, which multiply their matrices in another order"
            hint = "merge the adapter: task=convert checkpoint.load_parameters=ADAPTER"
            yield Problem("adapters", reason, value=list(self.adapters), accepted="{}", hint=hint)
        if self.has_adapters and self.engine.speculation.method is SpeculationMethod.mtp:
            reason = "is not supported with adapters, which have no multi-token prediction layer"
            yield Problem("engine.speculation.method", reason, value="mtp", accepted="ngram, null")


LINES, ARRAYS = ".jsonl", ".npz"


@schema
class ScoreTask(Task):
    """Computes log-probabilities of given tokens under the model in checkpoint.load_parameters."""

    input: str = option()
    """Sequences: .jsonl with `text` or `ids` per line, or .npz with `ids` [B, T] and, for padded rows, `mask` [B, T]
    (1: token, 0: padding, on either side)."""
    output: str = option()
    """Output file, .jsonl or .npz, created when it is complete: `logprobs` of every token after the first and
    `perplexity` of every sequence, and `bpb` (bits per byte) of every text; .npz also has `ids` and `mask`, and NaN
    for positions without a prediction."""
    logits: bool = False
    """Also write the logits at every position, float32 [B, T, V]; .npz only."""
    batch: int = option(8, ge=1)
    """Sequences per batch; sequences of similar length are batched together."""

    def check(self) -> Iterator[Problem]:
        for name in ("input", "output"):
            value = getattr(self, name)
            if not value.endswith((LINES, ARRAYS)):
                yield Problem(
                    name,
                    "has an unsupported extension",
                    value=value,
                    accepted=f"a path that ends in {LINES} or {ARRAYS}",
                )
        if self.logits and not self.output.endswith(ARRAYS):
            yield Problem(
                "logits",
                f"requires an output file that ends in {ARRAYS}",
                value=True,
                hint=f"set task.output=NAME{ARRAYS}",
            )


class ConvertFormat(Enum):
    hf = "hf"
    hf_fp8 = "hf_fp8"
    hf_int8 = "hf_int8"
    peft = "peft"
    maxhydra = "maxhydra"
    gguf_f16 = "gguf_f16"
    gguf_q8_0 = "gguf_q8_0"
    gguf_q4_0 = "gguf_q4_0"

    @property
    def is_gguf(self) -> bool:
        return self.value.startswith("gguf")


@schema
class ConvertTask(Task):
    """Writes the weights of checkpoint.load_parameters in another format."""

    format: ConvertFormat = ConvertFormat.hf
    """hf: a Hugging Face folder with config.json, safetensors and the tokenizer's files, adapters merged; hf_fp8,
    hf_int8: the same with 8-bit weights in the format compressed-tensors; gguf_f16, gguf_q8_0, gguf_q4_0: model.gguf
    for llama.cpp, with matrices of that type; peft: only
    the adapter of a run, in PEFT format; maxhydra: a checkpoint with only the weights, adapters merged, quantized if
    quantization=int8_weights, int4_weights or mxfp4_weights is set."""
    output: str | None = None
    """Output folder, which must not exist yet; it appears when it is complete."""
    dtype: Dtype | None = None
    """hf, hf_fp8, hf_int8, maxhydra: dtype of the written weights that are not quantized. null: model.dtypes.weights,
    or model.dtypes.compute for a quantized maxhydra checkpoint."""
    model_type: str | None = None
    """Hugging Face model_type to write. null: the first that can represent the model."""
    push: str | None = None
    """All formats but maxhydra: repository ORG/NAME on the Hugging Face hub to which the output folder is uploaded; it
    is created private if it does not exist. The token comes from the environment variable HF_TOKEN. null: none."""

    def check(self) -> Iterator[Problem]:
        if self.output is None:
            yield Problem("output", "is needed", value=None, accepted="a folder that does not exist yet")
        if self.dtype is not None and (self.format is ConvertFormat.peft or self.format.is_gguf):
            yield Problem("dtype", f"is not used by format={self.format.value}", value=self.dtype, accepted="null")
        if self.push is not None and not re.fullmatch(HUB_NAME, self.push):
            yield Problem("push", "is not the name of a repository", value=self.push, accepted="ORG/NAME")
        if self.push is not None and self.format is ConvertFormat.maxhydra:
            reason = "is not supported with format=maxhydra, which only maxhydra reads"
            yield Problem("push", reason, value=self.push, accepted="null, or another format")
