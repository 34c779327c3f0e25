"""Schema of a layer kind: its mixer, its feed-forward, and how the residual stream connects them."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import MAX_WIDTH, Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.attention import Attention, Delta, Mla
from maxhydra.config.schema.compressed import CompressedAttention
from maxhydra.config.schema.feed_forward import Mlp, Moe, ParallelMoe
from maxhydra.config.schema.plug_in import PlugIn
from maxhydra.config.schema.recurrence import Convolution, Ssm
from maxhydra.config.schema.residual import Engram


class Norms(Enum):
    pre = "pre"
    post = "post"
    sandwich = "sandwich"


class Mixer(Enum):
    attention = "attention"
    compressed = "compressed"
    convolution = "convolution"
    delta = "delta"
    mla = "mla"
    ssm = "ssm"
    none = "none"
    own_mixer = "own_mixer"


class FeedForward(Enum):
    mlp = "mlp"
    moe = "moe"
    none = "none"
    own_feed_forward = "own_feed_forward"


@schema
class Kind(Schema):
    """One kind of layer: x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    norms: Norms = Norms.pre
    """Norm placement: on the input of mixer and feed-forward (pre), on their output (post), or both (sandwich)."""
    mixer: Mixer = Mixer.attention
    """Token mixer; configured in the section of the same name. own_mixer: one of yours. none: a layer without a mixer
    and its norms, x + feed_forward(norm(x))."""
    attention: Attention = section(Attention)
    compressed: CompressedAttention = section(CompressedAttention)
    convolution: Convolution = section(Convolution)
    delta: Delta = section(Delta)
    mla: Mla = section(Mla)
    ssm: Ssm = section(Ssm)
    own_mixer: PlugIn = section(PlugIn)
    feed_forward: FeedForward = FeedForward.mlp
    """Per-token layer; configured in the section of the same name. own_feed_forward: one of yours. none: a layer
    without a feed-forward and its norms, x + mixer(norm(x))."""
    mlp: Mlp = section(Mlp)
    moe: Moe = section(Moe)
    own_feed_forward: PlugIn = section(PlugIn)
    parallel_moe: ParallelMoe = ParallelMoe.none
    """moe: a mixture of experts (section moe) in parallel with feed_forward=mlp, each followed by its own norm."""
    latent_dim: int | None = option(None, ge=1, le=MAX_WIDTH)
    """Width between mixer and feed-forward, which then form one residual branch: x + up(feed_forward(norm(mixer(
    norm(x))))), up a projection from latent_dim to emb_dim. null: two branches of the width of the residual stream."""
    engram: Engram = section(Engram)
    is_scaled: bool = False
    """Multiply the layer's output by a per-layer constant that is loaded with the weights and not trained."""

    @property
    def is_recurrent(self) -> bool:
        """True if the mixer keeps a state of fixed size per sequence."""
        return self.mixer in (Mixer.compressed, Mixer.convolution, Mixer.delta, Mixer.ssm)

    def check(self) -> Iterator[Problem]:
        yield from self._check_latent()
        if self.mixer is Mixer.none and self.feed_forward is FeedForward.none:
            accepted = "mlp, moe, own_feed_forward, or another mixer"
            yield Problem("feed_forward", "leaves a layer without mixer and feed-forward", "none", accepted)
        yield from self.own_mixer.check_use("own_mixer", self.mixer)
        yield from self.own_feed_forward.check_use("own_feed_forward", self.feed_forward)
        is_mixture = self.feed_forward is FeedForward.moe or self.parallel_moe is ParallelMoe.moe
        if is_mixture and self.moe.experts is None:
            user = "feed_forward" if self.feed_forward is FeedForward.moe else "parallel_moe"
            yield Problem("moe.experts", f"is needed by {user}=moe", value=None, accepted="an integer, 2 or more")
        if self.parallel_moe is ParallelMoe.moe and self.feed_forward is not FeedForward.mlp:
            yield Problem("parallel_moe", "requires feed_forward=mlp", value="moe", accepted="none")
        if self.parallel_moe is ParallelMoe.moe and self.moe.router.bias_rate is not None:
            reason = "requires feed_forward=moe: a parallel MoE has no router bias for load balancing"
            yield Problem("moe.router.bias_rate", reason, value=self.moe.router.bias_rate, accepted="null")
        if not is_mixture and self.moe.experts is not None:
            hint = "set feed_forward=moe or parallel_moe=moe, or leave it null"
            reason = f"is not used by feed_forward={self.feed_forward.value}"
            yield Problem("moe.experts", reason, value=self.moe.experts, hint=hint)

    def _check_latent(self) -> Iterator[Problem]:
        """One residual branch has one place for a norm before and after each sub-layer, and no parallel MoE."""
        if self.latent_dim is not None and self.engram.vocab_sizes:
            reason, sizes = "is not supported with latent_dim", self.engram.vocab_sizes
            yield Problem("engram.vocab_sizes", reason, value=sizes, accepted="[], or latent_dim=null")
        if self.latent_dim is None:
            return
        required = {
            "mixer": (self.mixer, Mixer.attention),
            "norms": (self.norms, Norms.pre),
            "parallel_moe": (self.parallel_moe, ParallelMoe.none),
        }
        for path, (value, accepted) in required.items():
            if value is not accepted:
                yield Problem(path, "is not supported with latent_dim", value=value.value, accepted=accepted.value)
        if self.feed_forward is FeedForward.none:
            yield Problem("feed_forward", "is not supported with latent_dim", value="none", accepted="mlp, moe")
