"""Speech of a model: the talker, the code predictor and the vocoder, as pure functions over a tree of weights.

The talker is a decoder over codes of the first codebook. It reads the text of the model through a projection of the
token embeddings, and images and audio through a projection of the model's hidden states. The code predictor is a
decoder over the codebooks of one frame. The vocoder turns frames of codes into a waveform. B batch, T positions, D
residual stream, G codebooks, F frames, V codes.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.config.schema.speech import Speech, SpeechDecoder, Talker
from maxhydra.kernels.matmul import Layout
from maxhydra.layers import Context, DenseCacheSpec, Dtypes, MatmulSpec, ParamBuilder
from maxhydra.layers.mlp import ACTIVATIONS
from maxhydra.layers.waveform import UpsampleUnit, WaveDecoder, samples_per_frame
from maxhydra.layers.weight_sampler import Sizes
from maxhydra.model.block import Block, BlockSpec
from maxhydra.model.pattern import cache_view, merge_view
from maxhydra.sharding import Sharder

T = TypeVar("T")
Tree = Any
# Kind of the layers of each decoder.
LAYER = "layer"
# Initial scale of the output of a branch in the vocoder.
BRANCH_SCALE = 0.01
# Chooses a code [B] from logits [B, V]; the second argument is the number of the codebook in its frame.
Choose = Callable[[jax.Array, jax.Array], jax.Array]


def _section(build: Callable[..., T], **values: Any) -> T:
    """A section of the config with these values, and defaults of the others."""
    return build(**values)


def _decoder_config(section: SpeechDecoder, model: config.Model, kind: config.Kind) -> config.Model:
    """The config of a decoder whose layers are all of one kind, for its blocks."""
    return _section(
        config.Model,
        num_layers=section.num_layers,
        emb_dim=section.emb_dim,
        mlp_dim=section.mlp_dim,
        num_heads=section.num_heads,
        num_kv_heads=section.num_kv_heads,
        head_dim=section.head_dim,
        vocab_size=2,
        context_length=model.context_length,
        kinds={LAYER: kind},
        norm_eps=section.norm_eps,
        init_scale=model.init_scale,
        dtypes=model.dtypes,
        expert_parallel=model.expert_parallel,
        kernels=model.kernels,
        vision=model.vision,
    )


def _talker_kind(talker: Talker) -> config.Kind:
    moe = _section(
        config.Moe,
        experts=talker.experts,
        top_k=talker.top_k,
        dim=talker.expert_dim,
        activation=talker.activation,
        router=_section(config.Router, normalize=talker.normalize),
        shared=_section(config.Shared, dim=talker.shared_dim, gate=config.Gate.sigmoid),
    )
    rope = _section(config.Rope, theta=talker.rope_theta, sections=talker.sections)
    attention = _section(config.Attention, qk_norm=config.QkNorm.head, rope=rope)
    return _section(config.Kind, attention=attention, feed_forward=config.FeedForward.moe, moe=moe)


def _dense_kind(section: SpeechDecoder, *, qk_norm: config.QkNorm, window: int | None) -> config.Kind:
    rope = _section(config.Rope, theta=section.rope_theta)
    attention = _section(config.Attention, qk_norm=qk_norm, window=window, rope=rope)
    return _section(config.Kind, attention=attention, mlp=_section(config.Mlp, activation=section.activation))


class ChannelScale(nnx.Module):
    """A factor for each channel of the output of a branch (Touvron et al., 2021)."""

    def __init__(self, channels: int, make: ParamBuilder):
        self.scale = make.full((channels,), ("norm",), BRANCH_SCALE)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scale[...].astype(x.dtype)


class ScaledBlock(Block):
    """A block whose branches end with a factor for each channel."""

    def __init__(self, spec: BlockSpec, make: ParamBuilder):
        super().__init__(spec, make)
        self.attention_post_norm: Any = nnx.data(ChannelScale(spec.emb_dim, make))
        self.mlp_post_norm: Any = nnx.data(ChannelScale(spec.emb_dim, make))


class Stack(nnx.Module):
    """Layers of one kind with stacked weights, and a final norm."""

    def __init__(self, model: config.Model, make: ParamBuilder, block: type[Block] = Block):
        spec = BlockSpec.of(model, LAYER)
        self.num_layers = model.num_layers
        self.layers = block(spec, make.stacked(model.num_layers))
        self.final_norm = spec.norm.build(model.emb_dim, make)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Any]:
        """Hidden states after the final norm, and the cache with these positions."""
        graphdef, stacked = nnx.split(self.layers)

        def run(carry: tuple[jax.Array, Any], layer: tuple[jax.Array, Any]) -> tuple[tuple[jax.Array, Any], None]:
            (x_BTD, cache), (index, weights) = carry, layer
            out = nnx.merge(graphdef, weights)(x_BTD, ctx.at_layer(index, cache_view(cache, index), None))
            return (out.x_BTD, merge_view(cache, out.cache)), None

        layers = (jnp.arange(self.num_layers), stacked)
        (x_BTD, cache), _ = jax.lax.scan(run, (x_BTD, ctx.cache), layers)
        return self.final_norm(x_BTD), cache

    def empty_cache(self, rows: int, length: int) -> Any:
        return self.layers.empty_cache(DenseCacheSpec(rows, length), self.num_layers)


class Resize(nnx.Module):
    """out(activation(hidden(x))), from the width of the model to that of the talker."""

    def __init__(self, inputs: int, talker: Talker, make: ParamBuilder):
        self.activation = ACTIVATIONS[talker.activation]
        build = partial(make.projection, scale=1.0, has_bias=True)
        self.hidden = build("hidden", (inputs,), (talker.mlp_dim,), ("embed", "mlp"))
        self.out = build("out", (talker.mlp_dim,), (talker.emb_dim,), ("mlp", "embed"))

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        return self.out(self.activation(self.hidden(x, ctx)), ctx)


class TalkerDecoder(nnx.Module):
    """Embedding and head over codes of the first codebook, layers, and projections of text and hidden states."""

    def __init__(self, model: config.Model, make: ParamBuilder):
        talker = model.speech.talker
        V, D = talker.vocab_size, talker.emb_dim
        self.embedding = make.matrix((V,), (D,), ("vocab", "embed"), std=D**-0.5)
        self.decoder = Stack(_decoder_config(talker, model, _talker_kind(talker)), make)
        self.head = make.projection("head", (D,), (V,), ("embed", "vocab"), scale=1.0)
        self.text, self.hidden = Resize(model.emb_dim, talker, make), Resize(model.emb_dim, talker, make)


class CodePredictor(nnx.Module):
    """Embeddings and heads over the codes of all codebooks but the first, and layers."""

    def __init__(self, model: config.Model, make: ParamBuilder):
        speech, section = model.speech, model.speech.code_predictor
        assert speech.codebooks is not None
        G, V, D = speech.codebooks - 1, speech.codebook_size, section.emb_dim
        self.embeddings = make.matrix((G, V), (D,), (None, "vocab", "embed"), std=D**-0.5)
        kind = _dense_kind(section, qk_norm=config.QkNorm.head, window=None)
        self.decoder = Stack(_decoder_config(section, model, kind), make)
        self.heads = make.matrix((G, D), (V,), (None, "embed", "vocab"), std=D**-0.5)


class VocoderModule(nnx.Module):
    """Mean embedding of the codes of a frame, layers with a window, and upsampling to the waveform."""

    def __init__(self, model: config.Model, make: ParamBuilder):
        speech, section = model.speech, model.speech.vocoder
        assert speech.codebooks is not None
        D, self.codebook_size, dtypes = section.emb_dim, speech.codebook_size, Dtypes.of(model.dtypes)
        self.embedding = make.matrix((speech.codebooks * speech.codebook_size,), (D,), ("vocab", "embed"), std=D**-0.5)
        kind = _dense_kind(section, qk_norm=config.QkNorm.none, window=section.window)
        self.decoder = Stack(_decoder_config(section, model, kind), make, ScaledBlock)
        units = (UpsampleUnit(D, ratio, dtypes, make) for ratio in section.ratios)
        self.upsample = nnx.Dict({str(index): unit for index, unit in enumerate(units)})
        self.wave = WaveDecoder(D, section.conv_dim, section.rates, make)
        self.dtype = dtypes.compute

    def __call__(self, codes_BFG: jax.Array, ctx: Context) -> jax.Array:
        rows_BFG = codes_BFG + jnp.arange(codes_BFG.shape[-1]) * self.codebook_size
        x_BFD = jnp.mean(self.embedding[...][rows_BFG].astype(self.dtype), axis=2)
        x_BTD = self.decoder(x_BFD, ctx)[0]
        for index in range(len(self.upsample)):
            x_BTD = self.upsample[str(index)](x_BTD)
        out: jax.Array = self.wave(x_BTD)
        return out


class SpeechModule(nnx.Module):
    """The three modules of a model that speaks."""

    def __init__(self, model: config.Model, make: ParamBuilder):
        self.talker = TalkerDecoder(model, make.below("talker"))
        self.code_predictor = CodePredictor(model, make.below("code_predictor"))
        self.vocoder = VocoderModule(model, make.below("vocoder"))


@dataclasses.dataclass(frozen=True)
class SpeechDef:
    """The speech of a model without its weights. All functions take the tree of its weights first."""

    config: config.Model

    @property
    def section(self) -> Speech:
        return self.config.speech

    @cached_property
    def _traced(self) -> tuple[SpeechModule, Sizes]:
        sizes: Sizes = {}
        return nnx.eval_shape(lambda: self._module(None, sizes)), sizes

    def _module(self, key: jax.Array | None, sizes: Sizes) -> SpeechModule:
        dtypes, layout = Dtypes.of(self.config.dtypes), Layout(self.config.kernels.projection.value)
        # Neither adapters nor quantization: nothing is trained, and the modules are small.
        matmul_spec = MatmulSpec(compute=dtypes.compute, layout=layout, is_fused=False)
        make = ParamBuilder(key, dtype=dtypes.weights, layers=None, matmul_spec=matmul_spec, sizes=sizes)
        return SpeechModule(self.config, make)

    @cached_property
    def shapes(self) -> Tree:
        """Tree of the shape and dtype of every weight."""
        return nnx.to_pure_dict(nnx.state(self._traced[0]))

    @cached_property
    def axes(self) -> Tree:
        """Tree of the logical axes of every weight."""
        weights = nnx.to_flat_state(nnx.state(self._traced[0]))
        return nnx.traversals.unflatten_mapping({path: weight.get_metadata("axes") for path, weight in weights})

    def init(self, key: jax.Array) -> Tree:
        """Initial weights."""
        return nnx.to_pure_dict(nnx.state(self._module(key, self._traced[1])))

    def _bind(self, params: Tree) -> SpeechModule:
        return nnx.merge(nnx.graphdef(self._traced[0]), params)

    def project_text(self, params: Tree, embeddings_BTE: jax.Array) -> jax.Array:
        """Inputs [B, T, D] of the talker for the token embeddings of the model."""
        return self._bind(params).talker.text(embeddings_BTE, _context(embeddings_BTE))

    def project_hidden(self, params: Tree, hidden_BTE: jax.Array) -> jax.Array:
        """Inputs [B, T, D] of the talker for the residual stream of the model after talker.hidden_layer."""
        return self._bind(params).talker.hidden(hidden_BTE, _context(hidden_BTE))

    def embed_codes(self, params: Tree, codes_BT: jax.Array) -> jax.Array:
        """Inputs [B, T, D] of the talker for codes of the first codebook."""
        rows: jax.Array = self._bind(params).talker.embedding[...][codes_BT]
        return rows.astype(self._compute)

    def talker_cache(self, rows: int, length: int) -> Any:
        """The empty cache of the talker."""
        return self._traced[0].talker.decoder.empty_cache(rows, length)

    def talk(self, params: Tree, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, Any]:
        """Hidden states [B, T, D] of the talker, its logits [B, T, V] of the next code, and the cache."""
        talker = self._bind(params).talker
        hidden_BTD, cache = talker.decoder(x_BTD.astype(self._compute), ctx)
        return hidden_BTD, talker.head(hidden_BTD, ctx).astype(jnp.float32), cache

    def predictor_logits(self, params: Tree, hidden_BD: jax.Array, codes_BG: jax.Array) -> jax.Array:
        """[B, G - 1, V] logits of all codes of a frame but the first, given the codes before each.

        `hidden_BD`: hidden state of the talker that gave the first code.
        """
        module = self._bind(params)
        inputs_BGD = jnp.concatenate(
            [hidden_BD[:, None], self._frame_embeddings(module, codes_BG)[:, :-1]], axis=1
        ).astype(self._compute)
        hidden_BGD, _ = module.code_predictor.decoder(inputs_BGD, _context(inputs_BGD))
        heads_GDV = module.code_predictor.heads[...].astype(self._compute)
        return jnp.einsum("BGD,GDV->BGV", hidden_BGD[:, 1:], heads_GDV).astype(jnp.float32)

    def _frame_embeddings(self, module: SpeechModule, codes_BG: jax.Array) -> jax.Array:
        """[B, G, D] embeddings of the codes of a frame, the first of them that of the talker."""
        first_B1D = module.talker.embedding[...][codes_BG[:, :1]]
        others = module.code_predictor.embeddings[...]
        rest_BGD = others[jnp.arange(others.shape[0]), codes_BG[:, 1:]]
        return jnp.concatenate([first_B1D, rest_BGD], axis=1).astype(self._compute)

    def predict_frame(
        self, params: Tree, hidden_BD: jax.Array, code_B: jax.Array, choose: Choose
    ) -> tuple[jax.Array, jax.Array]:
        """Codes [B, G] of a frame, and the sum [B, D] of their embeddings, which the talker reads next.

        `choose`: chooses a code of logits [B, V] and the number of its codebook.
        """
        module, B = self._bind(params), len(code_B)
        predictor, G = module.code_predictor, self.section.codebooks
        assert G is not None
        cache = predictor.decoder.empty_cache(B, G)
        first_B2D = jnp.stack([hidden_BD, module.talker.embedding[...][code_B]], axis=1).astype(self._compute)
        ctx = dataclasses.replace(_context(first_B2D), cache=cache, is_fresh=True)
        hidden_B2D, cache = predictor.decoder(first_B2D, ctx)

        def logits(hidden_BD: jax.Array, number: jax.Array | int) -> jax.Array:
            return (hidden_BD @ predictor.heads[...][number].astype(self._compute)).astype(jnp.float32)

        def step(carry: tuple[jax.Array, Any], number: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
            code_B, cache = carry
            x_B1D = predictor.embeddings[...][number - 1, code_B].astype(self._compute)[:, None]
            ctx = dataclasses.replace(_context(x_B1D, first=number + 1), cache=cache)
            hidden_B1D, cache = predictor.decoder(x_B1D, ctx)
            chosen_B = choose(logits(hidden_B1D[:, 0], number), number + 1)
            return (chosen_B, cache), chosen_B

        second_B = choose(logits(hidden_B2D[:, 1], 0), jnp.int32(1))
        _, rest_GB = jax.lax.scan(step, (second_B, cache), jnp.arange(1, G - 1))
        codes_BG = jnp.concatenate([code_B[:, None], second_B[:, None], rest_GB.T], axis=1)
        return codes_BG, jnp.sum(self._frame_embeddings(module, codes_BG), axis=1)

    def waveform(self, params: Tree, codes_BFG: jax.Array) -> jax.Array:
        """[B, samples] of frames of codes."""
        return self._bind(params).vocoder(codes_BFG, _context(codes_BFG))

    @property
    def frame_samples(self) -> int:
        """Samples that the vocoder makes of a frame."""
        return samples_per_frame([*self.section.vocoder.ratios, *self.section.vocoder.rates])

    @property
    def _compute(self) -> Any:
        return Dtypes.of(self.config.dtypes).compute


def _context(x_BT: jax.Array, first: jax.Array | int = 0) -> Context:
    """The context of consecutive positions from the first on, on one device."""
    positions = jnp.broadcast_to(first + jnp.arange(x_BT.shape[1]), x_BT.shape[:2])
    return Context(positions=positions, segments=None, sharder=Sharder.single(), cache=None, dropout_key=None)
