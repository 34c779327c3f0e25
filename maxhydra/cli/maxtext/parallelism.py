"""Conversions of mesh, rematerialization, kernels and quantization."""

from maxhydra.cli.maxtext.translation import Translation

# Axes here, and the axes of MaxText whose product they are.
AXES = {
    "replica": ("diloco",),
    "data": ("data",),
    "stage": ("pipeline",),
    "fsdp": ("fsdp",),
    "expert": ("expert",),
    "sequence": ("sequence", "context", "context_usp_ulysses"),
    "tensor": ("tensor", "tensor_sequence", "autoregressive", "fsdp_transpose"),
}
# mesh=auto: the rest of a slice, and the rest across slices.
AUTO = {("ici", "fsdp"): -1, ("dcn", "data"): -1}
# The tensor axis as a second axis of FSDP: weights are sharded by it, activations are not.
TRANSPOSED = {"act_heads": [], "act_mlp": [], "act_batch": ["replica", "data", "stage", "fsdp", "expert", "tensor"]}
CONTEXT = {"all_gather": "all_gather", "ring": "ring", "ulysses": "ulysses"}
# Activations here, and the keys of MaxText that save or offload them with remat_policy=custom.
ACTIVATIONS = {
    "query": ("query_proj", "qkv_proj"),
    "key": ("key_proj", "kv_proj", "qkv_proj"),
    "value": ("value_proj", "kv_proj", "qkv_proj"),
    "context": ("context", "attention_out"),
    "attention_out": ("out_proj",),
    "mlp_gate": ("mlpwi_0", "moe_mlpwi_0"),
    "mlp_up": ("mlpwi_1", "mlpwi", "moe_mlpwi_1"),
    "mlp_out": ("mlpwo", "moe_mlpwo"),
}
QKV = ["query", "key", "value"]
MATMULS = [*QKV, "attention_out", "mlp_gate", "mlp_up", "mlp_out"]
# Named policies: saved and offloaded activations, or our name of the policy.
POLICIES: dict[str, str | tuple[list[str], list[str]]] = {
    "none": "none",
    "full": "full",
    "minimal": "minimal",
    "minimal_flash": "minimal",
    "minimal_with_context": "minimal",
    "save_dot_with_context_except_mlp": ([*QKV, "context", "attention_out"], []),
    "save_dot_except_mlpwi": ([*QKV, "attention_out", "mlp_out"], []),
    "save_dot_except_mlp": ([*QKV, "attention_out"], []),
    "save_qkv_proj": (QKV, []),
    "save_out_proj": (["attention_out"], []),
    "qkv_proj_offloaded": ([], QKV),
    "minimal_offloaded": ([], MATMULS),
}
ATTENTION = {"dot_product": "xla", "flash": "auto", "cudnn_flash_te": "cudnn", "cudnn_flash_jax": "cudnn"}
TRAINED = {
    "int8": "int8",
    "fp8": "fp8",
    "fp8_full": "fp8",
    "fp8_gpu": "fp8",
    "te_fp8_currentscaling": "fp8",
    "te_fp8_delayedscaling": "fp8_delayed",
}
DECODED = {"int8": "int8_weights", "int4": "int4_weights"}


def mesh(t: Translation) -> None:
    """Set the axes that differ from mesh=auto, which is MaxText's default, and the pipeline."""
    s = t.settings
    for level, prefix in (("ici", "mesh."), ("dcn", "mesh.dcn.")):
        for axis, names in AXES.items():
            keys = tuple(f"{level}_{name}_parallelism" for name in names)
            size = 1
            for key in keys:
                size = -1 if -1 in (size, s.count(key)) else size * s.count(key)
            if size != AUTO.get((level, axis), 1):
                t.set(prefix + axis, size, from_keys=keys)
    transposed = ("ici_fsdp_transpose_parallelism", "dcn_fsdp_transpose_parallelism")
    if s.given(*transposed):
        for rule, axes in TRANSPOSED.items():
            t.set(f"mesh.rules.{rule}", axes, from_keys=transposed)
        if any(s.given(f"{level}_{name}_parallelism") for level in ("ici", "dcn") for name in AXES["tensor"][:2]):
            t.unsupported(transposed[0], "the tensor axis cannot be used for tensor parallelism at the same time")
    if s["shard_exp_on_fsdp"]:
        t.set("mesh.rules.experts", ["fsdp", "expert"], from_keys=("shard_exp_on_fsdp",))
    if s.count("num_slices") > 0:
        t.set("mesh.slices", s.count("num_slices"), from_keys=("num_slices",))
    if s.given("context_parallel_strategy"):
        strategy = s["context_parallel_strategy"]
        if strategy in CONTEXT:
            t.set("mesh.context", CONTEXT[strategy], from_keys=("context_parallel_strategy",))
        else:
            t.unsupported(
                "context_parallel_strategy", f"accepted: {', '.join(CONTEXT)}; the command has mesh.context=auto"
            )
    _pipeline(t)


