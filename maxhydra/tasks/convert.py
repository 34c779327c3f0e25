"""task=convert: export weights as a Hugging Face folder, a GGUF file, a PEFT adapter, or a maxhydra checkpoint."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from maxhydra import data, model
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.schema.model import Head
from maxhydra.config.schema.quantization import STORED_KINDS
from maxhydra.config.schema.tasks.inference import ConvertFormat, ConvertTask
from maxhydra.convert.adapter_lineage import find_adapter_lineage
from maxhydra.convert.compressed import FORMATS as COMPRESSED
from maxhydra.convert.compressed import check_dense, compress, compression_settings
from maxhydra.convert.gguf_write import TYPES as GGUF_TYPES
from maxhydra.convert.gguf_write import check_representable, write_gguf
from maxhydra.convert.hf_config import is_hf_folder
from maxhydra.convert.hf_write import find_family, write_hf
from maxhydra.convert.load import open_arrays, read_adapter
from maxhydra.convert.orbax_io import write_checkpoint
from maxhydra.convert.peft import write_peft
from maxhydra.data.tokenizers import check_vocabulary, tokenizer_path
from maxhydra.data.tokenizers.gguf import gguf_metadata
from maxhydra.data.tokenizers.hf import HuggingFaceTokenizer
from maxhydra.decode.open import check_same_model
from maxhydra.modelfiles import locate
from maxhydra.modelfiles.hub import push_folder, require_token
from maxhydra.tasks import Job, Outcome, atomic_output_dir
from maxhydra.tasks._output_record import RECORD, describe_difference, inputs_digest, write_record

NEEDS_DEVICES = KEEPS_RUN = False

KEY, PUSH = "checkpoint.load_parameters", "task.push"
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "vocab.*", "merges.txt")


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, ConvertTask) and task.output is not None
    source = config.checkpoint.load_parameters
    if source is None:
        raise ConfigError(Problem(KEY, "is required: it names the weights to convert", value=None))
    _check_format(config, task)
    if task.push is not None:
        require_token(PUSH, task.push)
    check_same_model(config, source)
    output = Path(task.output).expanduser().absolute()
    inputs = inputs_digest(KEY, config, source)
    if output.exists():
        if (difference := describe_difference(output, inputs)) is not None:
            hint = "choose another folder, or move the existing one"
            raise ConfigError(Problem("task.output", f"already exists, and {difference}", value=output, hint=hint))
        print(f"{task.output} is already complete: written by the same command, files verified", file=sys.stderr)
        reason = "already complete"
    else:
        with atomic_output_dir(output) as folder:
            WRITERS[task.format](config, task, source, folder)
            write_record(folder, inputs)
        print(f"wrote {task.output}", file=sys.stderr)
        reason = "written"
    if task.push is not None:
        print(f"pushed {push_folder(PUSH, task.push, output, ignored=(RECORD,))}", file=sys.stderr)
        reason += f", pushed to {task.push}"
    return Outcome("finished", reason)


def _write_hf(config: Config, task: ConvertTask, source: str, folder: Path) -> None:
    decoder = model.build(config.model)
    table = find_family(decoder, task.model_type)
    dtype = jnp.dtype((task.dtype or config.model.dtypes.weights).value)
    options: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    if task.format in COMPRESSED:
        check_dense(decoder, "task.format")
        options["compress"] = partial(compress, task.format)
        extra["quantization_config"] = compression_settings(task.format)
    arrays = open_arrays(KEY, source, decoder, dtype=dtype)
    extra |= _write_tokenizer(config, source, folder)
    write_hf(folder, decoder, arrays, table=table, dtype=dtype, extra=extra, **options)


def _write_gguf(config: Config, task: ConvertTask, source: str, folder: Path) -> None:
    decoder = model.build(config.model)
    table = find_family(decoder, task.model_type, has_gguf=True)
    check_representable(decoder, table)
    tokenizer: dict[str, Any] = {}
    if config.data.tokenizer.kind != "byte":
        loaded = data.load_tokenizer(config.data)
        if not isinstance(loaded, HuggingFaceTokenizer):
            reason, accepted = "is not supported by a GGUF file", "hf, gguf, or byte for a file without a tokenizer"
            raise ConfigError(
                Problem("data.tokenizer.kind", reason, value=config.data.tokenizer.kind, accepted=accepted)
            )
        check_vocabulary(loaded, config.data, data.RowSpec(seq_len=1, vocab_size=config.model.vocab_size, seed=0))
        tokenizer = gguf_metadata(loaded, config.model.vocab_size)
    arrays = open_arrays(KEY, source, decoder, dtype=jnp.dtype("float32"))
    write_gguf(folder, decoder, arrays, table=table, format=task.format, tokenizer=tokenizer)


def _write_maxhydra(config: Config, task: ConvertTask, source: str, folder: Path) -> None:
    decoder = model.build(config.model, quantization=config.quantization)
    # Quantize from the dtype in which task=decode would load the weights, so that both give bit-identical results.
    default = config.model.dtypes.compute if decoder.is_packed else config.model.dtypes.weights
    dtype = jnp.dtype((task.dtype or default).value)
    write_checkpoint(folder, decoder, open_arrays(KEY, source, decoder.base, dtype=dtype), dtype=dtype)


def _check_format(config: Config, task: ConvertTask) -> None:
    """Raise ConfigError if the output format cannot store the quantization; only maxhydra checkpoints can."""
    supported = STORED_KINDS if task.format is ConvertFormat.maxhydra else ()
    if config.quantization.kinds <= set(supported):
        return
    accepted = ", ".join(["none", *(kind.value for kind in supported)])
    reason = f"is not supported by task.format={task.format.value}"
    hint = "" if supported else "task.format=maxhydra supports " + ", ".join(kind.value for kind in STORED_KINDS)
    raise ConfigError(
        Problem("quantization.kind", reason, value=config.quantization.kind, accepted=accepted, hint=hint)
    )


def _write_peft(config: Config, task: ConvertTask, source: str, folder: Path) -> None:
    if config.model.head is Head.score:
        reason, hint = "is not part of a PEFT adapter", "task.format=hf merges the adapter and writes a classifier"
        raise ConfigError(Problem("model.head", reason, value=config.model.head, hint=hint))
    lineage = find_adapter_lineage(KEY, source)
    if lineage is None:
        accepted = "a run that was trained with adapter=lora or adapter=qlora"
        raise ConfigError(Problem(KEY, "contains no adapter", value=source, accepted=accepted))
    adapted = model.build(config.model, lineage.adapter)
    table = find_family(adapted.base, task.model_type)
    write_peft(folder, adapted, read_adapter(KEY, source, adapted), table=table, base=lineage.base)


WRITERS = {
    ConvertFormat.hf: _write_hf,
    **dict.fromkeys(COMPRESSED, _write_hf),
    **dict.fromkeys(GGUF_TYPES, _write_gguf),
    ConvertFormat.peft: _write_peft,
    ConvertFormat.maxhydra: _write_maxhydra,
}


def _write_tokenizer(config: Config, source: str, folder: Path) -> dict[str, Any]:
    """Write the tokenizer's files into the folder and return the special token ids for config.json.

    The tokenizer is the config's, or that of the source if the config has none (kind=byte) and it is a HF folder.
    """
    tokenizer_config, source_folder = config.data.tokenizer, locate(KEY, source)
    if tokenizer_config.kind == "byte" and is_hf_folder(source_folder):
        _copy_tokenizer(source_folder, folder)
        settings = json.loads((source_folder / "config.json").read_text(encoding="utf-8"))
        return {key: settings[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in settings}
    tokenizer = data.load_tokenizer(config.data)
    check_vocabulary(tokenizer, config.data, data.RowSpec(seq_len=1, vocab_size=config.model.vocab_size, seed=0))
    if tokenizer_config.kind == "hf" and (own := tokenizer_path(tokenizer_config)).is_dir():
        _copy_tokenizer(own, folder)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.save(folder)
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)
