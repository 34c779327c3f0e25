"""The metrics that a task logs, by name: what an objective can be. Known before anything runs, so that a sweep by a
metric that no run will log is refused before its first job.
"""

from collections.abc import Iterator
from fnmatch import fnmatch

from maxhydra.config.errors import Problem, did_you_mean

# Of every task that trains. `*` stands for what only the run knows, such as the name of a source.
STEPS = ("loss", "grad_norm", "learning_rate", "tokens", "skipped", "step_time", "input_wait", "data/*")
# Of layers that tell of themselves, and of those behind the last.
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


def unlogged(path: str, name: str, *, task: str, evaluates: bool) -> Iterator[Problem]:
    """Refuse a metric that no run of this task logs; `path` is the key that names it."""
    known = LOGGED.get(task)
    if known is None:
        accepted = f"objectives of task={', '.join(LOGGED)}"
        yield Problem(path, f"is not logged: task={task} does not train", value=name, accepted=accepted)
        return
    logged = [metric for metric in known if evaluates or not metric.startswith("eval/")]
    if any(fnmatch(name, metric) for metric in logged):
        return
    accepted = ", ".join(logged)
    if name in known:
        hint = "set train.eval_batches to 1 or more"
        yield Problem(path, "is not logged: nothing is evaluated", value=name, accepted=accepted, hint=hint)
        return
    yield Problem(
        path, f"is logged by no run of task={task}", value=name, accepted=accepted, hint=did_you_mean(name, logged)
    )