def _pipeline(t: Translation) -> None:
    s, stages = t.settings, t.values.get("mesh.stage", 1) * t.values.get("mesh.dcn.stage", 1)
    if stages == 1:
        return
    if (microbatches := s.count("num_pipeline_microbatches")) > 0:
        t.set("mesh.pipeline.microbatches", microbatches, from_keys=("num_pipeline_microbatches",))
    repeats = s.count("num_pipeline_repeats")
    if repeats <= 0 and stages > 0:
        layers = t.values.get("model.num_layers", t.model.num_layers)
        repeats = max(1, layers // (stages * s.count("num_layers_per_pipeline_stage")))
    keys = ("num_pipeline_repeats", "num_layers_per_pipeline_stage", "ici_pipeline_parallelism")
    t.set("mesh.pipeline.repeats", max(1, repeats), from_keys=keys)


def remat(t: Translation) -> None:
    """Set the rematerialization policy."""
    s, name = t.settings, t.settings["remat_policy"]
    if name == "custom":
        where = {name_here: {s[key] for key in keys} for name_here, keys in ACTIVATIONS.items()}
        saved, offloaded = (
            [name_here for name_here, found in where.items() if place in found] for place in ("device", "offload")
        )
        policy: str | tuple[list[str], list[str]] = (
            saved,
            [name_here for name_here in offloaded if name_here not in saved],
        )
    elif name in POLICIES:
        policy = POLICIES[name]
    else:
        t.unsupported("remat_policy", f"accepted: custom, {', '.join(POLICIES)}; the command has minimal")
        policy = "minimal"
    if policy == ([], []):
        policy = "full"
    keys = ("remat_policy",)
    if isinstance(policy, str):
        t.set("model.remat.policy", policy, from_keys=keys)
        return
    t.set("model.remat.policy", "custom", from_keys=keys)
    for path, names in zip(("save", "offload"), policy, strict=True):
        if names:
            t.set(f"model.remat.{path}", names, from_keys=keys)


def kernels(t: Translation) -> None:
    """Set backends of kernels, where MaxText's choice is not that of auto."""
    s, kind = t.settings, t.settings["attention"]
    has_experts = any(layer.feed_forward.name == "moe" for layer in t.model.kinds.values())
    if s["use_jax_splash"]:
        t.set("model.kernels.attention", "xla", from_keys=("use_jax_splash",))
    elif s.given("attention"):
        if kind not in ATTENTION:
            t.mention("attention", f"the command has model.kernels.attention=auto; others: {', '.join(ATTENTION)}")
        elif ATTENTION[kind] != "auto":
            t.set("model.kernels.attention", ATTENTION[kind], from_keys=("attention",))
    if s["float32_qk_product"] or s["float32_logits"]:
        t.set("model.dtypes.softmax", "float32", from_keys=("float32_qk_product", "float32_logits"))
    if not has_experts:
        return
    if not s["megablox"] and s["sparse_matmul"]:
        t.set("model.kernels.grouped_matmul", "xla", from_keys=("megablox",))
    if not s["sparse_matmul"] and s.number("capacity_factor") <= 0:
        t.mention(
            "sparse_matmul", "without a capacity_factor experts are always grouped matmuls; the result is the same"
        )
    if s["use_ring_of_experts"]:
        t.set("model.expert_parallel.dispatch", "all_gather", from_keys=("use_ring_of_experts",))
    if s.count("num_moe_token_chunks") > 1:
        t.set("model.expert_parallel.chunks", s.count("num_moe_token_chunks"), from_keys=("num_moe_token_chunks",))


def quantization(t: Translation) -> None:
    """Choose the quantization of training, or of decoding."""
    kind = t.settings["quantization"]
    options = TRAINED if t.task not in ("decode", "serve") else DECODED
    if not kind:
        return
    if kind in options:
        t.choose("quantization", options[kind])
    else:
        t.unsupported("quantization", f"accepted by task={t.task}: {', '.join(options)}")
