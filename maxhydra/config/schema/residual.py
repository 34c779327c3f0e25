"""Schema of extensions of the residual stream: multipliers, hyper-connections, and a memory of n-grams."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import MAX_HEADS, MAX_VOCABULARY, MAX_WIDTH, Schema, option, schema
from maxhydra.config.errors import Problem


@schema
class Multipliers(Schema):
    """Constant factors on activations, as of models whose hyperparameters were tuned on a narrow one (Yang et al.,
    2022)."""

    embedding: float = option(1.0, gt=0)
    """Factor on the embeddings of tokens, in addition to embedding.scale."""
    branch: float = option(1.0, gt=0)
    """Factor on the output of every mixer and feed-forward before it is added to the residual stream."""
    logit_divisor: float = option(1.0, gt=0)
    """Logits are divided by this; the output of the final norm is, before the head."""


class StreamForm(Enum):
    summed = "summed"
    weighted = "weighted"


@schema
class HyperConnections(Schema):
    """Manifold-constrained hyper-connections (Xie et al., 2025): several residual streams, mixed at every branch."""

    streams: int = option(1, ge=1, le=16)
    """Residual streams, each of width emb_dim. A branch reads a weighted sum of them and is added to each by another
    weight; the weights depend on the token. 1: one stream, to which branches are added."""
    sinkhorn_iterations: int = option(20, ge=1, le=100)
    """Column and row normalizations by which the matrix that mixes the streams becomes doubly stochastic."""
    form: StreamForm = StreamForm.summed
    """summed: as published, with the sum of the streams before the final norm. weighted: as in DeepSeek-V4 (2026), with
    a weighted sum there, whose weights depend on the token as those of a branch do. Its norms have no scale, 1e-6 is
    added to the weights by which a branch reads and in the normalizations, and the mixing matrix is transposed."""

    def check(self) -> Iterator[Problem]:
        if self.streams == 1 and self.form is not StreamForm.summed:
            yield Problem("form", "is not used with streams=1", value=self.form.value, accepted="summed")


@schema
class Engram(Schema):
    """Engram (Cheng et al., 2026): a memory of n-grams. Rows of tables, looked up by hashes of the last tokens, are
    gated and added to the residual stream before the mixer."""

    vocab_sizes: list[int] = option([], ge=2, le=MAX_VOCABULARY)
    """Rows of the table of a hash head, by order of the n-grams: [A, B] for bigrams and trigrams. Heads of an order
    have the next primes from there on. []: no memory."""
    num_heads: int = option(8, ge=1, le=MAX_HEADS)
    """Hash heads of each order."""
    head_dim: int = option(1280, ge=1, le=MAX_WIDTH)
    """Width of a row."""
    kernel_size: int = option(4, ge=1, le=64)
    """Taps of the causal convolution over the memory, as far apart as the longest n-gram."""
    seed: int = option(0, ge=0)
    """Seed of the hash functions."""

    def check(self) -> Iterator[Problem]:
        for name in ("num_heads", "head_dim", "kernel_size", "seed"):
            value = getattr(self, name)
            if not self.vocab_sizes and value != getattr(type(self), name):
                hint = "set vocab_sizes, such as [200000,200000] for bigrams and trigrams"
                yield Problem(name, "is not used without vocab_sizes", value=value, hint=hint)
