"""task=score: log-probabilities and perplexities of given tokens, and optionally all logits."""

import sys
from functools import cache
from pathlib import Path

import numpy as np

from maxhydra.config.schema.tasks.inference import ScoreTask
from maxhydra.convert.load import load_weights
from maxhydra.decode.open import check_weights_source, weight_quantization
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.model import build
from maxhydra.runtime.progress import open_item_progress
from maxhydra.score.scorer import (
    SequenceScore,
    SequenceScorer,
    check_writable,
    perplexity,
    read_sequences,
    without_capacity_limit,
    write_results,
)
from maxhydra.sharding import Sharder
from maxhydra.tasks import Job, Outcome

NEEDS_DEVICES, KEEPS_RUN = True, False


def run(job: Job) -> Outcome:
    config, task = job.config, job.config.task
    assert isinstance(task, ScoreTask)
    check_weights_source(config, processes=job.machine.process_count)
    # Opened on first use: token ids need no tokenizer.
    prompts = cache(lambda: PromptEncoder(config.data, vocab_size=config.model.vocab_size))
    sequences = read_sequences(
        Path(task.input).expanduser(),
        encode=lambda text: prompts().encode_text(text),
        vocab_size=config.model.vocab_size,
        max_length=config.model.context_length,
    )
    output = Path(task.output).expanduser()
    check_writable(output)
    scorer = _open_scorer(job, task)
    scores: list[SequenceScore] = []
    tokens = 0
    with open_item_progress(config.train.progress, total=len(sequences.rows), start=0, verb="scored") as progress:
        for score in scorer(sequences.rows):
            scores.append(score)
            tokens += len(sequences.rows[score.number].ids)
            progress.update(len(scores), tokens)
    write_results(output, sequences, scores)
    overall = perplexity(np.concatenate([score.logprobs for score in scores]))
    print(f"perplexity {overall:.4f} over {len(scores)} sequences, {tokens} tokens: {task.output}", file=sys.stderr)
    return Outcome("finished", "scored", {"perplexity": overall})


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
