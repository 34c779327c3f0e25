"""Distillation from a teacher with another tokenizer: both tokenizations of a completion are aligned by their text.

A span is a shortest part of the text that begins and ends at token boundaries of both. With s the student's log-prob
of a span and t the teacher's, each the sum over its tokens, the loss of a completion that the student sampled is the
sum of (s - t)^2 / 2. Its expected gradient is that of KL(student | teacher) over spans (k2; Schulman, 2020).

B rows, S positions.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.data import Row, Tokenizer
from maxhydra.distill.loss import TEACHER
from maxhydra.train import Scorer
from maxhydra.train.loss import Batch, LossFn, Sums, Tree, add_aux_losses

# Columns of a row: the text as the teacher's tokens, and the span of each target of student and teacher; -1 for none.
TEACHER_COLUMNS = {name: f"teacher_{name}" for name in ("tokens", "targets", "positions")}
SPANS, TEACHER_SPANS = "spans", "teacher_spans"
# Column of the log-probs of a teacher on its own devices.
LOGPROBS = "teacher_logprobs"
# Letters of several scripts, digits, spaces and line breaks, which both tokenizers must preserve.
PROBE = "Naïve  café: 1 + 23 = 24?\n\tдом 日本語 🎭"


def token_ends(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | None]:
    """The position in the text after each token; None within a character, and for tokens without text."""
    text, ends, previous = tokenizer.decode(ids), [], 0
    for count in range(1, len(ids) + 1):
        prefix = tokenizer.decode(ids[:count])
        is_end = len(prefix) > previous and text.startswith(prefix)
        ends.append(len(prefix) if is_end else None)
        previous = len(prefix) if is_end else previous
    return ends


def spans_of(ends: Sequence[int | None], boundaries: Sequence[int]) -> list[int]:
    """The span of each token, if spans end at the `boundaries`; -1 after the last one."""
    spans, span = [], 0
    for end in ends:
        spans.append(span if span < len(boundaries) else -1)
        span += span < len(boundaries) and end == boundaries[span]
    return spans


@dataclasses.dataclass(frozen=True)
class TextAligner:
    """Adds to the row of a completion its text as tokens of the teacher, and the spans of both."""

    student: Tokenizer
    teacher: Tokenizer

    def check(self, weights: str | None) -> None:
        """Raise ConfigError if a tokenizer changes texts, so that spans have no common positions."""
        for name, tokenizer in (("teacher", self.teacher), ("student", self.student)):
            if (found := tokenizer.decode(tokenizer.encode(PROBE))) != PROBE:
                reason = f"cannot be aligned by text: the {name}'s tokenizer reads {PROBE!r} as {found!r}"
                hint = "use a teacher and a student whose tokenizers preserve texts, such as byte-level BPE"
                raise ConfigError(Problem("task.teacher.align", reason, value=weights, hint=hint))

    def __call__(self, row: Row) -> Row:
        """A row without a completion, or whose text the teacher's row does not hold, has weights 0."""
        size = len(row["tokens"])
        columns: Row = {name: np.zeros(size, np.int32) for name in TEACHER_COLUMNS.values()}
        columns |= {name: np.full(size, -1, np.int32) for name in (SPANS, TEACHER_SPANS)}
        aligned: Row = {**row, **columns}
        (trained,) = np.nonzero(row["weights"])
        if not len(trained):
            return aligned
        start, end = int(trained[0]), int(trained[-1]) + 1
        prompt, completion = row["tokens"][: start + 1].tolist(), row["targets"][start:end].tolist()
        head = self._prompt(prompt)
        ids, spans, teacher_spans = self._align(completion)
        targets = slice(len(head) - 1, len(head) - 1 + len(ids))
        if targets.stop > size or not ids:
            return {**aligned, "weights": np.zeros_like(row["weights"])}
        whole = np.array([*head, *ids], np.int32)
        aligned[TEACHER_COLUMNS["tokens"]][: targets.stop] = whole[:-1]
        aligned[TEACHER_COLUMNS["targets"]][: targets.stop] = whole[1:]
        aligned[TEACHER_COLUMNS["positions"]][: targets.stop] = np.arange(targets.stop)
        aligned[SPANS][start:end], aligned[TEACHER_SPANS][targets] = spans, teacher_spans
        return {**aligned, "weights": row["weights"] * (aligned[SPANS] >= 0)}

    def _prompt(self, ids: Sequence[int]) -> list[int]:
        """The teacher's bos, and the text of the prompt without the special tokens of the student's template."""
        first = self.teacher.pad if self.teacher.bos is None else self.teacher.bos
        return [first, *self.teacher.encode(self.student.decode(ids))]

    def _align(self, completion: list[int]) -> tuple[list[int], list[int], list[int]]:
        """The teacher's tokens of a completion, and the spans of the student's and of the teacher's tokens.

        The tokens that end the completion, eos of both, are the last span.
        """
        has_end = bool(completion) and completion[-1] == self.student.eos and self.teacher.eos is not None
        sampled = completion[:-1] if has_end else completion
        ids = self.teacher.encode(self.student.decode(sampled))
        ends = [token_ends(tokenizer, tokens) for tokenizer, tokens in ((self.student, sampled), (self.teacher, ids))]
        common = sorted({end for end in ends[0] if end is not None} & {end for end in ends[1] if end is not None})
        spans, teacher_spans = (spans_of(each, common) for each in ends)
        # The teacher does not see special tokens that the student sampled.
        spans = [-1 if id in self.student.special else span for id, span in zip(sampled, spans, strict=True)]
        if not has_end:
            return ids, spans, teacher_spans
        assert self.teacher.eos is not None
        return [*ids, self.teacher.eos], [*spans, len(common)], [*teacher_spans, len(common)]


