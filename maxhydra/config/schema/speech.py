"""Schema of the modules that speak the response of a model: talker, code predictor and vocoder."""

from collections.abc import Iterator

from maxhydra.config.declare import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    Schema,
    option,
    schema,
    section,
)
from maxhydra.config.errors import Problem
from maxhydra.config.schema.feed_forward import Activation

MAX_STAGES, MAX_CODEBOOKS = 16, 256
# Dilations of the residual units of a stage of the vocoder.
DILATIONS = (1, 3, 9)


@schema
class SpeechDecoder(Schema):
    """Layers of a decoder of codes: attention and a gated feed-forward, each after an RMSNorm."""

    num_layers: int = option(5, ge=1, le=MAX_LAYERS)
    """Number of layers."""
    emb_dim: int = option(1024, ge=1, le=MAX_WIDTH)
    """Width of the residual stream."""
    mlp_dim: int = option(3072, ge=1, le=MAX_WIDTH)
    """Hidden size of the feed-forward."""
    num_heads: int = option(16, ge=1, le=MAX_HEADS)
    """Query heads."""
    num_kv_heads: int = option(8, ge=1, le=MAX_HEADS)
    """Key and value heads; divides num_heads."""
    head_dim: int = option(128, ge=2, le=MAX_WIDTH)
    """Dimension of a head."""
    activation: Activation = Activation.silu
    """Activation of the feed-forward."""
    norm_eps: float = option(1e-6, gt=0)
    """Added to the mean square in norms."""
    rope_theta: float = option(10000.0, gt=0)
    """Base of the wavelengths of RoPE."""

    def check(self) -> Iterator[Problem]:
        if self.num_heads % self.num_kv_heads:
            reason, accepted = f"does not divide num_heads={self.num_heads}", f"a divisor of {self.num_heads}"
            yield Problem("num_kv_heads", reason, value=self.num_kv_heads, accepted=accepted)
        if self.head_dim % 2:
            yield Problem("head_dim", "is odd, but RoPE rotates pairs", value=self.head_dim, accepted="an even number")


@schema
class Talker(SpeechDecoder):
    """A decoder with a mixture of experts over the codes of the first codebook; mlp_dim is the hidden size of the two
    projections from the width of the model."""

    vocab_size: int = option(3072, ge=2, le=MAX_VOCABULARY)
    """Rows of the embedding: codes of the first codebook, then special codes."""
    special_codes: int = option(1024, ge=1, le=MAX_VOCABULARY)
    """Special codes at the end of the vocabulary, of which only end_code is generated."""
    context_length: int = option(32768, ge=1, le=MAX_CONTEXT)
    """Maximum number of positions: those of the text that the talker reads, and one for each frame."""
    experts: int = option(128, ge=2, le=MAX_EXPERTS)
    """Number of experts per layer."""
    top_k: int = option(8, ge=1, le=MAX_EXPERTS)
    """Number of experts per position."""
    expert_dim: int = option(384, ge=1, le=MAX_WIDTH)
    """Hidden size of an expert."""
    shared_dim: int = option(768, ge=1, le=MAX_WIDTH)
    """Hidden size of the shared expert, whose output is multiplied by the sigmoid of a projection."""
    normalize: bool = True
    """Divide the routing weights of the chosen experts by their sum."""
    sections: list[int] = option([24, 20, 20])
    """Pairs of a head that turn with time, row and column of an image token."""
    hidden_layer: int = option(18, ge=1, le=MAX_LAYERS)
    """Layer of the model after which the talker reads the residual stream at tokens of images and audio."""
    speakers: dict[str, int] = option({})
    """Code of each voice, by its name."""
    end_code: int = option(2150, ge=0)
    """Code that ends the speech."""
    prompt_codes: list[int] = option([2155, 2156, 2157])
    """Codes before that of the voice."""
    pad_code: int = option(2148, ge=0)
    """Code after that of the voice."""
    begin_code: int = option(2149, ge=0)
    """Code before the first frame."""

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        if self.top_k > self.experts:
            reason = f"is more than experts={self.experts}"
            yield Problem("top_k", reason, value=self.top_k, accepted=f"1 to {self.experts}")
        if self.special_codes >= self.vocab_size:
            reason = f"leaves no codes of vocab_size={self.vocab_size}"
            yield Problem("special_codes", reason, value=self.special_codes, accepted=f"1 to {self.vocab_size - 1}")
        if 2 * sum(self.sections) != self.head_dim or len(self.sections) != 3:
            reason = f"are not the pairs of head_dim={self.head_dim} in three sections"
            accepted = f"three numbers with the sum {self.head_dim // 2}"
            yield Problem("sections", reason, value=self.sections, accepted=accepted)
        codes = {"end_code": self.end_code, "pad_code": self.pad_code, "begin_code": self.begin_code}
        codes |= {"prompt_codes": max(self.prompt_codes, default=0)}
        codes |= {f"speakers.{name}": code for name, code in self.speakers.items()}
        for path, code in codes.items():
            if not 0 <= code < self.vocab_size:
                reason = f"is not one of vocab_size={self.vocab_size} codes"
                yield Problem(path, reason, value=code, accepted=f"0 to {self.vocab_size - 1}")


