"""State, progress and results of jobs, read from their pods."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from maxhydra.launch.gke.manifests import JOB_INDEX
from maxhydra.launch.gke.settings import WORKER
from maxhydra.launch.job_spec import decode_message

# Condition of a JobSet or Job that failed.
FAILED = "Failed"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"


def leader_pod(pods: Sequence[Any]) -> Any | None:
    """Pod of the first process, which writes the run."""
    return min(pods, key=_index, default=None)


def describe_progress(pods: Sequence[Any]) -> str:
    """Summarize pod phases: `pods: 1 pending, 2 running (ImagePullBackOff)`."""
    if not pods:
        return "waits for its pods"
    phases = Counter(pod.status.phase.lower() for pod in pods)
    obstacles = sorted({reason for pod in pods if (reason := _obstacle(pod))})
    summary = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
    why = f" ({', '.join(obstacles)})" if obstacles else ""
    return f"pods: {summary}{why}"


def run_result(pods: Sequence[Any], outcome: tuple[str, str]) -> dict[str, Any]:
    """Facts for run.json: the leader's termination message if it left one, else derived from the pods' states."""
    state, condition_message = outcome
    leader = leader_pod(pods)
    message = decode_message(ended.message) if leader is not None and (ended := _terminated(leader)) else None
    if state != FAILED:
        return message or {"status": "finished", "reason": "its pods have finished"}
    if message is not None and message["status"] in ("failed", "preempted"):
        return message
    ends = [(pod, end) for pod in pods for end in (_terminated(pod), *_ended_init_containers(pod)) if end is not None]
    failures = [f"{pod.metadata.name}: {_failure(end)}" for pod, end in ends if end.exit_code]
    return {"status": "failed", "reason": "; ".join([*failures[:3], condition_message or "its pods failed"])}


def _index(pod: Any) -> tuple[int, int]:
    known = {**(pod.metadata.annotations or {}), **(pod.metadata.labels or {})}
    return int(known.get(JOB_INDEX, 0)), int(known.get(COMPLETION_INDEX, 0))


def _terminated(pod: Any) -> Any | None:
    """Terminated state of the worker container; None while it runs."""
    statuses = pod.status.container_statuses or []
    states = [status.state for status in statuses if status.name == WORKER]
    return states[0].terminated if states and states[0] is not None else None


def _ended_init_containers(pod: Any) -> list[Any]:
    states = [status.state for status in pod.status.init_container_statuses or []]
    return [state.terminated for state in states if state is not None]


def _failure(ended: Any) -> str:
    """`OOMKilled, exit code 137`, and the last line of output."""
    message = decode_message(ended.message)
    last = (message or {}).get("reason") or ((ended.message or "").strip().splitlines() or [""])[-1]
    return ", ".join(filter(None, [ended.reason, f"exit code {ended.exit_code}", last]))


def _obstacle(pod: Any) -> str:
    """Why a pod is not running: image pull errors, or no matching node."""
    for status in pod.status.container_statuses or []:
        if status.state is not None and status.state.waiting is not None:
            return str(status.state.waiting.reason)
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return str(condition.reason)
    return ""
