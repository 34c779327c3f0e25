"""Offline decoding: completes a file of prompts, many at a time, each written once and as soon as it finishes."""

import dataclasses
import queue
import re
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.migrations import original_names
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.tasks.inference import DecodeTask
from maxhydra.convert.orbax_io import checkpoint_steps
from maxhydra.decode.offline_files import REJECTED, OutputFile, Record, fingerprint, read_records
from maxhydra.decode.open import model_defaults, model_values
from maxhydra.decode.request import Completion, Delta, Handle, RequestRejectedError, TokenLogprob
from maxhydra.decode.sampling_params import PromptClient, PromptError
from maxhydra.modelfiles import local_path
from maxhydra.modelfiles.hub import hub_commit, is_hub_id
from maxhydra.runtime.progress import ItemProgress, open_item_progress

# Submitted sequences per batch slot of the engine, so that it never waits for this thread.
QUEUE_FACTOR = 2
REFRESH_SECONDS = 0.5
# Model settings that do not change completions. Narrower than convert's FREE: context_length and expert capacity fit
# the same weights but change completions. The list determines the `settings` value in existing output files.
UNUSED_IN_COMPLETIONS = (
    "model.path",
    "model.remat",
    "model.dropout",
    "model.init_scale",
    "model.scan_unroll",
    "model.kernels",
    "model.dtypes",
)
# Model settings and sampling parameters that output files of earlier versions do not know.
LATER_KEYS = (
    *("model.vision.*", "model.audio.*", "model.diffusion.*", "model.hyper_connections.*", "model.multipliers.*"),
    *("model.speech.*", "model.qk_clip", "model.kinds.*.attention.moba.*", "model.kinds.*.attention.value_norm_scale"),
    *("model.kinds.*.rope.sections", "model.kinds.*.temperature.offset", "model.kinds.*.mla.temperature.*"),
    *(
        "model.kinds.*.mla.indexer.pairs",
        "model.kinds.*.mla.indexer_of",
        "model.kinds.*.engram.*",
        "model.kinds.*.latent_dim",
    ),
    *("model.kinds.*.compressed.*", "model.kinds.*.moe.limit", "model.kinds.*.moe.router.by_token"),
    *("model.kinds.*.moe.kind", "model.kinds.*.moe.latent_dim", "model.kinds.*.moe.router.normalize_eps"),
    *("model.kinds.*.convolution.*", "model.kinds.*.ssm.*", "model.kinds.*.own_*"),
    *(f"model.kinds.*.delta.{key}" for key in ("decay_rank", "gate_rank", "gate", "max_rate", "norm_eps")),
)
LATER_PARAMETERS = ("frequency_penalty", "presence_penalty")


class BatchFailedError(Exception):
    """The engine failed; completions that finished before are in the file."""


@dataclasses.dataclass(frozen=True)
class BatchStats:
    """Result of decoding a file."""

    completed: int
    rejected: int
    """Including those of earlier commands."""
    tokens: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class _Sample:
    """A submitted sample of a record."""

    record: Record
    number: int
    prompt_tokens: int
    deltas: list[Delta] = dataclasses.field(default_factory=list)


