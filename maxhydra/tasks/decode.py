"""Answers from a model: to one prompt, to a file of prompts, or to a person at the terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.tasks.decode import DecodeTask
from maxhydra.decode.chat_cli import AnswerFailedError, answer, converse, read_line, write_now
from maxhydra.decode.checkpoint_check import settings_name
from maxhydra.decode.client import PromptClient, is_chat
from maxhydra.decode.offline import Batch, BatchFailedError, require_apart
from maxhydra.decode.offline_files import AnswerFile, check_records, read_records
from maxhydra.decode.open import open_engine, open_prompts
from maxhydra.decode.prompts import PromptEncoder
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES = True
KEEPS_RUN = False


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, DecodeTask)
    if task.prompt is None and task.input is None and not sys.stdin.isatty():
        hint = "without either, task=decode is a chat, which needs a terminal"
        raise ConfigError(Problem("task.prompt", "is needed, or task.input", value=None, hint=hint))
    prompts = open_prompts(config, processes=job.machine.process_count)
    is_chat(task, prompts)
    try:
        if task.input is not None:
            return _file(config, task, prompts)
        with _asker(config, task, prompts) as asker:
            if task.prompt is not None:
                answer(asker, task.prompt, write_now)
            else:
                converse(asker, read=read_line(), write=write_now)
    except (BatchFailedError, AnswerFailedError) as error:
        return Outcome("failed", f"the engine failed: {error}")
    return Outcome("finished", "answered")


def _file(config: Config, task: DecodeTask, prompts: PromptEncoder) -> Outcome:
    """Answer what is left of a file; where nothing is, no weights are loaded."""
    assert task.input is not None and task.output is not None
    require_apart(task)
    source, target = Path(task.input).expanduser(), Path(task.output).expanduser()
    records = check_records(source, task.sampling)
    with AnswerFile(target, settings=settings_name(config)) as answers:
        before, total = answers.count, records * task.samples
        if answers.missing(read_records(source, task.sampling), task.samples):
            with _asker(config, task, prompts) as asker:
                Batch(asker, answers, records=records).run()
        if answers.refused:
            reason = f"{answers.refused} of {total} prompts were refused; their lines in {task.output} say why"
            return Outcome("failed", f"{reason}, and those taken out are asked again")
    print(f"answered {total} of {total}, {before} of them before: {task.output}", file=sys.stderr)
    return Outcome("finished", "answered")


@contextmanager
def _asker(config: Config, task: DecodeTask, prompts: PromptEncoder) -> Iterator[PromptClient]:
    engine = open_engine(config, task.engine, prompts)
    try:
        yield PromptClient(engine, prompts, task, config.run.seed)
    finally:
        engine.close()
