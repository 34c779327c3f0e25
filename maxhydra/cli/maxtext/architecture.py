"""The model: an option of the group model, with the keys of its architecture that differ."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from maxhydra.cli.maxtext.table import families, layer_counts
from maxhydra.cli.maxtext.translation import Translation
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.options import model_options
from maxhydra.config.schema.model import Kind

Convert = Callable[[Any], Any]
# Sizes, and the factor of global_parameter_scale that applies to each.
SIZES = {
    "base_num_decoder_layers": ("num_layers", "layers"),
    "base_emb_dim": ("emb_dim", "width"),
    "base_mlp_dim": ("mlp_dim", "heads"),
    "base_num_query_heads": ("num_heads", "heads"),
    "base_num_kv_heads": ("num_kv_heads", "heads"),
    "head_dim": ("head_dim", ""),
    "vocab_size": ("vocab_size", ""),
}


def or_null(value: Any) -> Any:
    """Return null for zero, negative and empty values, which switch a setting off in MaxText."""
    return value if value and value > 0 else None


def at_least_one(value: Any) -> Any:
    return max(1, value)


def yes(then: Any, otherwise: Any) -> Convert:
    """Return the conversion of a boolean."""
    return lambda value: then if value else otherwise


def same(value: Any) -> Any:
    return value


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A key of the architecture: where it goes in `model`, and its conversion."""

    path: str
    convert: Convert = same
    spelled_out: bool = True
    """MaxText's default replaces the value of the option, if the model is spelled out by keys."""


# Keys of the whole model.
MODEL = {
    "normalization_layer_epsilon": Mapped("norm_eps"),
    "logits_via_embedding": Mapped("head", yes("tied", "separate")),
    "final_logits_soft_cap": Mapped("logit_softcap", or_null),
    "dense_init_scale": Mapped("init_scale"),
    "max_position_embeddings": Mapped("context_length", spelled_out=False),
    "hidden_size_per_layer_input": Mapped("per_layer.dim", or_null, spelled_out=False),
}
# Keys of layers, by the section of a kind to which they apply.
ATTENTION = {
    "attn_logits_soft_cap": Mapped("softcap", or_null),
    "attention_sink": Mapped("sinks"),
    "share_kv_projections": Mapped("value", yes("key", "own"), spelled_out=False),
    "attention_bias": Mapped("bias", yes("qkv", "none"), spelled_out=False),
}
LATENT = {
    "q_lora_rank": Mapped("q_lora_rank", or_null),
    "kv_lora_rank": Mapped("kv_lora_rank"),
    "qk_nope_head_dim": Mapped("qk_nope_head_dim"),
    "qk_rope_head_dim": Mapped("qk_rope_head_dim"),
    "v_head_dim": Mapped("v_head_dim"),
    "mscale": Mapped("mscale", spelled_out=False),
}
DELTA = {
    "gdn_conv_kernel_dim": Mapped("taps"),
    "gdn_key_head_dim": Mapped("key_dim"),
    "gdn_value_head_dim": Mapped("value_dim"),
    "gdn_num_key_heads": Mapped("num_key_heads"),
    "gdn_num_value_heads": Mapped("num_value_heads"),
}
EXPERTS = {
    "num_experts": Mapped("experts"),
    "num_experts_per_tok": Mapped("top_k"),
    "base_moe_mlp_dim": Mapped("dim", or_null),
    "capacity_factor": Mapped("capacity_factor", or_null),
    "load_balance_loss_weight": Mapped("balance_weight"),
    "mlp_activations_limit": Mapped("clamp", or_null, spelled_out=False),
    "mlp_bias": Mapped("bias", spelled_out=False),
    "norm_topk_prob": Mapped("router.normalize", spelled_out=False),
    "routed_scaling_factor": Mapped("router.scale"),
    "n_routing_groups": Mapped("router.groups", at_least_one),
    "topk_routing_group": Mapped("router.top_groups", at_least_one),
}
YARN = {
    "rope_factor": Mapped("factor"),
    "original_max_position_embeddings": Mapped("original_context"),
    "beta_fast": Mapped("beta_fast"),
    "beta_slow": Mapped("beta_slow"),
    "rope_truncate": Mapped("truncate"),
    "rope_interleave": Mapped("pairs", yes("neighbours", "halves")),
    "rope_attention_scaling": Mapped("attention_factor", yes(None, 1)),
}
# rope_type=llama3.1 has these constants.
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_context": 8192}
GATES = {"silu": "silu", "swish": "silu", "gelu": "gelu_tanh"}
GATES |= {name: name for name in ("relu", "sigmoid", "tanh", "linear")}


