"""Schema of benchmarks: the tasks that task=eval and train.evals run on a model."""

from collections.abc import Iterator
from pathlib import PurePath

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem


@schema
class Benchmarks(Schema):
    """Evaluation tasks, and the number of their questions."""

    tasks: list[str] = option([])
    """Names of tasks: arithmetic, reasoning_gym, cloze, needle, plays; YAML files of yours; tasks of lm-eval, such as
    hellaswag."""
    limit: int | None = option(None, ge=1)
    """Maximum number of questions of each task. null: all."""
    shots: int | None = option(None, ge=0)
    """Solved questions in the prompt. null: as each task says."""
    harness_path: str | None = None
    """Folder of further lm-eval task files. null: only those that lm-eval includes."""
    batch: int = option(8, ge=1)
    """Sequences per batch whose log-likelihoods are computed together."""


@schema
class TrainEvals(Benchmarks):
    """Benchmarks during training, on the weights in memory: metrics eval/TASK/METRIC."""

    batch: int = option(8, ge=1)
    """Sequences that are scored, or completed, together."""
    every: int | None = option(None, ge=1)
    """Steps between runs of the tasks, a multiple of train.eval_every; the last step always runs them. null: in every
    evaluation."""
    max_context: int | None = option(None, ge=2)
    """Maximum tokens of prompt plus completion; a longer prompt loses its start. null: train.seq_len."""

    def names(self) -> list[str]:
        """Names of the tasks in metrics."""
        return [PurePath(name).stem for name in self.tasks]

    def metrics(self) -> list[str]:
        """Patterns of the metrics; a task of lm-eval may be a group, whose tasks have other names."""
        return [f"eval/{name}*/*" for name in self.names()]

    def check_interval(self, eval_every: int) -> Iterator[Problem]:
        """Yield the problem of an interval at which no evaluation takes place; paths are relative to train."""
        if self.every is not None and (not eval_every or self.every % eval_every):
            accepted = f"null, or a multiple of {eval_every}" if eval_every else "null, or train.eval_every over 0"
            reason = f"is not a multiple of eval_every={eval_every}"
            yield Problem("evals.every", reason, value=self.every, accepted=accepted)
