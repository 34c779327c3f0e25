"""task=decode: completions of one prompt or a file of prompts, or a chat at the terminal."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.tasks.inference import DecodeTask
from maxhydra.decode.chat_cli import GenerationFailedError, chat, complete, line_reader, write_and_flush
from maxhydra.decode.diffusion import open_diffusion_engine
from maxhydra.decode.offline import BatchFailedError, OfflineBatch, check_distinct_files, settings_fingerprint
from maxhydra.decode.offline_files import OutputFile, check_records, read_records
from maxhydra.decode.open import open_engine, open_prompts
from maxhydra.decode.request import Engine
from maxhydra.decode.sampling_params import PromptClient, PromptEncoder, PromptError, is_chat
from maxhydra.decode.speech import SpeechFiles, check_speech
from maxhydra.model import ModelDef
from maxhydra.modelfiles import local_path
from maxhydra.runtime.channel import broadcast, is_main
from maxhydra.runtime.profiler import Profiler
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES = True
KEEPS_RUN = False


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, DecodeTask)
    if is_main() and task.prompt is None and task.input is None and not sys.stdin.isatty():
        reason = "is required, or task.input, since stdin is not a terminal"
        hint = "without either, task=decode is a chat, which needs a terminal"
        raise ConfigError(Problem("task.prompt", reason, value=None, hint=hint))
    prompts = open_prompts(config)
    # Raises early if a chat template is required and missing.
    has_template = is_chat(task, prompts)
    readers: dict[str, Callable[[list[str]], Any]] = {
        "images": prompts.read_images,
        "videos": lambda files: prompts.read_images([{"video": file} for file in files]),
        "audios": prompts.read_audio,
    }
    for name, read in readers.items():
        _check_media(f"task.{name}", getattr(task, name), read, has_template=has_template)
    check_speech(task)
    outcome = _complete(job, task, prompts) if is_main() else _follow(config, task, prompts)
    return Outcome(*broadcast([outcome.status, outcome.reason]))


def _check_media(key: str, files: list[str], read: Callable[[list[str]], Any], *, has_template: bool) -> None:
    """Raise ConfigError for files that cannot be read, before weights are loaded."""
    if files and not has_template:
        reason, hint = "requires a chat template, and the tokenizer has none", "set data.tokenizer.chat_template"
        raise ConfigError(Problem(key, reason, value=files, hint=hint))
    try:
        read(files)
    except PromptError as error:
        raise ConfigError(Problem(key, str(error), value=files)) from None


def _follow(config: Config, task: DecodeTask, prompts: PromptEncoder) -> Outcome:
    """Decode the prompts that process 0 reads, if there are any."""
    if broadcast():
        open_engine(config, task.engine, prompts).follow()
    return Outcome("finished", "completed")


def _complete(job: Job, task: DecodeTask, prompts: PromptEncoder) -> Outcome:
    try:
        if task.input is not None:
            return _decode_file(job, task, prompts)
        broadcast(True)
        with _open_client(job, task, prompts) as (client, speech):
            if task.prompt is not None:
                complete(client, task.prompt, write_and_flush, speech=speech)
            else:
                chat(client, read=line_reader(), write=write_and_flush)
    except (BatchFailedError, GenerationFailedError) as error:
        return Outcome("failed", f"the engine failed: {error}")
    return Outcome("finished", "completed")


def _decode_file(job: Job, task: DecodeTask, prompts: PromptEncoder) -> Outcome:
    """Complete the prompts of a file that are not in the output; if none are left, no weights are loaded."""
    assert task.input is not None and task.output is not None
    check_distinct_files(task)
    source, target = local_path("task.input", task.input), Path(task.output).expanduser()
    records = check_records(source, task.sampling)
    with OutputFile(target, settings=settings_fingerprint(job.config)) as output:
        before, total = output.count, records * task.samples
        if broadcast(output.count_missing(read_records(source, task.sampling), task.samples) > 0):
            with _open_client(job, task, prompts) as (client, _):
                OfflineBatch(client, output, records=records).run()
                print_drafts(client.engine.stats())
        if output.num_rejected:
            reason = f"{output.num_rejected} of {total} prompts were rejected: see `error` in {task.output}"
            return Outcome("failed", f"{reason}; to retry them, delete their lines")
    print(f"completed {total} of {total} ({before} before this command): {task.output}", file=sys.stderr)
    return Outcome("finished", "completed")


def print_drafts(stats: Mapping[str, float]) -> None:
    """Print how many tokens speculative decoding drafted, how many were accepted, and in how many of the steps."""
    if "tokens_drafted" not in stats:
        return
    names = ("tokens_accepted", "tokens_drafted", "steps_speculative", "steps", "steps_waiting")
    accepted, drafted, speculative, steps, waiting = (round(stats[name]) for name in names)
    text = f"{accepted} of {drafted} drafted tokens accepted, in {speculative} of {steps} steps"
    if waiting:
        text += f"; {waiting} steps ran without drafts while the program that verifies them was being compiled"
        text += " (task.engine.warm_up=true compiles it first)"
    print(f"speculative decoding: {text}", file=sys.stderr)


@contextmanager
def _open_client(
    job: Job, task: DecodeTask, prompts: PromptEncoder
) -> Iterator[tuple[PromptClient, SpeechFiles | None]]:
    """The client of an engine, and the writer of the speech of its completions if the task has a folder for it."""
    speech: list[SpeechFiles] = []

    def keep_speech(model: ModelDef, params: Any) -> None:
        if task.speech.folder is not None:
            speech.append(SpeechFiles.open(task, model, params, eos=prompts.eos_ids))

    profiler = Profiler(job.config.profile, job.run.path)
    engine: Engine
    if job.config.model.diffusion.block_size is None:
        engine = open_engine(job.config, task.engine, prompts, profiler=profiler, keep_params=keep_speech)
    else:
        engine = open_diffusion_engine(job.config, task, prompts)
    try:
        yield PromptClient(engine, prompts, task, job.config.run.seed), speech[0] if speech else None
    finally:
        engine.close()
        profiler.close()