class OfflineBatch:
    """Decodes one file. One thread submits and writes; the engine's thread only puts deltas into a queue."""

    def __init__(self, client: PromptClient, output: OutputFile, *, records: int):
        self._client, self._output = client, output
        self._total = records * client.task.samples
        self._deltas: queue.SimpleQueue[tuple[_Sample, Delta]] = queue.SimpleQueue()
        self._in_flight: dict[tuple[int, int], Handle] = {}
        self._num_tokens = 0

    def run(self) -> BatchStats:
        """Complete everything that is missing in the output file."""
        task = self._client.task
        began, before = time.monotonic(), self._output.count
        missing = self._missing_samples(task)
        window = QUEUE_FACTOR * task.engine.max_batch
        with open_item_progress(task.progress, total=self._total, start=before, verb="completed") as progress:
            try:
                while self._fill_window(missing, window) or self._in_flight:
                    self._write(self._wait_for_finished(progress))
                    progress.update(self._output.count, self._num_tokens)
            finally:
                for handle in self._in_flight.values():
                    handle.cancel()
        completed = self._output.count - before
        return BatchStats(completed, self._output.num_rejected, self._num_tokens, time.monotonic() - began)

    def _missing_samples(self, task: DecodeTask) -> Iterator[tuple[Record, int]]:
        assert task.input is not None
        for record in read_records(local_path("task.input", task.input), task.sampling):
            for number in self._output.missing_samples(record, task.samples):
                yield record, number

    def _fill_window(self, missing: Iterator[tuple[Record, int]], window: int) -> bool:
        """Submit until `window` samples are in flight; return True if any was submitted or rejected."""
        has_progress = False
        while len(self._in_flight) < window and (item := next(missing, None)) is not None:
            self._submit(*item)
            has_progress = True
        return has_progress

    def _submit(self, record: Record, number: int) -> None:
        client = self._client
        try:
            is_text = isinstance(record.prompt, str)
            ids = client.encode(record.prompt) if is_text else client.encode_messages(record.prompt)  # type: ignore[arg-type]
            request = client.requests(ids, record.sampling, number=record.index)[number]
            handle = client.engine.submit(request)
        except (PromptError, RequestRejectedError) as error:
            # One prompt that is too long must not stop a long job: its output line holds the reason.
            self._output.add([(record, number, {"text": "", "tokens": 0, "finish": REJECTED, "error": str(error)})])
            return
        except ConfigError as error:
            problem = error.problems[0]
            raise ConfigError(dataclasses.replace(problem, source=f"{client.task.input}:{record.line}")) from None
        sample = _Sample(record, number, len(ids))
        self._in_flight[record.index, number] = handle
        handle.listen(partial(self._enqueue, sample))

    def _enqueue(self, sample: _Sample, delta: Delta) -> None:
        """Run in the engine's thread."""
        self._deltas.put((sample, delta))

    def _wait_for_finished(self, progress: ItemProgress) -> list[_Sample]:
        """Wait until a sequence finishes, and return all that have."""
        finished: list[_Sample] = []
        while self._in_flight and not (finished and self._deltas.empty()):
            try:
                sample, delta = self._deltas.get(timeout=REFRESH_SECONDS)
            except queue.Empty:
                progress.update(self._output.count, self._num_tokens)
                continue
            sample.deltas.append(delta)
            self._num_tokens += len(delta.tokens)
            if delta.finish in ("error", "cancelled"):
                self._write(finished)
                raise BatchFailedError(delta.error or "the engine was closed")
            if delta.finish is not None:
                del self._in_flight[sample.record.index, sample.number]
                finished.append(sample)
        return finished

    def _write(self, samples: list[_Sample]) -> None:
        if samples:
            self._output.add([(sample.record, sample.number, self._to_json(sample)) for sample in samples])

    def _to_json(self, sample: _Sample) -> Mapping[str, Any]:
        completion = Completion.from_deltas(sample.deltas)
        values: dict[str, Any] = {
            "text": completion.text,
            "prompt_tokens": sample.prompt_tokens,
            "tokens": len(completion.tokens),
            "finish": completion.finish,
        }
        if self._client.task.logprobs is not None:
            values["logprobs"] = [self._logprob_to_json(entry) for entry in completion.logprobs]
        return values

    def _logprob_to_json(self, entry: TokenLogprob) -> dict[str, Any]:
        text = self._client.prompts.token_text
        others = [{"token": id, "text": text(id), "logprob": value} for id, value in entry.alternatives]
        return {"token": entry.token, "text": text(entry.token), "logprob": entry.logprob, "alternatives": others}


def check_distinct_files(task: DecodeTask) -> None:
    """Reject task.output equal to task.input: appended completions would be read as prompts."""
    assert task.input is not None and task.output is not None
    if local_path("task.input", task.input).resolve() == Path(task.output).expanduser().resolve():
        reason = "is the same file as task.input"
        raise ConfigError(Problem("task.output", reason, value=task.output, accepted="a different file"))


def settings_fingerprint(config: Config) -> str:
    """Return a short hash of everything except the prompt that a completion depends on."""
    task, source = config.task, config.checkpoint.load_parameters
    assert isinstance(task, DecodeTask)
    settings = {
        **_model_values(config),
        "weights": source,
        **_version(source),
        "template": config.data.tokenizer.chat_template,
        "compute": config.model.dtypes.compute,
        "quantization": OmegaConf.to_container(OmegaConf.structured(config.quantization)),
        "cache": task.engine.cache_dtype,
        "sampling": _sampling_values(task.sampling),
        "chat": [task.chat, task.system, task.samples, task.logprobs, config.run.seed],
        **({} if task.denoise_steps is None else {"denoise_steps": task.denoise_steps}),
    }
    return fingerprint(original_names(settings))


def _model_values(config: Config) -> dict[str, Any]:
    """Settings of the model; those that were added later only if they are used, so that earlier files are continued."""
    defaults = model_defaults()

    def is_unset(key: str, value: Any) -> bool:
        # Models with a budget of patches for each frame take videos, which no file has, since a later version.
        is_of_videos = config.model.vision.videos.per_frame and key.startswith("model.vision.video")
        is_later = any(fnmatch(key, pattern) for pattern in LATER_KEYS)
        return is_of_videos or (is_later and value == defaults[re.sub(r"^model\.kinds\.[^.]*", "model.kinds.*", key)])

    used = {key: value for key, value in model_values(config).items() if not key.startswith(UNUSED_IN_COMPLETIONS)}
    return {key: value for key, value in used.items() if not is_unset(key, value)}


def _sampling_values(sampling: Sampling) -> dict[str, Any]:
    """Parameters that were added later are listed only if they are used, so that earlier files are continued."""
    values = {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}
    return {name: value for name, value in values.items() if value or name not in LATER_PARAMETERS}


def _version(source: str | None) -> dict[str, int | str]:
    """Return the latest checkpoint step of a run, or the commit of a repository: both may change between commands."""
    if source and is_hub_id(source):
        return {"commit": hub_commit("checkpoint.load_parameters", source)}
    root = local_path("checkpoint.load_parameters", source or "")
    steps = source and (checkpoint_steps(root / "checkpoints") or checkpoint_steps(root))
    return {"step": steps[-1]} if steps else {}
