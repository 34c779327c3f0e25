"""Conversions of fine-tuning, preferences, reinforcement learning, distillation and decoding."""

import re
from typing import Any

from maxhydra.cli.maxtext.settings import Settings
from maxhydra.cli.maxtext.translation import Translation
from maxhydra.config.errors import ConfigError, Problem

# Tasks that --task accepts; the others follow from the keys.
TASKS = ("pretrain", "sft", "dpo", "grpo", "distill", "decode", "serve", "compile", "inspect")
# Keys that only configs of a task have.
TASK_KEYS = {
    "grpo": ("use_grpo", "num_generations", "grpo_beta", "loss_algo", "num_batches"),
    "distill": ("teacher_overrides", "student_overrides", "offline_data_dir"),
}
LOSSES = {"grpo": "grpo", "gspo-token": "gspo"}
AGGREGATES = {"sequence-mean-token-mean": "grpo", "token-mean": "dapo"}
# Chips in each shape of a TPU slice, by dimensions; v4 and v5p are counted in cores, two on each chip.
FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
CUBES = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4", 256: "4x4x8", 512: "4x8x8", 1024: "8x8x8"}
TOPOLOGIES = {"v5e": FLAT, "v6e": FLAT, "v4": CUBES, "v5p": CUBES}
RAW_SAMPLES = "rollouts are sampled at temperature 1 from the whole distribution, as the policy gradient assumes"


def task_of(settings: Settings) -> str:
    """Return the task that the keys stand for."""
    if settings["compile_topology"]:
        return "compile"
    if settings["use_sft"]:
        return "sft"
    if settings["use_dpo"]:
        return "dpo"
    return next((task for task, keys in TASK_KEYS.items() if settings.names(*keys)), "pretrain")


def task(t: Translation) -> None:
    """Set the keys of task=compile."""
    name = str(t.settings["compile_topology"] or "")
    if t.task != "compile" or not name:
        return
    chip, _, count = name.partition("-")
    shape = TOPOLOGIES.get(chip, {}).get(int(count) if count.isdigit() else 0)
    if shape is None:
        accepted = ", ".join(f"{chip}-{count}" for chip, shapes in TOPOLOGIES.items() for count in shapes)
        raise ConfigError(Problem("compile_topology", "is not a known slice", value=name, accepted=accepted))
    t.set("task.topology", f"{chip}:{shape}", from_keys=("compile_topology",))
    if (slices := t.settings.count("compile_topology_num_slices")) > 0:
        t.set("task.slices", slices, from_keys=("compile_topology_num_slices",))


def dpo(t: Translation) -> None:
    """Set the loss of preferences."""
    s = t.settings
    if t.task != "dpo":
        return
    is_orpo = s["algo"] == "orpo"
    t.set("task.loss", "orpo" if is_orpo else "sigmoid", from_keys=("algo",))
    beta = "orpo_lambda" if is_orpo else "dpo_beta"
    t.set("task.beta", s.number(beta), from_keys=(beta,))
    if not is_orpo:
        t.set("task.label_smoothing", s.number("dpo_label_smoothing"), from_keys=("dpo_label_smoothing",))


def grpo(t: Translation) -> None:
    """Set rollouts, loss and batch of reinforcement learning."""
    s = t.settings
    if t.task != "grpo":
        return
    loss = LOSSES.get(s["loss_algo"])
    if loss == "grpo":
        loss = AGGREGATES.get(s["loss_agg_mode"])
    if loss is None:
        t.unsupported(
            "loss_algo", "accepted: grpo with loss_agg_mode sequence-mean-token-mean or token-mean, gspo-token"
        )
    high = "epsilon_high" if s["epsilon_high"] is not None else "grpo_epsilon"
    length, prompt = s.count("max_target_length"), s.count("max_prefill_predict_length")
    settings: dict[str, tuple[Any, tuple[str, ...]]] = {
        "task.loss": (loss or "grpo", ("loss_algo", "loss_agg_mode")),
        "task.group_size": (s.count("num_generations"), ("num_generations",)),
        "task.iterations": (s.count("num_iterations"), ("num_iterations",)),
        "task.kl.beta": (s.number("grpo_beta"), ("grpo_beta",)),
        "task.clip.low": (s.number("grpo_epsilon"), ("grpo_epsilon",)),
        "task.clip.high": (s.number(high), (high,)),
        "task.max_tokens": (max(1, length - prompt), ("max_target_length", "max_prefill_predict_length")),
        "task.off_policy_steps": (s.count("off_policy_steps"), ("off_policy_steps",)),
        "task.engine.max_context": (length + s.count("kv_cache_buffer"), ("kv_cache_buffer",)),
        "train.eval_batches": (s.count("num_test_batches"), ("num_test_batches",)),
        "task.evaluation.samples": (s.count("num_eval_passes"), ("num_eval_passes",)),
    }
    for path, (value, keys) in settings.items():
        t.set(path, value, from_keys=keys)
    _grpo_batch(t)
    _grpo_engine(t)
    generation = (s["generation_configs"] or {}).get(s["eval_sampling_strategy"] or "", {})
    if "eval_temperature" in generation:
        t.set("task.evaluation.temperature", generation["eval_temperature"], from_keys=("generation_configs",))
    if s["return_routed_experts"]:
        t.set("task.router_replay", True, from_keys=("return_routed_experts",))
    if s["degenerate_group_masking"] is False:
        t.set("task.mask_degenerate", False, from_keys=("degenerate_group_masking",))
    if s["system_prompt"]:
        t.unsupported("system_prompt", "put it into the messages of the records, or into data.formatting")


