"""Names of the metrics that each task logs, and of those of which larger values are better.

They are known before a run starts, so that a sweep over a metric that is never logged fails at its start.
"""

from collections.abc import Iterator
from fnmatch import fnmatch

from maxhydra.config.errors import Problem, did_you_mean
from maxhydra.config.schema.run import Train

# The metric of train.target_eval_loss, and bits per byte, which evaluations of data with text report.
EVAL_LOSS, EVAL_BPB = "eval/loss", "eval/bpb"
# Metrics of each source of a mixture and of each of data.eval_sets.
SET_METRICS = ("eval/*/loss", "eval/*/bpb")
# Metrics of train.evals, by task and metric.
BENCHMARKS = ("eval/*/*",)
# Metrics of every training task. `*` matches names known only to the run, such as those of data sources.
STEPS = ("loss", "grad_norm", "learning_rate", "tokens", "skipped", "step_time", "input_wait", "data/*", "system/*")
# Aux losses and statistics of layers, and multi-token prediction.
LAYERS = ("side_loss", "moe/*", "attention/logit_max", "mtp_loss")
SPEED = ("tokens_per_second", "tflops_per_device", "mfu")
LIKELIHOOD = (EVAL_LOSS, EVAL_BPB, "eval/perplexity", "eval/tokens", *SET_METRICS)
PAIRS = ("accuracy", "logprob_chosen", "logprob_rejected", "reward_chosen", "reward_rejected", "reward_margin", "kl")
REWARDS = ("accuracy", "reward_chosen", "reward_rejected", "reward_margin", "reward_mean", "absolute_error")
POLICY = ("clip_share", "entropy", "kl", "sampler_error", "importance_weight", "value_loss", "explained_variance")
ANSWERS = ("answers/*", "groups/*", "reward/*", "environment/*", "rollout/*", *POLICY)
GRADES = ("eval/error", "eval/reward", "eval/pass@*", "eval/maj@*", "eval/prompts", "eval/tokens")
DIVERGENCE = ("cross_entropy", "divergence", "features")
TRAINED = (*STEPS, *LAYERS, *SPEED)
LOGGED = {
    "pretrain": (*TRAINED, *LIKELIHOOD, *BENCHMARKS),
    "sft": (*TRAINED, *LIKELIHOOD, *BENCHMARKS),
    "dpo": (*TRAINED, *PAIRS, EVAL_LOSS, "eval/tokens", *(f"eval/{name}" for name in PAIRS), *BENCHMARKS),
    "reward_model": (*TRAINED, *REWARDS, EVAL_LOSS, "eval/tokens", *(f"eval/{name}" for name in REWARDS)),
    "grpo": (*TRAINED, *ANSWERS, *PAIRS, *GRADES, *BENCHMARKS),
    "bench": ("loss", "step_time", *SPEED),
    "eval": ("eval/*",),
    "distill": (*TRAINED, *DIVERGENCE, "on_policy", "answers/*", *LIKELIHOOD, "eval/kl", *BENCHMARKS),
}


# Metrics of which larger values are better. All others are losses, errors or times.
MAXIMIZED = (
    *SPEED,
    *("accuracy", "eval/accuracy", "reward_margin", "eval/reward_margin"),
    *("eval/reward", "reward/*", "eval/pass@*", "eval/maj@*"),
    # Of benchmarks; the name of a filter may follow.
    *(f"eval/*/{name}*" for name in ("acc", "*_acc", "exact_match", "f1", "bleu", "chrf", "rouge", "mcc", "pass@")),
    *(f"eval/*/{name}" for name in ("likelihood", "em", "score", "bert_score", "precision", "recall")),
)


def is_maximized(name: str) -> bool:
    """True if larger values of a metric are better."""
    return any(fnmatch(name, metric) for metric in MAXIMIZED)


def unlogged_metric(path: str, name: str, *, task: str, train: Train) -> Iterator[Problem]:
    """Yield the problem of a metric that no run of this task logs; `path` is the key that names it."""
    known = LOGGED.get(task)
    if known is None:
        accepted = f"objectives of task={', '.join(LOGGED)}"
        yield Problem(path, f"is not logged, because task={task} does not train", value=name, accepted=accepted)
        return
    has_benchmarks = bool(train.evals.tasks)
    evaluates = {metric: has_benchmarks if metric in BENCHMARKS else train.eval_batches > 0 for metric in known}
    logged = [metric for metric in known if task == "eval" or evaluates[metric] or not metric.startswith("eval/")]
    if any(fnmatch(name, metric) for metric in logged):
        return
    accepted = ", ".join(logged)
    if name in known:
        hint = "set train.eval_batches to 1 or more"
        yield Problem(path, "is not logged, because evaluation is disabled", value=name, accepted=accepted, hint=hint)
        return
    yield Problem(path, f"is not logged by task={task}", value=name, accepted=accepted, hint=did_you_mean(name, logged))