def model(t: Translation) -> None:
    """Choose the model option and set the keys that differ from it."""
    Architecture(t).translate()


class Architecture:
    """One translation of the keys of the architecture."""

    def __init__(self, t: Translation):
        name = str(t.settings["model_name"])
        self.t, self.settings = t, t.settings
        self.is_spelled_out = name not in model_options()
        block = t.settings["decoder_block"]
        variant = block if t.settings["routed_bias"] else f"{block}/unbiased"
        t.choose("model", families().get(variant, families()[block]) if self.is_spelled_out else name)
        self.option = t.model

    def translate(self) -> None:
        self._sizes()
        self._copy(MODEL, "")
        for name, kind in self.option.kinds.items():
            self._kind(name, kind)
        if not any(kind.feed_forward.name == "moe" for kind in self.option.kinds.values()):
            for key in EXPERTS:
                if self.settings.given(key) and key != "mlp_bias":
                    self.t.unsupported(key, f"model={self.t.choices['model']} has no experts")
        self._layers()
        self._whole()
        self._context_length()

    def _set(self, path: str, value: Any, *keys: str) -> None:
        self.t.set(f"model.{path}", value, from_keys=keys)

    def _copy(self, table: dict[str, Mapped], prefix: str) -> None:
        for key, mapped in table.items():
            if self.settings.given(key) or (self.is_spelled_out and mapped.spelled_out):
                self._set(prefix + mapped.path, mapped.convert(self.settings[key]), key)

    def _sizes(self) -> None:
        scale = "global_parameter_scale"
        factors = _factors(self.settings.count(scale))
        # In some blocks MaxText counts pairs of a local and a global layer.
        factors["layers"] *= layer_counts().get(self.t.choices["model"].split("-")[0], 1)
        for key, (path, factor) in SIZES.items():
            if self.is_spelled_out or self.settings.given(key, *([scale] if factor else [])):
                self._set(path, int(self.settings.count(key) * factors.get(factor, 1)), key, scale)

    def _kind(self, name: str, kind: Kind) -> None:
        prefix, mixer = f"kinds.{name}.", kind.mixer.name
        tables = {"attention": ATTENTION, "mla": LATENT, "delta": DELTA}
        self._copy(tables.get(mixer, {}), f"{prefix}{mixer}.")
        if mixer == "attention" and self.settings.given("use_qk_norm") and kind.attention.qk_norm.name == "none":
            self._set(f"{prefix}attention.qk_norm", "head", "use_qk_norm")
        if mixer == "attention" and self.settings.given("qk_norm_with_scale") and kind.attention.qk_norm.name == "head":
            self._set(f"{prefix}attention.qk_norm", "head_plain", "qk_norm_with_scale")
        if mixer in ("attention", "mla"):
            self._rope(f"{prefix}{mixer}.rope.", kind)
        if mixer == "attention" and self.settings.given("v_norm_with_scale") and kind.attention.value_norm:
            self._set(f"{prefix}attention.value_norm_scale", False, "v_norm_with_scale")
        if mixer == "attention":
            self._windows(f"{prefix}attention.", kind)
        if mixer == "mla":
            self._indexer(f"{prefix}mla.indexer.", kind)
        self._latent(prefix, kind)
        if self.settings.given("use_post_attn_norm", "use_post_ffw_norm"):
            both = self.settings["use_post_attn_norm"] and self.settings["use_post_ffw_norm"]
            self._set(f"{prefix}norms", "sandwich" if both else "pre", "use_post_attn_norm", "use_post_ffw_norm")
        if kind.feed_forward.name == "moe":
            self._copy(EXPERTS, f"{prefix}moe.")
            self._router(f"{prefix}moe.")
        elif self.settings.given("mlp_bias"):
            self._set(f"{prefix}mlp.bias", self.settings["mlp_bias"], "mlp_bias")
        self._activation(f"{prefix}{kind.feed_forward.name}.", is_moe=kind.feed_forward.name == "moe")

    def _rope(self, prefix: str, kind: Kind) -> None:
        is_local = kind.mixer.name == "attention" and kind.attention.window is not None
        rope = kind.attention.rope if kind.mixer.name == "attention" else kind.mla.rope
        if rope.kind.name == "none":
            return
        keys = ("local_rope_max_timescale",) if is_local else ("global_rope_max_timescale",)
        theta = next((key for key in keys if self.settings.number(key) > 0), "rope_max_timescale")
        if self.is_spelled_out or self.settings.given(theta):
            self._set(f"{prefix}theta", self.settings.number(theta), theta)
        share = "local_rope_proportion" if is_local else "global_rope_proportion"
        for key in ("partial_rotary_factor", share):
            if self.settings.given(key):
                self._set(f"{prefix}share", self.settings.number(key), key)
        linear = "rope_linear_scaling_factor"
        if self.settings.given(linear) and not is_local:
            self._set(f"{prefix}kind", "linear", linear)
            self._set(f"{prefix}factor", self.settings.number(linear), linear)
        # Layers with a window keep short wavelengths where the option does not extend their context.
        if not (is_local and rope.kind.name == "default" and len(self.option.kinds) > 1):
            self._rope_type(prefix, rope.kind.name)

    def _rope_type(self, prefix: str, current: str) -> None:
        kinds = {"default": "default", "llama3.1": "llama3", "yarn": "yarn"}
        given = self.settings["rope_type"]
        if self.settings.given("rope_type") and given not in kinds:
            self.t.unsupported("rope_type", f"accepted: {', '.join(kinds)}")
            return
        kind = kinds[given] if self.settings.given("rope_type") else current
        if kind == "llama3" and not self.settings["rope_use_scale"]:
            kind = "default"
        if self.settings.given("rope_type", "rope_use_scale"):
            self._set(f"{prefix}kind", kind, "rope_type", "rope_use_scale")
        if kind == "llama3" and kind != current:
            for name, value in LLAMA3.items():
                self._set(prefix + name, value, "rope_type")
        if kind == "default" and current != kind:
            for name in LLAMA3:
                self._set(prefix + name, None)
        if kind == "yarn":
            self._copy(YARN, prefix)

    def _windows(self, prefix: str, kind: Kind) -> None:
        for key, name, kind_of_attention in (
            ("sliding_window_size", "window", "local_sliding"),
            ("chunk_attn_window_size", "chunk", "chunk"),
        ):
            applies = getattr(kind.attention, name) is not None or self.settings["attention_type"] == kind_of_attention
            if self.settings.given(key) and applies:
                self._set(prefix + name, or_null(self.settings.count(key)), key)
        if kind.attention.window is None and len(self.option.kinds) > 1:
            for key, name in (("global_num_kv_heads", "num_kv_heads"), ("global_head_dim", "head_dim")):
                if self.settings.given(key):
                    self._set(prefix + name, or_null(self.settings.count(key)), key)

    def _latent(self, prefix: str, kind: Kind) -> None:
        """Set the width between attention and experts, which MaxText gives twice."""
        both = ("attention_output_dim", "moe_expert_input_dim")
        if not self.settings.given(*both):
            return
        widths = {or_null(self.settings.count(key)) for key in both}
        if len(widths) > 1 or kind.latent_dim is None:
            for key in both:
                self.t.unsupported(key, "accepted: the same width twice, with a decoder_block that has it")
            return
        self._set(f"{prefix}latent_dim", widths.pop(), *both)

    def _indexer(self, prefix: str, kind: Kind) -> None:
        uses = (
            self.settings["use_indexer"] if self.settings.given("use_indexer") else kind.mla.indexer.top_k is not None
        )
        if self.settings.given("use_indexer") and not uses:
            self._set(f"{prefix}top_k", None, "use_indexer")
        if not uses:
            return
        is_dense = self.settings["indexer_loss_scaling_factor"] > 0 and not self.settings["indexer_sparse_training"]
        keys = ("use_indexer", "indexer_topk", "indexer_sparse_training")
        if self.settings.given(*keys):
            length = self.settings.count("max_target_length" if is_dense else "indexer_topk")
            self._set(f"{prefix}top_k", length, *keys)
        self._copy(
            {
                "indexer_head_dim": Mapped("head_dim"),
                "indexer_n_heads": Mapped("num_heads"),
                "indexer_loss_scaling_factor": Mapped("loss_weight"),
            },
            prefix,
        )

    def _router(self, prefix: str) -> None:
        settings = self.settings
        if settings.given("shared_experts"):
            count = settings.count("shared_experts")
            dim = or_null(settings.count("base_moe_mlp_dim")) or settings.count("base_mlp_dim")
            self._set(f"{prefix}shared.dim", or_null(count * dim), "shared_experts")
        if settings["routed_score_func"]:
            self._set(f"{prefix}router.scores", settings["routed_score_func"], "routed_score_func")
        if not settings.given("routed_bias", "routed_bias_update_rate"):
            return
        # A bias with sigmoid scores is that of loss-free balancing; with a softmax it is a trained bias of the router.
        if settings["routed_score_func"] == "sigmoid":
            rate = settings.number("routed_bias_update_rate") if settings["routed_bias"] else None
            self._set(f"{prefix}router.bias_rate", rate, "routed_bias", "routed_bias_update_rate")
        else:
            self._set(f"{prefix}router.bias", bool(settings["routed_bias"]), "routed_bias")

    def _activation(self, prefix: str, *, is_moe: bool) -> None:
        key = "mlp_activations"
        if not self.settings.given(key) or self.settings.given("mlp_activations_limit"):
            return
        names = list(self.settings[key])
        is_gated = len(names) == 2 and names[1] == "linear"
        if names[0] not in GATES or not (is_gated or (len(names) == 1 and not is_moe)):
            accepted = f"[NAME,linear] and, without experts, [NAME], NAME one of {', '.join(GATES)}"
            self.t.unsupported(key, f"accepted: {accepted}")
            return
        self._set(f"{prefix}activation", GATES[names[0]], key)
        if not is_moe:
            self._set(f"{prefix}kind", "gated" if is_gated else "plain", key)

    def _layers(self) -> None:
        """Set the order of kinds; an order that the option does not have cannot be made from MaxText's numbers."""
        key, option = "first_num_dense_layers", self.option
        count = self.settings.count(key)
        if self.settings.given(key) and (option.prefix or count):
            if option.prefix:
                self._set("prefix", [option.prefix[0]] * count, key)
            else:
                self.t.unsupported(key, "set model.prefix and a kind of dense layers")
        for key in ("inhomogeneous_layer_cycle_interval", "nope_layer_interval"):
            if self.settings.given(key) and self.settings[key] != len(option.pattern):
                self.t.unsupported(key, f"set model.pattern; that of the option has {len(option.pattern)} layers")
        step = "interleave_moe_layer_step"
        are_moe = [option.kinds[name].feed_forward.name == "moe" for name in option.pattern]
        found = len(are_moe) // max(1, sum(are_moe))
        if self.settings.given(step) and self.settings[step] != found:
            self.t.unsupported(step, f"set model.pattern; in that of the option every layer of {found} has experts")
        for key in ("attention_type", "temperature_tuning", "num_kv_shared_layers", "use_double_wide_mlp"):
            if self.settings.given(key) and not self._has(key):
                self.t.unsupported(key, f"model={self.t.choices['model']} does not have it; see model.kinds")

    def _has(self, key: str) -> bool:
        """Return whether the option has a mechanism that MaxText switches on by a key."""
        kinds = list(self.option.kinds.values())
        value = self.settings[key]
        if key == "attention_type":
            is_latent = any(kind.mixer.name == "mla" for kind in kinds)
            return is_latent if value == "mla" else value in ("global", "local_sliding", "chunk") and not is_latent
        if key == "temperature_tuning":
            return bool(value) == any(kind.attention.temperature.floor is not None for kind in kinds)
        if key == "num_kv_shared_layers":
            return bool(value) == any(kind.attention.shares is not None for kind in kinds)
        return bool(value) == (len({kind.mlp.dim for kind in kinds}) > 1)

    def _whole(self) -> None:
        settings = self.settings
        if (rate := settings.number("dropout_rate")) and settings["enable_dropout"]:
            self._set("dropout", rate, "dropout_rate", "enable_dropout")
        if depth := settings.count("mtp_num_layers"):
            self._set("mtp.depth", depth, "mtp_num_layers")
            self._set("mtp.loss_weight", settings.number("mtp_loss_scaling_factor"), "mtp_num_layers")
        elif settings.given("mtp_num_layers"):
            self._set("mtp.depth", 0, "mtp_num_layers")
        if settings["use_qk_clip"]:
            self._set("qk_clip", settings.number("qk_clip_threshold"), "use_qk_clip", "qk_clip_threshold")
        if settings.given("scan_layers"):
            layers = self.t.values.get("model.num_layers", self.option.num_layers)
            self._set("scan_unroll", layers, "scan_layers")
        if settings.given("ragged_buffer_factor") or settings.given("ici_expert_parallelism"):
            self._set(
                "expert_parallel.buffer", or_null(settings.number("ragged_buffer_factor")), "ragged_buffer_factor"
            )
        if settings["use_batch_split_schedule"]:
            self._set("expert_parallel.chunks", settings.count("batch_split_factor"), "use_batch_split_schedule")

    def _context_length(self) -> None:
        """Extend the context to the training length: MaxText has no limit."""
        positions, length = self.settings.count("trainable_position_size"), self.settings.count("max_target_length")
        if self.settings["use_untrainable_positional_embedding"]:
            self._set("embedding.positions", "sinusoidal", "use_untrainable_positional_embedding")
        if positions > 0 and self.settings.given("trainable_position_size"):
            self._set("embedding.positions", "learned", "trainable_position_size")
            self._set("context_length", positions, "trainable_position_size")
        elif length > self.t.values.get("model.context_length", self.option.context_length):
            self._set("context_length", length, "max_target_length")


def _factors(scale: int) -> dict[str, int]:
    """Return the factors of sizes for global_parameter_scale, which is a power of 2: heads, then width, then layers."""
    power = round(math.log2(scale)) if scale > 0 else -1
    if power < 0 or 2**power != scale:
        raise ConfigError(
            Problem("global_parameter_scale", "is not a power of 2", value=scale, accepted="1, 2, 4, ...")
        )
    rounds, rest = divmod(power, 3)
    return {"heads": 2 ** (rounds + (rest > 0)), "width": 2 ** (rounds + (rest > 1)), "layers": 2**rounds}


def keys() -> Iterator[str]:
    """Yield the keys of the tables above."""
    for table in (SIZES, MODEL, ATTENTION, LATENT, DELTA, EXPERTS, YARN):
        yield from table
