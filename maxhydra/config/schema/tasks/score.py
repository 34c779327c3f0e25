"""Fields of task=score."""

from collections.abc import Iterator

from maxhydra.config.declare import option, schema
from maxhydra.config.errors import Problem
from maxhydra.config.schema.run import Task

LINES, ARRAYS = ".jsonl", ".npz"


@schema
class ScoreTask(Task):
    """Log-probabilities of given tokens under the model of checkpoint.load_parameters."""

    input: str = option()
    """Sequences: .jsonl with `text` or `ids` in each line, or .npz with `ids` [B, T] and, where rows are padded, `mask`
    [B, T], 1 for tokens and 0 for padding on whichever side."""
    output: str = option()
    """File to write, .jsonl or .npz, which appears when it is complete: `logprobs` of every token after the first, and
    `perplexity` of every sequence; in .npz also `ids` and `mask`, NaN where there is nothing to predict."""
    logits: bool = False
    """Write all logits after every token too, float32 [B, T, V]; .npz only."""
    batch: int = option(8, ge=1)
    """Sequences at a time, of about the same length."""

    def check(self) -> Iterator[Problem]:
        for name in ("input", "output"):
            value = getattr(self, name)
            if not value.endswith((LINES, ARRAYS)):
                yield Problem(name, "has another ending", value=value, accepted=f"a path with {LINES} or {ARRAYS}")
        if self.logits and not self.output.endswith(ARRAYS):
            yield Problem("logits", f"need an output with {ARRAYS}", value=True, hint=f"task.output=NAME{ARRAYS}")
