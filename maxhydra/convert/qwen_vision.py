"""The image encoder of Qwen3-VL, Qwen3.5 and Qwen3-Omni: its settings and tensor names, and its changes to the decoder.

A vision transformer for images of different sizes, with interpolated learned positions and two-dimensional RoPE; blocks
of patches are concatenated and projected by an MLP. transformers fixes the epsilon of its norms and the activation of
the projector. The decoder has RoPE over three axes. Except in Qwen3.5, it adds projected outputs of some encoder layers
after its first layers, which form its prefix.
"""

import dataclasses
import math
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert import siglip
from maxhydra.convert.hf_config import activation, activation_setting, head, layer_kinds, pattern_of
from maxhydra.convert.name_table import Settings, UnsupportedError, Weight

# Key of our `model.vision` section -> key of vision_config.
SIZES = {
    "num_layers": "depth",
    "patch_size": "patch_size",
    "emb_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_heads": "num_heads",
    "frames": "temporal_patch_size",
}
DEEPSTACK, SECOND = "deepstack_visual_indexes", "position_id_per_seconds"
DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
}
TOKENS = {
    "placeholder_id": "image_token_id",
    "begin_id": "vision_start_token_id",
    "end_id": "vision_end_token_id",
}
TOKEN_DEFAULTS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
NORM_EPS, THETA = 1e-6, 10000.0
# The smallest and the largest image are settings of the preprocessor. Its smallest has 65,536 pixels; its largest,
# 16,777,216, would be padded to in every batch, so that ours has 1,048,576.
MIN_PATCHES, MAX_PATCHES = 256, 4096
# The most encoder layers with a separate projector; published models have three.
MAX_DEEPSTACK = 32
QKV = ("query", "key", "value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Projector:
    """Names of a projector's norm and of its two layers."""

    norm: str = "norm"
    hidden: str = "linear_fc1"
    out: str = "linear_fc2"

    def rows(self, path: str, hf: str) -> tuple[Weight, ...]:
        """Rows of its layers."""
        return _linear_rows({f"{path}/hidden/0": f"{hf}.{self.hidden}", f"{path}/out": f"{hf}.{self.out}"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Encoder:
    """The encoder of one family: names and defaults that differ between families."""

    vision_type: str
    """`model_type` of vision_config."""
    tower: str = "model.visual."
    """Prefix of tensor names."""
    projector: Projector = Projector()
    deepstack_list: str | None = "deepstack_merger_list"
    """Name of the projectors for the first layers of the decoder; None: there are none."""
    deepstack: tuple[int, ...] = (8, 16, 24)
    """Default of deepstack_visual_indexes."""
    sections: tuple[int, ...] = (24, 20, 20)
    """Default of mrope_section."""
    token_ids: Settings = dataclasses.field(default_factory=lambda: TOKEN_DEFAULTS)
    """Defaults of the keys of TOKENS in config.json."""
    videos: Settings = dataclasses.field(default_factory=dict)
    """Values of `model.vision.videos`, other than its defaults."""
    positions_per_second: int | None = None
    """Default of position_id_per_seconds; None: steps of a video are placed as images."""

    @property
    def layer(self) -> tuple[Weight, ...]:
        block = self.tower + "blocks.{layer}."
        return (
            Weight(tuple(f"{name}/kernel" for name in QKV), block + "attn.qkv.weight"),
            Weight(tuple(f"{name}/bias" for name in QKV), block + "attn.qkv.bias", inputs=0),
            *_linear_rows({"out": block + "attn.proj"}, inputs=2),
            *_linear_rows({"mlp/up": block + "mlp.linear_fc1", "mlp/down": block + "mlp.linear_fc2"}),
            *siglip.norm_rows({"attention_norm": block + "norm1", "mlp_norm": block + "norm2"}),
        )

    @property
    def non_layer(self) -> tuple[Weight, ...]:
        patches, merger = self.tower + "patch_embed.proj.", self.tower + "merger"
        return (
            Weight("vision/patches/kernel", patches + "weight", inputs=4, has_split_inputs=True),
            Weight("vision/patches/bias", patches + "bias", inputs=0),
            Weight("vision/positions", self.tower + "pos_embed.weight", transposed=False),
            *siglip.norm_rows({"vision/norm": f"{merger}.{self.projector.norm}"}),
            *self.projector.rows("vision/projector", merger),
            *(row for number in range(MAX_DEEPSTACK) for row in self._deepstack_rows(number)),
        )

    def _deepstack_rows(self, number: int) -> tuple[Weight, ...]:
        if self.deepstack_list is None:
            return ()
        path, hf = f"vision/deepstack/{number}", f"{self.tower}{self.deepstack_list}.{number}"
        norm = siglip.norm_rows({f"{path}/norm": f"{hf}.{self.projector.norm}"})
        return (*norm, *self.projector.rows(path, hf))

    def to_values(self, settings: Settings) -> dict[str, Any]:
        """Values of `model.vision` for the section around the text settings."""
        vision, tokens = {**DEFAULTS, **settings["vision_config"]}, {**self.token_ids, **settings}
        block, rows = vision["spatial_merge_size"], math.isqrt(vision["num_position_embeddings"])
        siglip.require_settings(vision, {"in_channels": 3, "out_hidden_size": settings["text_config"]["hidden_size"]})
        if rows**2 != vision["num_position_embeddings"] or rows % block:
            raise UnsupportedError(
                f"vision_config.num_position_embeddings={vision['num_position_embeddings']} (supported: the square of "
                f"a multiple of spatial_merge_size={block})"
            )
        return {
            **{key: vision[hf_key] for key, hf_key in SIZES.items()},
            "deepstack": self._deepstack(vision),
            "image_size": rows * vision["patch_size"],
            "min_patches": MIN_PATCHES,
            "max_patches": MAX_PATCHES,
            "activation": activation(vision["hidden_act"]),
            "norm_eps": NORM_EPS,
            "rope_theta": (vision.get("rope_parameters") or {}).get("rope_theta", THETA),
            "projector": {
                "pooling": "concatenate",
                "tokens": (rows // block) ** 2,
                "norm": False,
                "bias": True,
                "hidden_dims": [vision["hidden_size"] * block**2],
                "activation": "gelu",
            },
            **{key: tokens[hf_key] for key, hf_key in TOKENS.items()},
            "video_id": siglip.video_token(tokens["video_token_id"], settings["text_config"]),
            "videos": self._videos(settings),
        }

    def _videos(self, settings: Settings) -> Settings:
        """Values of `model.vision.videos`."""
        if self.positions_per_second is None:
            return self.videos
        return {**self.videos, "positions_per_second": settings.get(SECOND, self.positions_per_second)}

    def _deepstack(self, vision: Settings) -> list[int]:
        """Encoder layers with a separate projector."""
        if self.deepstack_list is None:
            siglip.require_settings(vision, {DEEPSTACK: []})
            return []
        layers = list(vision.get(DEEPSTACK, self.deepstack))
        if len(layers) > MAX_DEEPSTACK:
            raise UnsupportedError(f"vision_config.{DEEPSTACK} of {len(layers)} (supported: {MAX_DEEPSTACK})")
        return layers

    def to_settings(self, vision: config.Vision) -> Settings:
        """Inverse of `to_values`, without the width of the decoder."""
        return {
            "vision_config": {
                "model_type": self.vision_type,
                **{hf_key: getattr(vision, key) for key, hf_key in SIZES.items()},
                **({} if self.deepstack_list is None else {DEEPSTACK: vision.deepstack}),
                "hidden_act": activation_setting(vision.activation),
                "in_channels": 3,
                "num_position_embeddings": vision.patch_rows**2,
                "spatial_merge_size": vision.block_size,
                "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
            },
            **{hf_key: getattr(vision, key) for key, hf_key in TOKENS.items()},
            **siglip.video_setting(vision),
            **({} if vision.videos.positions_per_second is None else {SECOND: vision.videos.positions_per_second}),
        }

    def change_decoder(self, values: dict[str, Any], settings: Settings) -> dict[str, Any]:
        """Values of `model` with RoPE over three axes, and with the layers that add encoder outputs as prefix."""
        text = settings["text_config"]
        parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
        if not parameters.get("mrope_interleaved", True):
            raise UnsupportedError("text_config.rope_parameters.mrope_interleaved=false (supported: true)")
        for kind in (kind for kind in values["kinds"].values() if "attention" in kind):
            rope = {**kind["attention"]["rope"], "sections": list(parameters.get("mrope_section", self.sections))}
            kind["attention"] = {**kind["attention"], "rope": rope}
        pattern, count = values.get("pattern", ["layer"]), len(values["vision"]["deepstack"])
        names = [pattern[index % len(pattern)] for index in range(values["num_layers"])]
        # The text settings of published files may contradict those of the whole model, which apply.
        tied = {"head": head(settings, tied=False)} if "tie_word_embeddings" in settings else {}
        return {**values, **tied, "prefix": names[:count], "pattern": pattern_of(names[count:])}

    def change_settings(self, settings: Settings, model: config.Model) -> Settings:
        """Inverse of `change_decoder`; also the width of the decoder."""
        text, vision = settings["text_config"], settings["vision_config"]
        ropes = (kind.attention.rope for kind in layer_kinds(model) if kind.mixer is config.Mixer.attention)
        scaling = {"rope_type": "default", **(text["rope_scaling"] or {})}
        scaling |= {"mrope_section": next((list(rope.sections) for rope in ropes), []), "mrope_interleaved": True}
        return {
            **settings,
            "text_config": {**text, "rope_scaling": scaling},
            "vision_config": {**vision, "out_hidden_size": model.emb_dim},
        }


def _linear_rows(names: dict[str, str], inputs: int = 1) -> tuple[Weight, ...]:
    """Rows of projections with a bias: name of ours -> name of theirs."""
    kernels = (Weight(f"{name}/kernel", f"{hf}.weight", inputs=inputs) for name, hf in names.items())
    return (*kernels, *(Weight(f"{name}/bias", f"{hf}.bias", inputs=0) for name, hf in names.items()))


# Qwen3-VL (Qwen Team, 2025), dense and with experts.
QWEN3_VL = Encoder(vision_type="qwen3_vl_vision")
QWEN3_VL_MOE = Encoder(vision_type="qwen3_vl_moe_vision")

# Qwen3.5 (Qwen Team, 2026), dense and with experts.
QWEN3_5_IDS = dict(zip(TOKEN_DEFAULTS, (248056, 248057, 248053, 248054), strict=True))
QWEN3_5 = Encoder(
    vision_type="qwen3_5_vision", deepstack_list=None, deepstack=(), sections=(11, 11, 10), token_ids=QWEN3_5_IDS
)
QWEN3_5_MOE = dataclasses.replace(QWEN3_5, vision_type="qwen3_5_moe_vision")


# Frames that the processor of Qwen3-Omni samples, whose limits of pixels are those of one frame.
OMNI_VIDEOS = {"fps": 1.0, "per_frame": True, "timestamps": "none"}


def omni(prefix: str) -> Encoder:
    """The encoder of Qwen3-Omni (Qwen Team, 2025); `prefix` precedes the thinker's tensor names."""
    return Encoder(
        vision_type="qwen3_omni_moe_vision_encoder",
        tower=f"{prefix}visual.",
        projector=Projector(norm="ln_q", hidden="mlp.0", out="mlp.2"),
        deepstack_list="merger_list",
        videos=OMNI_VIDEOS,
        positions_per_second=25,
    )
