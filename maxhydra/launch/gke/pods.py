"""What the pods of a job say: how far they are, and how it ended."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from maxhydra.launch.gke.manifests import CONTAINER, JOB_INDEX
from maxhydra.launch.termination import read_message

COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"


def leader(pods: Sequence[Any]) -> Any | None:
    """The pod of the first process, which writes the run."""
    return min(pods, key=_index, default=None)


def progress(pods: Sequence[Any]) -> str:
    """`pods: 1 pending, 2 running (ImagePullBackOff)`."""
    if not pods:
        return "waits for its pods"
    phases = Counter(pod.status.phase.lower() for pod in pods)
    obstacles = sorted({reason for pod in pods if (reason := _obstacle(pod))})
    told = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
    why = f" ({', '.join(obstacles)})" if obstacles else ""
    return f"pods: {told}{why}"


def ending(pods: Sequence[Any], outcome: tuple[str, str]) -> dict[str, Any]:
    """How a run ended, in its own words where it left any: facts of run.json."""
    state, said = outcome
    first = leader(pods)
    words = read_message(ended.message) if first is not None and (ended := _terminated(first)) else None
    if state == "Completed":
        return words or {"status": "finished", "reason": "its JobSet is complete"}
    if words is not None and words["status"] in ("failed", "preempted"):
        return words
    failures = [f"{pod.metadata.name}: {_failure(end)}" for pod in pods if (end := _terminated(pod)) and end.exit_code]
    return {"status": "failed", "reason": "; ".join([*failures[:3], said or "its JobSet failed"])}


def _index(pod: Any) -> tuple[int, int]:
    known = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    return int(known.get(JOB_INDEX, 0)), int(known.get(COMPLETION_INDEX, 0))


def _terminated(pod: Any) -> Any | None:
    """How the worker's container ended; None while it has not."""
    statuses = pod.status.container_statuses or []
    states = [status.state for status in statuses if status.name == CONTAINER]
    return states[0].terminated if states and states[0] is not None else None


def _failure(ended: Any) -> str:
    """`OOMKilled, exit code 137`, and the last line that was printed."""
    message = read_message(ended.message)
    last = (message or {}).get("reason") or ((ended.message or "").strip().splitlines() or [""])[-1]
    return ", ".join(filter(None, [ended.reason, f"exit code {ended.exit_code}", last]))


def _obstacle(pod: Any) -> str:
    """Why a pod does not run: an image that cannot be had, no node that fits."""
    for status in pod.status.container_statuses or []:
        if status.state is not None and status.state.waiting is not None:
            return str(status.state.waiting.reason)
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return str(condition.reason)
    return ""
