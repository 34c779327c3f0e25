"""Fields of task=score."""

from collections.abc import Iterator

from maxhydra.config.declare import option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.run import Task

LINES, ARRAYS = ".jsonl", ".npz"


@schema
class ScoreTask(Task):
    """Computes log-probabilities of given tokens under the model in checkpoint.load_parameters."""

    input: str = option()
    """Sequences: .jsonl with `text` or `ids` per line, or .npz with `ids` [B, T] and, for padded rows, `mask` [B, T]
    (1: token, 0: padding, on either side)."""
    output: str = option()
    """Output file, .jsonl or .npz, created when it is complete: `logprobs` of every token after the first and
    `perplexity` of every sequence; .npz also has `ids` and `mask`, and NaN for positions without a prediction."""
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
