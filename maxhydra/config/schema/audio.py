"""Schema of the audio encoder and its projector."""

from collections.abc import Iterator
from enum import Enum
from typing import Any

from maxhydra.config.declare import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.feed_forward import Activation

# Convolutions with stride 2 before the encoder's layers.
NUM_CONVOLUTIONS = 3
MAX_FRAMES = 2**16


class AudioEncoder(Enum):
    transformer = "transformer"
    conformer = "conformer"


class AudioFeatures(Enum):
    centered_power = "centered_power"
    semicausal_magnitude = "semicausal_magnitude"


@schema
class Conformer(Schema):
    """audio.encoder=conformer: convolutions with stride 2, then layers of half a feed-forward, attention to a window, a
    depthwise convolution and half a feed-forward; no frame sees a later one."""

    conv_dims: list[int] = option([128, 32], ge=1, le=MAX_WIDTH)
    """Channels of the convolutions with stride 2; two of them turn four frames into a token."""
    kernel_size: int = option(5, ge=1, le=4096)
    """Tokens that the depthwise convolution of a layer combines."""
    window: int = option(12, ge=1, le=MAX_FRAMES)
    """Tokens that a token attends to, itself included."""
    softcap: float = option(50.0, gt=0)
    """Attention logits are softcap * tanh(logits / softcap)."""
    hidden_dim: int = option(1536, ge=1, le=MAX_WIDTH)
    """Width of the projector between its two projections."""
    clipped: bool = False
    """Whether inputs and outputs of projections are clipped to bounds that are loaded with the weights and not
    trained."""

    def check(self) -> Iterator[Problem]:
        if not self.conv_dims:
            yield Problem("conv_dims", "is empty", value=[], accepted="one or more channels, such as [128, 32]")


@schema
class Audio(Schema):
    """Audio in the prompt: convolutions over log-mel frames, then a transformer (Radford et al., 2022: Whisper) or a
    conformer (Gulati et al., 2020) whose outputs replace token embeddings."""

    num_layers: int | None = option(None, ge=1, le=MAX_LAYERS)
    """Layers of the audio encoder; null: the model takes no audio."""
    encoder: AudioEncoder = AudioEncoder.transformer
    """Layers of the encoder: those of Whisper, over windows of chunks, or of a conformer."""
    conformer: Conformer = section(Conformer)
    features: AudioFeatures = AudioFeatures.centered_power
    """Log-mel frames: power of centered frames, as of Whisper, or magnitude of frames after half a frame of zeros, for
    clips of up to 30 seconds at 16 kHz."""
    sampling_rate: int = option(16000, ge=1000, le=384_000)
    """Samples per second; files of other rates are resampled."""
    frame_length: int = option(400, ge=2, le=MAX_FRAMES)
    """Samples of a frame, of which the spectrum is computed."""
    hop_length: int = option(160, ge=1, le=MAX_FRAMES)
    """Samples from one frame to the next."""
    num_bands: int = option(128, ge=1, le=4096)
    """Mel bands of a frame."""
    chunk_frames: int = option(100, ge=1, le=MAX_FRAMES)
    """Frames of a chunk, over which convolutions and positions run; three convolutions with stride 2 turn 100 frames
    into 13 tokens."""
    window_chunks: int = option(8, ge=1, le=MAX_FRAMES)
    """Chunks whose tokens attend to each other."""
    conv_dim: int = option(480, ge=1, le=MAX_WIDTH)
    """Channels of the convolutions."""
    emb_dim: int = option(1280, ge=4, le=MAX_WIDTH)
    """Width of the encoder, an even number."""
    mlp_dim: int = option(5120, ge=1, le=MAX_WIDTH)
    """Hidden size of the encoder's feed-forward."""
    num_heads: int = option(20, ge=1, le=MAX_HEADS)
    """Attention heads of the encoder; divides audio.emb_dim."""
    activation: Activation = Activation.gelu
    """Activation of the encoder's feed-forward and of the projector."""
    norm_eps: float = option(1e-5, gt=0)
    """Added to the variance in the encoder's norms."""
    placeholder_id: int | None = option(None, ge=0)
    """Placeholder of one audio token; needed if num_layers is set."""
    begin_id: int | None = option(None, ge=0)
    """Token before the tokens of a clip; null: none."""
    end_id: int | None = option(None, ge=0)
    """Token after the tokens of a clip; null: none."""

    @property
    def token_ids(self) -> dict[str, int | None]:
        """Ids of tokens by key."""
        return {name: getattr(self, name) for name in ("placeholder_id", "begin_id", "end_id")}

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a whole chunk."""
        return halve(self.chunk_frames, NUM_CONVOLUTIONS)

    def num_frames(self, seconds: float) -> int:
        """Frames of a clip, at most; of a transformer rounded up to whole chunks."""
        if self.encoder is AudioEncoder.conformer:
            return max(1, -(-int(seconds * self.sampling_rate) // self.hop_length))
        frames = int(seconds * self.sampling_rate) // self.hop_length
        return max(1, -(-frames // self.chunk_frames)) * self.chunk_frames

    def num_tokens(self, frames: int) -> int:
        """Tokens of a clip."""
        if self.encoder is AudioEncoder.conformer:
            return int(halve(frames, len(self.conformer.conv_dims)))
        chunks, rest = divmod(frames, self.chunk_frames)
        return chunks * self.chunk_tokens + halve(rest, NUM_CONVOLUTIONS)

    def check(self) -> Iterator[Problem]:
        if self.num_layers is None:
            return
        if self.placeholder_id is None:
            reason = "is needed by models with an audio encoder"
            yield Problem("placeholder_id", reason, value=None, accepted="the id of a token")
        if self.emb_dim % 2:
            reason = "is odd, but sinusoidal positions are pairs of sine and cosine"
            yield Problem("emb_dim", reason, value=self.emb_dim, accepted="an even number")
        if self.emb_dim % self.num_heads:
            divisors = [str(number) for number in range(1, self.emb_dim + 1) if self.emb_dim % number == 0]
            reason = f"does not divide audio.emb_dim={self.emb_dim}"
            yield Problem("num_heads", reason, value=self.num_heads, accepted=", ".join(divisors))


def halve(length: Any, times: int) -> Any:
    """Length, a number or an array, after convolutions with stride 2, kernel size 3 and padding 1."""
    for _ in range(times):
        length = (length + 1) // 2
    return length