def teacher_columns(batch: Batch) -> Batch:
    """The batch in the teacher's tokens."""
    return {name: batch[column] for name, column in TEACHER_COLUMNS.items()}


def aligned_loss(student: Scorer, teacher: Scorer | None) -> LossFn:
    """The loss of spans, as a mean over the student's tokens, and `divergence`, the mean of s - t.

    Without a teacher, its log-probs are a column of the batch.
    """

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        scored = student.score(weights, batch, key, is_adapted=True)
        if teacher is None:
            teacher_logprobs = batch[LOGPROBS]
        else:
            teacher_logprobs = teacher(weights[TEACHER], teacher_columns(batch), None, is_adapted=True)
            teacher_logprobs = jax.lax.stop_gradient(teacher_logprobs)
        distances = span_sums(scored.logprobs, batch[SPANS]) - span_sums(teacher_logprobs, batch[TEACHER_SPANS])
        sums = {"loss": jnp.sum(jnp.square(distances)) / 2, "weight": jnp.sum(batch["weights"])}
        sums["divergence"] = jax.lax.stop_gradient(jnp.sum(distances))
        return add_aux_losses(sums, scored.aux)

    return loss


def span_sums(values_BS: jax.Array, spans_BS: jax.Array) -> jax.Array:
    """[B, S]: the sum of the values of each span; a row has at most S spans."""
    size = values_BS.shape[1]
    values_BS, targets = jnp.where(spans_BS >= 0, values_BS, 0), jnp.where(spans_BS >= 0, spans_BS, size)
    return jax.vmap(lambda values, spans: jax.ops.segment_sum(values, spans, size + 1)[:size])(values_BS, targets)


def student_likelihood(student: Scorer) -> LossFn:
    """The evaluation loss: nll of the data. The teacher's distribution over other tokens cannot be compared."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        nll = -jnp.sum(batch["weights"] * student(weights, batch, key, is_adapted=True))
        return {"loss": nll, "nll": nll, "weight": jnp.sum(batch["weights"])}

    return loss
