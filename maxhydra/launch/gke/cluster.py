"""The part of the Kubernetes API that jobs need. The only module that imports the client, which takes a second."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import kubernetes as k8s
import urllib3
import yaml

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.launch.base import KEY
from maxhydra.launch.gke.api_errors import api_error, unreachable_error
from maxhydra.launch.gke.manifests import SWEEP, Manifest, Workload
from maxhydra.launch.gke.settings import WORKER

# Seconds to connect, and to wait for a response.
TIMEOUT = (5, 60)
DELETE_TIMEOUT, DELETE_POLL = 300, 0.5
# Seconds without output after which a followed log ends; the client requires a number.
FOLLOW_TIMEOUT = 7 * 86400


class Cluster:
    """One namespace of a Kubernetes cluster, and the kind of objects in it that run jobs."""

    def __init__(self, namespace: str, context: str | None, workload: Workload):
        self._namespace, self._kind, self._pod_label = namespace, workload.kind, workload.pod_label
        api = _connect(context)
        self._address = api.configuration.host
        self._objects, self._core = k8s.client.CustomObjectsApi(api), k8s.client.CoreV1Api(api)
        self._workloads = {"group": workload.group, "version": workload.version, "plural": workload.plural}
        self._workloads["namespace"] = namespace

    def create_workload(self, manifest: Manifest) -> Manifest:
        """Return the created object. Raises ClusterApiError with status 409 if the name is taken."""
        with self._api_errors(f"{self._kind} {manifest['metadata']['name']}"):
            created: Manifest = self._objects.create_namespaced_custom_object(
                **self._workloads, body=manifest, _request_timeout=TIMEOUT
            )
        return created

    def workload(self, name: str) -> Manifest | None:
        with self._api_errors(f"{self._kind} {name}"), _ignore_not_found():
            item: Manifest = self._objects.get_namespaced_custom_object(
                **self._workloads, name=name, _request_timeout=TIMEOUT
            )
            return item
        return None

    def workloads(self, sweep: str) -> dict[str, Manifest]:
        """JobSets or Jobs of a sweep, by name."""
        with self._api_errors(f"{self._kind}s of {sweep}"):
            response = self._objects.list_namespaced_custom_object(
                **self._workloads, label_selector=f"{SWEEP}={sweep}", _request_timeout=TIMEOUT
            )
        return {item["metadata"]["name"]: item for item in response["items"]}

    def delete_workload(self, name: str) -> None:
        """Delete a JobSet or Job in the foreground: its pods get SIGTERM, and it remains until they have exited."""
        with self._api_errors(f"{self._kind} {name}"), _ignore_not_found():
            self._objects.delete_namespaced_custom_object(
                **self._workloads, name=name, propagation_policy="Foreground", _request_timeout=TIMEOUT
            )

    def wait_until_deleted(self, name: str) -> None:
        """Wait until the name of a deleted object is free again, which takes as long as its pods take to save."""
        deadline = time.monotonic() + DELETE_TIMEOUT
        while self.workload(name) is not None:
            if time.monotonic() > deadline:
                reason = f"{self._kind} {name} still exists {DELETE_TIMEOUT} s after its deletion"
                raise ConfigError(
                    Problem(
                        f"{KEY}.namespace",
                        reason,
                        self._namespace,
                        hint=f"kubectl describe {self._kind.lower()} {name}",
                    )
                )
            time.sleep(DELETE_POLL)

    def create_config_map(self, manifest: Manifest) -> None:
        """Create a ConfigMap, replacing one left behind by an earlier job of the same name."""
        metadata = manifest["metadata"]
        with self._api_errors(f"ConfigMap {metadata['name']}"):
            try:
                self._core.create_namespaced_config_map(self._namespace, manifest, _request_timeout=TIMEOUT)
            except k8s.client.ApiException as error:
                if error.status != 409:
                    raise
                existing = self._core.read_namespaced_config_map(
                    metadata["name"], self._namespace, _request_timeout=TIMEOUT
                )
                owners = [owner.uid for owner in existing.metadata.owner_references or []]
                if metadata["ownerReferences"][0]["uid"] in owners:
                    return
                self._core.delete_namespaced_config_map(metadata["name"], self._namespace, _request_timeout=TIMEOUT)
                self._core.create_namespaced_config_map(self._namespace, manifest, _request_timeout=TIMEOUT)

    def pods(self, name: str) -> list[Any]:
        """Pods of a job."""
        with self._api_errors(f"pods of {name}"):
            selector = f"{self._pod_label}={name}"
            pods: list[Any] = self._core.list_namespaced_pod(
                self._namespace, label_selector=selector, _request_timeout=TIMEOUT
            ).items
        return pods

    def log(self, pod: str, *, lines: int) -> str:
        """Last `lines` lines of the worker's log."""
        with self._api_errors(f"log of pod {pod}"):
            text: str = self._core.read_namespaced_pod_log(
                pod, self._namespace, container=WORKER, tail_lines=lines, _request_timeout=TIMEOUT
            )
        return text

    def follow(self, pod: str) -> Iterator[str]:
        """Stream the worker's log line by line until it ends."""
        with self._api_errors(f"log of pod {pod}"):
            stream = self._core.read_namespaced_pod_log(
                pod,
                self._namespace,
                container=WORKER,
                follow=True,
                _preload_content=False,
                _request_timeout=(TIMEOUT[0], FOLLOW_TIMEOUT),
            )
            for line in stream:
                yield line.decode(errors="replace")

    @contextmanager
    def _api_errors(self, request: str) -> Iterator[None]:
        try:
            yield
        except k8s.client.ApiException as error:
            message, status = _message(error), int(error.status)
            raise api_error(
                request, status=status, message=message, server=self._address, namespace=self._namespace
            ) from None
        except urllib3.exceptions.HTTPError as error:
            raise unreachable_error(self._address, error) from None


@contextmanager
def _ignore_not_found() -> Iterator[None]:
    """Suppress 404 for a missing object, but not for an unknown resource type."""
    try:
        yield
    except k8s.client.ApiException as error:
        if error.status != 404 or _details(error).get("name") is None:
            raise


def _connect(context: str | None) -> Any:
    """API client from the kubeconfig, or from the pod's service account when running inside a cluster."""
    configuration = k8s.client.Configuration()
    try:
        try:
            # The client library reads KUBECONFIG only once, when it is imported.
            path = os.environ.get("KUBECONFIG")
            k8s.config.load_kube_config(path, context, client_configuration=configuration)
        except k8s.config.ConfigException:
            if context is not None or "KUBERNETES_SERVICE_HOST" not in os.environ:
                raise
            k8s.config.load_incluster_config(client_configuration=configuration)
    except (k8s.config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"does not select a cluster: {' '.join(str(error).split())}"
        hint = "kubectl config get-contexts lists them; gcloud container clusters get-credentials NAME adds one"
        raise ConfigError(Problem(f"{KEY}.context", reason, context, hint=hint)) from None
    # Report an unreachable cluster immediately; the controller has its own retries.
    configuration.retries = False
    return k8s.client.ApiClient(configuration)


def _message(error: Any) -> str:
    """The server's error message in one line."""
    message = _body(error).get("message") or str(error.body or "").strip() or str(error.reason)
    return " ".join(str(message).split())


def _details(error: Any) -> dict[str, Any]:
    details = _body(error).get("details")
    return details if isinstance(details, dict) else {}


def _body(error: Any) -> dict[str, Any]:
    try:
        body = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}