def _grpo_batch(t: Translation) -> None:
    """Set batch and steps: MaxText counts prompts of all devices, maxhydra completions of one."""
    s, prompts, group = t.settings, t.settings.count("batch_size"), t.settings.count("num_generations")
    total = s.count("num_batches") * s.count("num_iterations") * s.number("num_epoch") * s.number("train_fraction")
    t.set("train.steps", max(1, int(total)), from_keys=("num_batches", "num_iterations", "num_epoch", "train_fraction"))
    t.values.pop("train.epochs", None)
    part = s.count("train_micro_batch_size")
    accumulated = prompts // part if part > 0 and prompts % part == 0 else 1
    t.set("train.per_device_batch_size", prompts * group // accumulated, from_keys=("batch_size",))
    t.set("train.grad_accum", accumulated, from_keys=("train_micro_batch_size",))
    t.mention("batch_size", "train.per_device_batch_size is that of one device; divide it by the number of devices")


def _grpo_engine(t: Translation) -> None:
    s = t.settings
    for key in ("max_concurrency", "rollout_micro_batch_size", "max_num_seqs"):
        if s.given(key) and s[key] and s.count(key) > 0:
            t.set("task.engine.max_batch", s.count(key), from_keys=(key,))
    if s["max_num_batched_tokens"]:
        t.set("task.engine.prefill_chunk", s.count("max_num_batched_tokens"), from_keys=("max_num_batched_tokens",))
    sizes = {axis: s.count(f"rollout_{axis}_parallelism") for axis in ("data", "tensor", "expert")}
    keys = tuple(f"rollout_{axis}_parallelism" for axis in sizes)
    if any(size > 1 for size in sizes.values()):
        mesh = [f"mesh.{axis}={size}" for axis, size in sizes.items() if size > 1]
        t.set("task.rollout_mesh", ["mesh=fsdp", *mesh], from_keys=keys)
    fractions = ("sampler_devices_fraction", "trainer_devices_fraction")
    if s.names(*fractions) and s.number(fractions[0]) + s.number(fractions[1]) <= 1:
        if lag := t.values.pop("task.off_policy_steps"):
            t.set("task.max_staleness", lag, from_keys=("off_policy_steps",))
            t.set("task.rollout_devices", s.number(fractions[0]), from_keys=("off_policy_steps",))
        else:
            t.mention(fractions[0], "all devices sample and train in turn; task.max_staleness=1 separates them")
    if s.given("decode_sampling_temperature", "decode_sampling_top_k", "decode_sampling_nucleus_p"):
        t.unsupported("decode_sampling_temperature", RAW_SAMPLES)


def reward(t: Translation) -> None:
    """Set the reward of reinforcement learning: the answer between marks, and the format of the completion."""
    s = t.settings
    if t.task != "grpo":
        return
    t.choose("reward", "math")
    think, end_think = (re.escape(str(s[key])) for key in ("reasoning_start_token", "reasoning_end_token"))
    marks = ("solution_start_token", "solution_end_token")
    opened, closed = (re.escape(str(s[key])) for key in marks)
    t.set("reward.answer", f"{opened}(.*?){closed}", from_keys=marks)
    t.set("reward.terms.answer.weight", s.number("reward_exact_answer"), from_keys=("reward_exact_answer",))
    if weight := s.number("reward_exact_format_match"):
        pattern = rf"\s*{think}.*?{end_think}.*?{opened}.*?{closed}\s*"
        term = {"kind": "format", "weight": weight, "pattern": pattern}
        t.set("+reward.terms", {"format": term}, from_keys=("reward_exact_format_match",))
        t.set("reward.passes", "answer")
    for path, keys in {
        "timeout": ("reward_worker_timeout_seconds", "math_verify_timeout"),
        "workers": ("reward_num_workers", "math_verify_num_procs"),
    }.items():
        for key in keys:
            if s[key] and s.given(key):
                t.set(f"reward.{path}", s.number(key), from_keys=(key,))


def distill(t: Translation) -> None:
    """Set the teacher and the losses of distillation."""
    s = t.settings
    if t.task != "distill":
        return
    teacher = s["teacher_overrides"] or {}
    if s["offline_data_dir"]:
        t.choose("data", "grain")
        t.set("data.path", s["offline_data_dir"], from_keys=("offline_data_dir",))
        t.set("data.record_type", "teacher", from_keys=("offline_data_dir",))
    else:
        weights = teacher.get("load_parameters_path") or "outputs/TEACHER"
        t.set("task.teacher.weights", weights, from_keys=("teacher_overrides",))
        if not teacher.get("load_parameters_path"):
            t.unsupported("teacher_overrides", "has no load_parameters_path; replace outputs/TEACHER")
        if name := teacher.get("model_name"):
            t.set("task.teacher.model", name, from_keys=("teacher_overrides",))
    for key, name in (("distill_alpha", "alpha"), ("distill_temperature", "temperature")):
        t.set(f"task.{name}", s.number(key), from_keys=(key,))
        if s[f"{key}_end"] is not None:
            t.set(f"task.{name}_end", s.number(f"{key}_end"), from_keys=(f"{key}_end",))
            if s[f"{key}_schedule"] == "cosine":
                t.set("task.course", "cosine", from_keys=(f"{key}_schedule",))
    if s.number("distill_beta") > 0:
        t.set("task.features.weight", s.number("distill_beta"), from_keys=("distill_beta",))
        t.set("task.features.loss", s["distill_feature_loss_type"], from_keys=("distill_beta",))
        layers = s["distill_layer_indices"] or list(range(t.model.num_layers))
        for name in ("student_layers", "teacher_layers"):
            t.set(f"task.features.{name}", layers, from_keys=("distill_layer_indices", "distill_beta"))


def adapter(t: Translation) -> None:
    """Choose LoRA or QLoRA."""
    s = t.settings
    if not s["enable_lora"]:
        return
    t.choose("adapter", "qlora" if s["lora_weight_qtype"] else "lora")
    for key, name in (("lora_rank", "rank"), ("lora_alpha", "alpha")):
        if s[key]:
            t.set(f"adapter.{name}", s.number(key), from_keys=(key,))
    if s["lora_module_path"]:
        t.unsupported("lora_module_path", "set adapter.targets, regular expressions on <layer kind>/<projection>")


def sampling(t: Translation) -> None:
    """Set the prompt and the sampling parameters of decoding."""
    s, strategy = t.settings, t.settings["decode_sampling_strategy"]
    if t.task not in ("decode", "serve"):
        if s["stop_strings"]:
            t.unsupported("stop_strings", "rollouts end at the end-of-sequence token")
        return
    if t.task == "decode":
        t.set("task.prompt", s["prompt"], from_keys=("prompt",))
    temperature = 0 if strategy == "greedy" else s.number("decode_sampling_temperature")
    t.set("task.sampling.temperature", temperature, from_keys=("decode_sampling_strategy",))
    if strategy in ("topk", "composite") and s.count("decode_sampling_top_k") > 0:
        t.set("task.sampling.top_k", s.count("decode_sampling_top_k"), from_keys=("decode_sampling_top_k",))
    if strategy in ("nucleus", "composite") and s.number("decode_sampling_nucleus_p") > 0:
        t.set("task.sampling.top_p", s.number("decode_sampling_nucleus_p"), from_keys=("decode_sampling_nucleus_p",))
    tokens = s.count("max_target_length") - s.count("max_prefill_predict_length")
    t.set("task.sampling.max_tokens", max(1, tokens), from_keys=("max_target_length", "max_prefill_predict_length"))
    if s["stop_strings"]:
        t.set("task.sampling.stop", s["stop_strings"], from_keys=("stop_strings",))


def engine(t: Translation) -> None:
    """Set the decode engine."""
    s = t.settings
    if t.task not in ("decode", "serve", "grpo"):
        return
    for key, name in (
        ("enable_prefix_caching", "prefix_cache"),
        ("prefill_chunk_size", "prefill_chunk"),
        ("enable_model_warmup", "warm_up"),
        ("pagedattn_tokens_per_page", "page_size"),
    ):
        if s.given(key):
            t.set(f"task.engine.{name}", s[key], from_keys=(key,))
    if s["quantize_kvcache"]:
        t.set("task.engine.cache_dtype", "int8", from_keys=("quantize_kvcache",))
        if s["kv_quant_dtype"] != "int8":
            t.unsupported("kv_quant_dtype", "accepted: int8")