@schema
class Vocoder(SpeechDecoder):
    """Turns frames of codes into a waveform: decoder layers with a sliding window, then transposed convolutions.
    ConvNeXt blocks (Liu et al., 2022) follow the first ones, residual units with Snake activations (Ziyin et al., 2020)
    the others."""

    window: int = option(72, ge=1, le=MAX_CONTEXT)
    """Frames that a frame attends to: itself and the window - 1 frames before it."""
    conv_dim: int = option(1536, ge=2, le=MAX_WIDTH)
    """Channels of the convolutions; each stage of `rates` halves them."""
    ratios: list[int] = option([2, 2])
    """Upsampling factors of the stages with ConvNeXt blocks."""
    rates: list[int] = option([8, 5, 4, 3])
    """Upsampling factors of the stages with residual units."""
    sampling_rate: int = option(24000, ge=1000, le=384_000)
    """Samples per second of the waveform."""

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        for name, factors in {"ratios": self.ratios, "rates": self.rates}.items():
            if not 1 <= len(factors) <= MAX_STAGES or min(factors) < 1:
                accepted = f"1 to {MAX_STAGES} factors of 1 or more"
                yield Problem(name, "is not a list of upsampling factors", value=factors, accepted=accepted)
        if self.conv_dim % 2 ** len(self.rates):
            reason = f"cannot be halved by each of the {len(self.rates)} stages of rates"
            yield Problem("conv_dim", reason, value=self.conv_dim, accepted=f"a multiple of {2 ** len(self.rates)}")


@schema
class Speech(Schema):
    """Speech for the response: a talker writes frames of codes, one for each codebook, and a vocoder turns them into a
    waveform (Qwen3-Omni, 2025)."""

    codebooks: int | None = option(None, ge=2, le=MAX_CODEBOOKS)
    """Codes of a frame: the first is that of the talker, the others those of the code predictor. null: the model does
    not speak."""
    codebook_size: int = option(2048, ge=2, le=MAX_VOCABULARY)
    """Codes of a codebook."""
    begin_id: int | None = option(None, ge=0)
    """Token before the text that the talker speaks."""
    end_id: int | None = option(None, ge=0)
    """Token after the text that the talker speaks."""
    pad_id: int | None = option(None, ge=0)
    """Token of positions without text."""
    turn_id: int | None = option(None, ge=0)
    """Token that begins a turn, before the role."""
    user_id: int | None = option(None, ge=0)
    """Token of the role of turns that the talker reads."""
    assistant_id: int | None = option(None, ge=0)
    """Token of the role of turns that it speaks."""
    talker: Talker = section(Talker)
    code_predictor: SpeechDecoder = section(SpeechDecoder)
    vocoder: Vocoder = section(Vocoder)

    @property
    def token_ids(self) -> dict[str, int | None]:
        """Ids of tokens by key."""
        names = ("begin_id", "end_id", "pad_id", "turn_id", "user_id", "assistant_id")
        return {name: getattr(self, name) for name in names}

    def check(self) -> Iterator[Problem]:
        if self.codebooks is None:
            return
        for name, id in self.token_ids.items():
            if id is None:
                yield Problem(name, "is needed by models that speak", value=None, accepted="the id of a token")
        if self.code_predictor.emb_dim != self.talker.emb_dim:
            reason = "differs from the width of the talker, whose outputs the code predictor reads"
            yield Problem("code_predictor.emb_dim", reason, self.code_predictor.emb_dim, str(self.talker.emb_dim))
        if self.talker.vocab_size - self.talker.special_codes > self.codebook_size:
            reason = f"gives the talker codes beyond codebook_size={self.codebook_size}"
            least = self.talker.vocab_size - self.codebook_size
            accepted = f"{least} or more"
            yield Problem("talker.special_codes", reason, value=self.talker.special_codes, accepted=accepted)
