"""Errors of the Kubernetes API as one-line problems: the rejected request, the server's message, and a fix."""

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import KEY

ROLE = "see docs/launch.md for the required Role"


class ClusterApiError(ConfigError):
    """A failed API request. `status` is the HTTP status; None if the server did not respond."""

    def __init__(self, problem: Problem, status: int | None):
        super().__init__(problem)
        self.status = status

    @property
    def is_transient(self) -> bool:
        """True if a retry may succeed: no response, rate limiting (429), or a server error (5xx)."""
        return self.status is None or self.status == 429 or self.status >= 500


def api_error(request: str, *, status: int, message: str, server: str, namespace: str) -> ClusterApiError:
    """Build the error for a `request` that the server rejected with `status` and `message`."""
    reason = f"{server} rejected {request} with {status}: {message}"
    match status:
        case 401:
            problem = Problem(f"{KEY}.context", reason, hint="log in again: gcloud auth login")
        case 403 if "exceeded quota" in message:
            hint = f"request less, wait for other jobs, or queue jobs with {KEY}.queue"
            problem = Problem(f"{KEY}.namespace", reason, namespace, hint=hint)
        case 403:
            problem = Problem(f"{KEY}.namespace", reason, namespace, hint=ROLE)
        case 404 if "namespaces" in message:
            problem = Problem(f"{KEY}.namespace", reason, namespace, hint="list them with kubectl get namespaces")
        case 404 if request.startswith("JobSet"):
            hint = "the JobSet controller is not installed in the cluster; see docs/launch.md"
            problem = Problem("hydra/launcher", reason, "gke", hint=hint)
        case 409:
            problem = Problem(KEY, reason, hint=f"list existing objects: kubectl -n {namespace} get jobsets,configmaps")
        case 400 | 422:
            problem = Problem(KEY, reason, hint="show the request with maxhydra launch render")
        case _:
            problem = Problem(KEY, reason)
    return ClusterApiError(problem, status)


def unreachable_error(server: str, cause: BaseException) -> ClusterApiError:
    """Build the error for a server that does not respond, with the innermost cause, such as `Connection refused`."""
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    hint = "check the connection with kubectl cluster-info"
    return ClusterApiError(
        Problem(f"{KEY}.context", f"the cluster at {server} does not respond: {cause}", hint=hint), None
    )
