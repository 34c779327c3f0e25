"""Names of the metrics that each task logs, which are the possible objectives.

They are known before a run starts, so that a sweep over a metric that is never logged fails before its first job.
"""

from collections.abc import Iterator
from fnmatch import fnmatch

from maxhydra.config.errors import Problem, did_you_mean

# Metrics of every training task. `*` matches names known only to the run, such as those of data sources.
STEPS = ("loss", "grad_norm", "learning_rate", "tokens", "skipped", "step_time", "input_wait", "data/*")
# Aux losses and statistics of layers, and multi-token prediction.
LAYERS = ("side_loss", "moe/*", "mtp_loss")
SPEED = ("tokens_per_second", "tflops_per_device", "mfu")
LIKELIHOOD = ("eval/loss", "eval/perplexity", "eval/tokens")
PAIRS = ("accuracy", "logprob_chosen", "logprob_rejected", "reward_chosen", "reward_rejected", "reward_margin")
ANSWERS = ("answers/*", "groups/*", "reward/*", "clip_share", "entropy", "kl", "sampler_error")
GRADES = ("eval/error", "eval/reward", "eval/pass@*", "eval/maj@*", "eval/prompts", "eval/tokens")
TRAINED = (*STEPS, *LAYERS, *SPEED)
LOGGED = {
    "pretrain": (*TRAINED, *LIKELIHOOD),
    "sft": (*TRAINED, *LIKELIHOOD),
    "dpo": (*TRAINED, *PAIRS, "eval/loss", "eval/tokens", *(f"eval/{name}" for name in PAIRS)),
    "grpo": (*TRAINED, *ANSWERS, *GRADES),
    "bench": ("loss", "step_time", *SPEED),
    "distill": (*TRAINED, "cross_entropy", "divergence", "features", *LIKELIHOOD, "eval/kl"),
}


def unlogged_metric(path: str, name: str, *, task: str, evaluates: bool) -> Iterator[Problem]:
    """Yield the problem of a metric that no run of this task logs; `path` is the key that names it."""
    known = LOGGED.get(task)
    if known is None:
        accepted = f"objectives of task={', '.join(LOGGED)}"
        yield Problem(path, f"is not logged, because task={task} does not train", value=name, accepted=accepted)
        return
    logged = [metric for metric in known if evaluates or not metric.startswith("eval/")]
    if any(fnmatch(name, metric) for metric in logged):
        return
    accepted = ", ".join(logged)
    if name in known:
        hint = "set train.eval_batches to 1 or more"
        yield Problem(path, "is not logged, because evaluation is disabled", value=name, accepted=accepted, hint=hint)
        return
    yield Problem(path, f"is not logged by task={task}", value=name, accepted=accepted, hint=did_you_mean(name, logged))
