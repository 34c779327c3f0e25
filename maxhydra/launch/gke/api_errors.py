"""What a cluster's refusal means: one line with what was refused, by whom, and the way out."""

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.settings import KEY

ROLE = "docs/launch.md has the Role that is needed"


class RefusedError(ConfigError):
    """The cluster said no, or nothing. `status` is that of the answer; None where there was none."""

    def __init__(self, problem: Problem, status: int | None):
        super().__init__(problem)
        self.status = status

    @property
    def is_passing(self) -> bool:
        """Whether it may go by itself: no answer, too many questions, a server that is being replaced."""
        return self.status is None or self.status == 429 or self.status >= 500


def refusal(what: str, *, status: int, said: str, by: str, namespace: str) -> RefusedError:
    """`what` was asked for, and `said` is the server's answer."""
    reason = f"{by} refused {what} with {status}: {said}"
    match status:
        case 401:
            problem = Problem(f"{KEY}.context", reason, hint="log in again: gcloud auth login")
        case 403 if "exceeded quota" in said:
            hint = f"ask for less, wait for other jobs, or let them take turns: {KEY}.queue"
            problem = Problem(f"{KEY}.namespace", reason, namespace, hint=hint)
        case 403:
            problem = Problem(f"{KEY}.namespace", reason, namespace, hint=ROLE)
        case 404 if "namespaces" in said:
            problem = Problem(f"{KEY}.namespace", reason, namespace, hint="kubectl get namespaces lists them")
        case 404 if what.startswith("JobSet"):
            hint = "the cluster has no JobSet controller; docs/launch.md says how to install it"
            problem = Problem("hydra/launcher", reason, "gke", hint=hint)
        case 409:
            problem = Problem(KEY, reason, hint=f"kubectl -n {namespace} get jobsets,configmaps shows what is there")
        case 400 | 422:
            problem = Problem(KEY, reason, hint="maxhydra launch render shows what was sent")
        case _:
            problem = Problem(KEY, reason)
    return RefusedError(problem, status)


def no_answer(by: str, cause: BaseException) -> RefusedError:
    """The innermost reason, `Connection refused`, and not the layers around it."""
    while (below := cause.__cause__ or cause.__context__) is not None:
        cause = below
    hint = "kubectl cluster-info shows whether it can be reached from here"
    return RefusedError(Problem(f"{KEY}.context", f"the cluster at {by} does not answer: {cause}", hint=hint), None)
