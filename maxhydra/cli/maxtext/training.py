"""Conversions of the training loop: lengths, schedule, optimizer, evaluation, checkpoints, records."""

import math

from maxhydra.cli.maxtext.translation import Translation

# MaxText evaluates on the whole set if eval_steps is not set.
ALL_BATCHES = 100_000


def lengths(t: Translation) -> None:
    """Set steps, sequence length, gradient accumulation, loss chunks and the batch size ramp."""
    s, seq_len = t.settings, t.settings.count("max_target_length")
    if t.task in ("decode", "serve"):
        t.set("task.engine.max_context", seq_len, from_keys=("max_target_length",))
        return
    t.set("train.seq_len", seq_len, from_keys=("max_target_length",))
    t.set("train.steps", steps(t), from_keys=("steps", "learning_rate_schedule_steps"))
    t.set("train.grad_accum", s.count("gradient_accumulation_steps"), from_keys=("gradient_accumulation_steps",))
    if s.given("num_epoch") and s.given("steps"):
        t.mention("num_epoch", "data repeat until train.steps; train.epochs sets the length by epochs instead")
    elif s.given("num_epoch"):
        t.set("train.epochs", s.number("num_epoch"), from_keys=("num_epoch",))
    if (tiles := s.count("num_vocab_tiling")) > 1:
        t.set("train.loss_chunk", math.ceil(seq_len / tiles), from_keys=("num_vocab_tiling",))
    if s["enable_rampup_batch_size"]:
        for key, path in (
            ("per_device_batch_size_start", "start"),
            ("per_device_batch_size_increment", "increment"),
            ("global_rampup_samples", "sequences"),
        ):
            t.set(f"train.ramp.{path}", s.number(key), from_keys=("enable_rampup_batch_size",))


def steps(t: Translation) -> int:
    """Return the optimizer steps; -1 stands for the length of the schedule."""
    given = t.settings.count("steps")
    return given if given > 0 else max(1, t.settings.count("learning_rate_schedule_steps"))


def schedule(t: Translation) -> None:
    """Set the learning rate schedule, whose parts MaxText has as fractions of its length."""
    s, kind = t.settings, t.settings["lr_schedule_type"]
    if kind not in ("cosine", "wsd"):
        t.unsupported("lr_schedule_type", "accepted: cosine, wsd")
        return
    total = t.values["train.steps"]
    length = s.count("learning_rate_schedule_steps")
    if length > 0 and length != total:
        t.set("optimizer.schedule.steps", length, from_keys=("learning_rate_schedule_steps",))
        if length < total:
            reason = "after the schedule the learning rate keeps its last value; in MaxText it is 0"
            t.unsupported("learning_rate_schedule_steps", reason)
        total = length
    t.choose("optimizer/schedule", kind)
    warmup = int(total * s.number("warmup_steps_fraction"))
    t.set("optimizer.schedule.warmup_steps", warmup, from_keys=("warmup_steps_fraction",))
    final = "learning_rate_final_fraction"
    t.set("optimizer.schedule.final_fraction", s.number(final), from_keys=(final,))
    if kind == "wsd":
        decay = max(1, int(total * s.number("wsd_decay_steps_fraction")))
        t.set("optimizer.schedule.decay_steps", decay, from_keys=("lr_schedule_type",))
        t.set("optimizer.schedule.decay_style", s["wsd_decay_style"], from_keys=("wsd_decay_style",))


