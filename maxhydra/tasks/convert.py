"""Weights for others: any that we load as a Hugging Face folder, an adapter of ours as PEFT has it."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from maxhydra import data, model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.quantization import TO_KEEP
from maxhydra.config.schema.tasks.convert import ConvertFormat, ConvertTask
from maxhydra.convert.adapter_lineage import origin
from maxhydra.convert.arrays import open_arrays
from maxhydra.convert.hf_config import is_hf_folder
from maxhydra.convert.hf_write import family_of, write_hf
from maxhydra.convert.load import read_adapter
from maxhydra.convert.own_write import write_own
from maxhydra.convert.peft_write import write_peft
from maxhydra.data.tokenizers import check_vocabulary
from maxhydra.data.tokenizers.hf import HuggingFaceTokenizer
from maxhydra.decode.checkpoint_check import check_origin
from maxhydra.modelfiles import locate
from maxhydra.tasks import Job, Outcome, atomic_output_dir

NEEDS_DEVICES = KEEPS_RUN = False

KEY = "checkpoint.load_parameters"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "vocab.*", "merges.txt")


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, ConvertTask) and task.output is not None
    source = config.checkpoint.load_parameters
    if source is None:
        raise ConfigError(Problem(KEY, "is needed: it says what to convert", value=None))
    _check_format(config, task)
    check_origin(config, source)
    with atomic_output_dir(Path(task.output).expanduser().absolute()) as folder:
        WRITERS[task.format](config, task, source, folder)
    print(f"wrote {task.output}", file=sys.stderr)
    return Outcome("finished", "written")


def _write_hf(config: Config, task: ConvertTask, source: str, folder: Path) -> None:
    whole = model.build(config.model)
    table = family_of(whole, task.model_type)
    dtype = jnp.dtype((task.dtype or config.model.dtypes.weights).value)
    arrays = open_arrays(KEY, source, whole, dtype=dtype)
    write_hf(folder, whole, arrays, table=table, dtype=dtype, extra=_tokens(config, source, folder))


def _write_own(config: Config, task: ConvertTask, source: str, folder: Path) -> None:
    whole = model.build(config.model, quantization=config.quantization)
    # Weights are packed as decoding would have loaded them, and so give the same answers to the last bit.
    own = config.model.dtypes.compute if whole.is_packed else config.model.dtypes.weights
    dtype = jnp.dtype((task.dtype or own).value)
    write_own(folder, whole, open_arrays(KEY, source, whole.base, dtype=dtype), dtype=dtype)


def _check_format(config: Config, task: ConvertTask) -> None:
    """Fewer bits are a matter of our own checkpoints."""
    asked = config.quantization
    written = TO_KEEP if task.format is ConvertFormat.maxhydra else ()
    if asked.kinds <= set(written):
        return
    accepted = ", ".join(["none", *(kind.value for kind in written)])
    reason = f"is not written by task.format={task.format.value}"
    hint = "" if written else "task.format=maxhydra writes " + ", ".join(kind.value for kind in TO_KEEP)
    raise ConfigError(Problem("quantization.kind", reason, value=asked.kind, accepted=accepted, hint=hint))


def _write_peft(config: Config, task: ConvertTask, source: str, folder: Path) -> None:
    found = origin(KEY, source)
    if found is None:
        accepted = "a run that was trained with adapter=lora or adapter=qlora"
        raise ConfigError(Problem(KEY, "holds no adapter", value=source, accepted=accepted))
    adapted = model.build(config.model, found.adapter)
    table = family_of(adapted.base, task.model_type)
    write_peft(folder, adapted, read_adapter(KEY, source, adapted), table=table, base=found.base)


WRITERS = {ConvertFormat.hf: _write_hf, ConvertFormat.peft: _write_peft, ConvertFormat.maxhydra: _write_own}


def _tokens(config: Config, source: str, folder: Path) -> dict[str, Any]:
    """Put the tokenizer's files into the folder, and tell which tokens begin and end a text.

    They come from where the config says, or with a Hugging Face folder from there; bytes have no files.
    """
    words, place = config.data.tokenizer, locate(KEY, source)
    if words.kind == "byte" and is_hf_folder(place):
        _copy_tokenizer(place, folder)
        told = json.loads((place / "config.json").read_text(encoding="utf-8"))
        return {key: told[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in told}
    made = data.tokenizer(config.data)
    check_vocabulary(made, config.data, data.RowSpec(seq_len=1, vocab_size=config.model.vocab_size, seed=0))
    if words.kind == "hf" and words.path is not None and Path(words.path).expanduser().is_dir():
        _copy_tokenizer(Path(words.path).expanduser(), folder)
    elif isinstance(made, HuggingFaceTokenizer):
        made.save(folder)
    return {"bos_token_id": made.bos, "eos_token_id": made.eos, "pad_token_id": made.pad}


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
