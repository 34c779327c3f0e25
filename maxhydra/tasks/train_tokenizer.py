"""Train a tokenizer on the texts of a source, and write a folder for data.tokenizer.path."""

import contextlib
import dataclasses
import io
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from maxhydra import data
from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Tokenizer as TokenizerConfig
from maxhydra.config.schema.tasks.preparation import TokenizerModel, TrainTokenizerTask
from maxhydra.data.raw_texts import texts
from maxhydra.data.records import need
from maxhydra.tasks import Job, Outcome, atomic_output_dir

NEEDS_DEVICES, KEEPS_RUN = False, True

log = logging.getLogger("maxhydra")

# Pre-tokenization: words with the space before them, numbers of up to three digits, punctuation, whitespace.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Number of characters, from the start, on which the result is measured.
SAMPLE_SIZE = 1_000_000


def run(job: Job) -> Outcome:
    task = job.config.task
    assert isinstance(task, TrainTokenizerTask)
    if job.machine.process_index:
        return Outcome("finished", "the first process trains the tokenizer")
    folder = Path(task.output).expanduser().absolute() if task.output else job.run.path / "tokenizer"
    _remove_unfinished(job, folder)
    reader = _Reader(task, texts(job.config.data, seed=job.config.run.seed))
    with atomic_output_dir(folder) as partial_folder, reader.show_progress():
        _TRAINERS[task.model](task, reader, partial_folder)

    config = _tokenizer_config(job.config.data.tokenizer, task.model, folder)
    tokenizer = data.load_tokenizer(dataclasses.replace(job.config.data, tokenizer=config))
    if tokenizer.vocab_size < task.vocab_size:
        log.warning(
            "the text yields only %s tokens, fewer than task.vocab_size=%s",
            f"{tokenizer.vocab_size:,}",
            f"{task.vocab_size:,}",
        )
    tokens = sum(len(ids) for ids in tokenizer.encode_batch(reader.sample))
    metrics = {
        "vocab_size": float(tokenizer.vocab_size),
        "characters": float(reader.characters),
        "characters_per_token": sum(map(len, reader.sample)) / max(tokens, 1),
    }
    log.info(
        "%s tokens from %s characters, %.2f characters per token: %s",
        f"{tokenizer.vocab_size:,}",
        f"{reader.characters:,}",
        metrics["characters_per_token"],
        folder,
    )
    log.info("use it with data.tokenizer.kind=%s data.tokenizer.path=%s", config.kind, config.path)
    return Outcome("finished", "tokenizer written", metrics, {"tokenizer": str(folder)})


def _remove_unfinished(job: Job, folder: Path) -> None:
    """Remove a folder that an earlier session of this run wrote before it was killed; record that this one writes it.

    The record comes after the check that no other folder is there, so it never names a folder of somebody else.
    """
    facts = job.run.read() if job.run.exists() else {}
    was_finished = any(session["status"] == "finished" for session in facts.get("sessions", []))
    if folder.exists() and facts.get("tokenizer") == str(folder) and not was_finished:
        shutil.rmtree(folder)
    if not folder.exists():
        job.run.update(tokenizer=str(folder))


def _tokenizer_config(config: TokenizerConfig, model: TokenizerModel, folder: Path) -> TokenizerConfig:
    """The data.tokenizer settings that use the trained tokenizer."""
    if model is TokenizerModel.sentencepiece:
        kind, path = "sentencepiece", folder / "tokenizer.model"
    else:
        kind, path = "hf", folder
    return dataclasses.replace(config, kind=kind, path=str(path), bos=None, eos=None, pad=None)


class _Reader:
    """Iterator over texts up to the character limit, which counts them and defers errors.

    Trainers replace an exception of their iterator by another one that does not name the record, so `check` raises the
    original after training.
    """

    def __init__(self, task: TrainTokenizerTask, source: Iterator[str]):
        self._limit, self._source = task.max_characters, source
        self.characters = 0
        self.sample: list[str] = []
        self._error: Exception | None = None
        console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(bar_width=24), TextColumn("{task.fields[done]}"), console=console, disable=not console.is_terminal
        )
        # The length of a source is unknown, so the bar has no total.
        self._progress_task = self._bar.add_task("", total=None, done="")

    @contextlib.contextmanager
    def show_progress(self) -> Iterator[None]:
        with self._bar:
            yield

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._source:
                if self.characters < SAMPLE_SIZE:
                    self.sample.append(text)
                taken = text[: self._limit - self.characters]
                self.characters += len(taken)
                self._bar.update(self._progress_task, done=f"{self.characters / 1e6:,.1f} M characters read")
                yield taken
                if self.characters >= self._limit:
                    break
        except Exception as error:
            self._error = error
        self._bar.update(self._progress_task, done=f"{self.characters / 1e6:,.1f} M characters read, learning tokens")

    def check(self) -> None:
        """Raise the source's error, if any, or an error if it had no text."""
        if self._error is not None:
            raise self._error
        if not self.characters:
            raise ConfigError(Problem("data", "has no text to train a tokenizer on"))


def _train_hugging_face(task: TrainTokenizerTask, reader: _Reader, folder: Path) -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"vocab_size": task.vocab_size, "special_tokens": task.marks(), "show_progress": False}
    if task.model is TokenizerModel.bpe:
        tokenizer = Tokenizer(models.BPE())
        trainer: Any = trainers.BpeTrainer(min_frequency=task.min_frequency, initial_alphabet=alphabet, **options)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(initial_alphabet=alphabet, **options)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(iter(reader), trainer)
    reader.check()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    names = {"bos_token": task.bos, "eos_token": task.eos, "pad_token": task.pad}
    named = {role: name for role, name in names.items() if name is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | named, indent=1), encoding="utf-8")


def _train_sentencepiece(task: TrainTokenizerTask, reader: _Reader, folder: Path) -> None:
    trainer = need("sentencepiece", "task.model=sentencepiece").SentencePieceTrainer
    names = {"bos": task.bos, "eos": task.eos, "pad": task.pad}
    roles = [role for role, name in names.items() if name is not None]
    ids = {f"{role}_id": roles.index(role) + 1 if role in roles else -1 for role in names}
    content = io.BytesIO()
    try:
        trainer.train(
            sentence_iterator=iter(line for text in reader for line in text.splitlines() if line),
            model_writer=content,
            model_type="bpe",
            vocab_size=task.vocab_size,
            control_symbols=task.special,
            unk_id=0,
            **ids,
            **{f"{role}_piece": name for role, name in names.items() if name is not None},
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            split_digits=True,
            user_defined_symbols=["\n"],
            hard_vocab_limit=False,
            max_sentence_length=2**24,
            minloglevel=2,
        )
    except RuntimeError as error:
        reader.check()
        reason = f"cannot be reached with this text: {error}"
        raise ConfigError(Problem("task.vocab_size", reason, value=task.vocab_size)) from None
    reader.check()
    (folder / "tokenizer.model").write_bytes(content.getvalue())


_TRAINERS = {
    TokenizerModel.bpe: _train_hugging_face,
    TokenizerModel.unigram: _train_hugging_face,
    TokenizerModel.sentencepiece: _train_sentencepiece,
}