def optimizer(t: Translation) -> None:
    """Choose the optimizer and set its keys."""
    s, kind = t.settings, t.settings["opt_type"]
    if kind not in ("adamw", "sgd", "muon"):
        t.unsupported("opt_type", "accepted: adamw, sgd, muon; the command has adamw")
        kind = "adamw"
    t.choose("optimizer", kind)
    if kind == "sgd":
        t.set("optimizer.weight_decay", 0, from_keys=("opt_type",))
        t.set("optimizer.momentum", 0, from_keys=("opt_type",))
    else:
        for key, name in (
            ("adam_b1", "b1"),
            ("adam_b2", "b2"),
            ("adam_eps", "eps"),
            ("adam_weight_decay", "weight_decay"),
        ):
            t.set(f"optimizer.{name}", s.number(key), from_keys=(key,))
        if s.given("adam_eps_root"):
            t.set("optimizer.eps_root", s.number("adam_eps_root"), from_keys=("adam_eps_root",))
        t.set("optimizer.no_decay", s["adamw_mask"] or [], from_keys=("adamw_mask",))
    if s.given("mu_dtype"):
        t.set("optimizer.mu_dtype", s["mu_dtype"], from_keys=("mu_dtype",))
    if kind == "muon":
        t.set("optimizer.momentum", s.number("muon_beta"), from_keys=("muon_beta",))
        t.set("optimizer.matrix_weight_decay", s.number("muon_weight_decay"), from_keys=("muon_weight_decay",))
        t.set("optimizer.update_rms", s["muon_consistent_rms"] or 0, from_keys=("muon_consistent_rms",))
    masks = {"trainable_parameters_mask": "trainable", "student_params_to_update": "trainable"}
    for key, name in masks.items():
        if s.given(key):
            t.set(f"optimizer.{name}", s[key], from_keys=(key,))
    for key in ("adamw_mask", *masks):
        if s.given(key):
            t.mention(key, "the patterns match the parameter paths that task=inspect lists")


def evaluation(t: Translation) -> None:
    """Set when and on how much to evaluate; MaxText's default is never."""
    s, interval, batches = t.settings, t.settings.count("eval_interval"), t.settings.count("eval_steps")
    if interval <= 0:
        t.set("train.eval_batches", 0, from_keys=("eval_interval",))
        return
    t.set("train.eval_every", interval, from_keys=("eval_interval",))
    t.set("train.eval_batches", batches if batches > 0 else ALL_BATCHES, from_keys=("eval_steps", "eval_interval"))
    if s.number("target_eval_loss") > 0:
        t.set("train.target_eval_loss", s.number("target_eval_loss"), from_keys=("target_eval_loss",))


def spikes(t: Translation) -> None:
    """Set what happens at loss spikes and at non-finite losses."""
    s = t.settings
    if s["skip_step_on_spikes"]:
        keys = ("skip_step_on_spikes", "skip_step_scaling_factor", "skip_step_interval")
        t.set("train.spike.sigmas", s.number("skip_step_scaling_factor"), from_keys=keys)
        # An exponential mean with this decay averages over as many steps as MaxText's window has.
        t.set("train.spike.decay", round(1 - 1 / max(2, s.count("skip_step_interval")), 6), from_keys=keys)
    stops = {key: s[key] for key in ("abort_on_nan_loss", "abort_on_inf_loss")}
    if not any(stops.values()):
        t.set("train.on_nonfinite", "skip", from_keys=tuple(stops))
        t.mention("abort_on_nan_loss", "updates with NaN or Inf are skipped, never applied")
    for key, stop in stops.items():
        if not stop and any(stops.values()):
            t.unsupported(key, "NaN and Inf are treated alike: train.on_nonfinite=stop")


def seeds(t: Translation) -> None:
    """Set the seeds of weights and data."""
    for key, name in (("data_shuffle_seed", "data_seed"), ("init_weights_seed", "weights_seed")):
        if t.settings.given(key):
            t.set(f"run.{name}", t.settings.count(key), from_keys=(key,))


