"""task=score: log-probabilities and perplexities of given tokens, and optionally all logits."""

import sys
from functools import cache
from pathlib import Path

import numpy as np

from maxhydra.config import Config
from maxhydra.config.schema.run import Progress
from maxhydra.config.schema.tasks.inference import ScoreTask
from maxhydra.convert.load import load_weights
from maxhydra.decode.open import check_weights_source, weight_quantization
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.decode.sequence import NOT_FINITE
from maxhydra.model import build, without_capacity_limit
from maxhydra.modelfiles import local_path
from maxhydra.runtime.channel import broadcast, is_main
from maxhydra.runtime.progress import open_item_progress
from maxhydra.score.scorer import (
    Sequences,
    SequenceScore,
    SequenceScorer,
    check_writable,
    overall_bits_per_byte,
    perplexity,
    read_sequences,
    write_results,
)
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES, KEEPS_RUN = True, False


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, ScoreTask)
    check_weights_source(config)
    output = Path(task.output).expanduser()
    sequences = _read_input(config, task, output) if is_main() else Sequences([], 0)
    ids = broadcast([row.ids for row in sequences.rows])
    scorer = _open_scorer(job, task)
    scores: list[SequenceScore] = []
    tokens = 0
    mode = config.train.progress if is_main() else Progress.none
    with open_item_progress(mode, total=len(ids), start=0, verb="scored") as progress:
        for score in scorer(ids):
            scores.append(score)
            tokens += len(ids[score.number])
            progress.update(len(scores), tokens)
    if any(np.isnan(score.logprobs).any() for score in scores):
        return Outcome("failed", NOT_FINITE)
    overall = perplexity(np.concatenate([score.logprobs for score in scores]))
    metrics = {"perplexity": overall}
    if is_main():
        write_results(output, sequences, scores)
        bits = overall_bits_per_byte(sequences, scores)
        shown = "" if bits is None else f", {bits:.4f} bits per byte"
        text = f"perplexity {overall:.4f}{shown} over {len(scores)} sequences, {tokens} tokens: {task.output}"
        print(text, file=sys.stderr)
        metrics |= {} if bits is None else {"bpb": bits}
    return Outcome("finished", "scored", metrics)


def _read_input(config: Config, task: ScoreTask, output: Path) -> Sequences:
    """The sequences of task.input; ConfigError if one is invalid, or the output cannot be written."""
    # Opened on first use: token ids need no tokenizer.
    prompts = cache(lambda: PromptEncoder(config.data, vocab_size=config.model.vocab_size))
    sequences = read_sequences(
        local_path("task.input", task.input),
        encode=lambda text: prompts().encode_and_count(text),
        vocab_size=config.model.vocab_size,
        max_length=config.model.context_length,
    )
    check_writable(output)
    return sequences


def _open_scorer(job: Job, task: ScoreTask) -> SequenceScorer:
    config = job.config
    assert config.checkpoint.load_parameters is not None
    sharder = Sharder.from_config(config.mesh)
    model = build(without_capacity_limit(config.model), quantization=weight_quantization(config))
    model.check_mesh(sharder)
    weights = load_weights(
        config.checkpoint.load_parameters,
        model,
        shardings=sharder.tree(model.base.axes),
        dtype=config.model.dtypes.compute.value,
    )
    return SequenceScorer(model, weights, sharder, task.batch, task.logits)