def checkpoint(t: Translation) -> None:
    """Set how checkpoints are saved, including local ones."""
    s = t.settings
    if not s["enable_checkpointing"]:
        t.choose("checkpoint", "none")
        return
    if not s["async_checkpointing"]:
        t.choose("checkpoint", "sync")
    if s.given("checkpoint_period"):
        t.set("checkpoint.every", s.count("checkpoint_period"), from_keys=("checkpoint_period",))
    if s.given("max_num_checkpoints_to_keep"):
        t.set("checkpoint.keep", s.count("max_num_checkpoints_to_keep"), from_keys=("max_num_checkpoints_to_keep",))
    if s["enable_continuous_checkpointing"]:
        t.set("checkpoint.max_overhead", 0.05, from_keys=("enable_continuous_checkpointing",))
    tiers = ("enable_multi_tier_checkpointing", "enable_emergency_checkpoint")
    if any(s[key] for key in tiers):
        t.set("checkpoint.local_every", s.count("local_checkpoint_period"), from_keys=tiers)
        t.set("checkpoint.local_folder", s["local_checkpoint_directory"], from_keys=tiers)
        t.set("checkpoint.peer_copies", 1, from_keys=tiers)
        minutes, every = (f"multi_tier_checkpointing_backup_interval_{unit}" for unit in ("minutes", "steps"))
        if s[minutes]:
            t.set("checkpoint.every_minutes", s.number(minutes), from_keys=tiers)
        if s[every]:
            t.set("checkpoint.every", s.count(every), from_keys=tiers)


def profile(t: Translation) -> None:
    """Set the profiled steps; MaxText counts steps from 0, maxhydra from 1."""
    s, kind = t.settings, t.settings["profiler"]
    if not kind:
        return
    if kind != "xplane":
        t.mention("profiler", "profile.steps writes XPlane traces; run the command under nsys for its own format")
    first, count = s.count("skip_first_n_steps_for_profiler") + 1, s.count("profiler_steps")
    keys = ("profiler", "skip_first_n_steps_for_profiler", "profiler_steps")
    t.set("profile.steps", [first, first + count - 1], from_keys=keys)
    if (period := s.count("profile_periodically_period")) > 0:
        t.set("profile.every", period, from_keys=("profile_periodically_period",))
        t.set("profile.length", count, from_keys=keys)


def tracking(t: Translation) -> None:
    """Set trackers and statistics of layers; metrics.jsonl is written in any case."""
    s = t.settings
    if s["enable_wandb"]:
        t.choose("tracker", "wandb")
        t.set("tracker.project", s["wandb_project_name"], from_keys=("enable_wandb", "wandb_project_name"))
    elif s["enable_tensorboard"] and s.names("enable_tensorboard"):
        t.choose("tracker", "tensorboard")
    if s["record_internal_nn_metrics"]:
        t.set("statistics.every", s.count("log_period"), from_keys=("record_internal_nn_metrics",))


def hardware(t: Translation) -> None:
    """Set the platform, if it is not found from the devices, and compiler flags."""
    s = t.settings
    if s["hardware"] == "cpu":
        t.choose("hardware", "cpu")
    elif s["hardware"] == "gpu_multiprocess":
        t.set("hardware.distributed.cluster", "gpu_multiprocess", from_keys=("hardware",))
    keys = ("compile_xla_flags", "dump_hlo_xla_flags")
    if flags := [flag for key in keys for flag in str(s[key] or "").split()]:
        t.set("hardware.xla_flags", flags, from_keys=keys)


def diloco(t: Translation) -> None:
    """Set the outer optimizer of DiLoCo."""
    s, switch = t.settings, ("enable_diloco",)
    if not s["enable_diloco"]:
        return
    t.set("train.diloco.period", s.count("diloco_sync_period"), from_keys=switch)
    t.set("train.diloco.learning_rate", s.number("diloco_outer_lr"), from_keys=switch)
    t.set("train.diloco.momentum", s.number("diloco_outer_momentum"), from_keys=switch)
    if s["enable_streaming_diloco"] and s["num_diloco_fragments"]:
        t.set("train.diloco.fragments", s.count("num_diloco_fragments"), from_keys=("num_diloco_fragments",))
