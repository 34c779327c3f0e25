"""The Kubernetes API as far as jobs need it. The only module that imports its client, which takes a second."""

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
from maxhydra.launch.gke.api_errors import no_answer, refusal
from maxhydra.launch.gke.manifests import GROUP, PLURAL, SWEEP, VERSION, Manifest
from maxhydra.launch.settings import KEY

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
# Seconds to connect, and to wait for an answer.
TIMEOUT = (5, 60)
GONE_SECONDS, GONE_PAUSE = 300, 0.5


class Cluster:
    """One namespace of a cluster."""

    def __init__(self, namespace: str, context: str | None):
        self._namespace = namespace
        api = _connected(context)
        self._address = api.configuration.host
        self._objects, self._core = k8s.client.CustomObjectsApi(api), k8s.client.CoreV1Api(api)
        self._jobsets = {"group": GROUP, "version": VERSION, "namespace": namespace, "plural": PLURAL}

    def create_job_set(self, manifest: Manifest) -> Manifest:
        """As the cluster has it afterwards. RefusedError with status 409 where the name is taken."""
        with self._explained(f"JobSet {manifest['metadata']['name']}"):
            made: Manifest = self._objects.create_namespaced_custom_object(
                **self._jobsets, body=manifest, _request_timeout=TIMEOUT
            )
        return made

    def job_set(self, name: str) -> Manifest | None:
        with self._explained(f"JobSet {name}"), _absent_is_none():
            found: Manifest = self._objects.get_namespaced_custom_object(
                **self._jobsets, name=name, _request_timeout=TIMEOUT
            )
            return found
        return None

    def job_sets(self, sweep: str) -> dict[str, Manifest]:
        """Those of a sweep, by name."""
        with self._explained(f"JobSets of {sweep}"):
            listed = self._objects.list_namespaced_custom_object(
                **self._jobsets, label_selector=f"{SWEEP}={sweep}", _request_timeout=TIMEOUT
            )
        return {item["metadata"]["name"]: item for item in listed["items"]}

    def delete_job_set(self, name: str) -> None:
        """Its pods are asked to end, and it stays until they have."""
        with self._explained(f"JobSet {name}"), _absent_is_none():
            self._objects.delete_namespaced_custom_object(
                **self._jobsets, name=name, propagation_policy="Foreground", _request_timeout=TIMEOUT
            )

    def wait_until_gone(self, name: str) -> None:
        """Until a name is free again, which takes as long as its pods take to save."""
        until = time.monotonic() + GONE_SECONDS
        while self.job_set(name) is not None:
            if time.monotonic() > until:
                reason = f"JobSet {name} is being deleted, and still there after {GONE_SECONDS} s"
                raise ConfigError(
                    Problem(f"{KEY}.namespace", reason, self._namespace, hint=f"kubectl describe jobset {name}")
                )
            time.sleep(GONE_PAUSE)

    def create_config_map(self, manifest: Manifest) -> None:
        """In place of one that another JobSet of the same name has left behind."""
        metadata = manifest["metadata"]
        with self._explained(f"ConfigMap {metadata['name']}"):
            try:
                self._core.create_namespaced_config_map(self._namespace, manifest, _request_timeout=TIMEOUT)
            except k8s.client.ApiException as error:
                if error.status != 409:
                    raise
                there = self._core.read_namespaced_config_map(
                    metadata["name"], self._namespace, _request_timeout=TIMEOUT
                )
                owners = [owner.uid for owner in there.metadata.owner_references or []]
                if metadata["ownerReferences"][0]["uid"] in owners:
                    return
                self._core.delete_namespaced_config_map(metadata["name"], self._namespace, _request_timeout=TIMEOUT)
                self._core.create_namespaced_config_map(self._namespace, manifest, _request_timeout=TIMEOUT)

    def pods(self, name: str) -> list[Any]:
        """Of a JobSet."""
        with self._explained(f"pods of {name}"):
            selector = f"{JOBSET_LABEL}={name}"
            found: list[Any] = self._core.list_namespaced_pod(
                self._namespace, label_selector=selector, _request_timeout=TIMEOUT
            ).items
        return found

    def log(self, pod: str, *, lines: int) -> str:
        """The end of what a pod has printed."""
        with self._explained(f"log of pod {pod}"):
            text: str = self._core.read_namespaced_pod_log(
                pod, self._namespace, tail_lines=lines, _request_timeout=TIMEOUT
            )
        return text

    def follow(self, pod: str) -> Iterator[str]:
        """What a pod prints, line by line until it ends."""
        with self._explained(f"log of pod {pod}"):
            stream = self._core.read_namespaced_pod_log(
                pod, self._namespace, follow=True, _preload_content=False, _request_timeout=(TIMEOUT[0], None)
            )
            for line in stream:
                yield line.decode(errors="replace")

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except k8s.client.ApiException as error:
            said, status = _message(error), int(error.status)
            raise refusal(what, status=status, said=said, by=self._address, namespace=self._namespace) from None
        except urllib3.exceptions.HTTPError as error:
            raise no_answer(self._address, error) from None


@contextmanager
def _absent_is_none() -> Iterator[None]:
    """An object that is not there is an answer; a kind of object that the cluster does not know is none."""
    try:
        yield
    except k8s.client.ApiException as error:
        if error.status != 404 or _details(error).get("name") is None:
            raise


def _connected(context: str | None) -> Any:
    """A client of the kubeconfig, or of the account of the pod that this runs in."""
    configuration = k8s.client.Configuration()
    try:
        try:
            # The client itself reads the variable once, when it is imported.
            path = os.environ.get("KUBECONFIG")
            k8s.config.load_kube_config(path, context, client_configuration=configuration)
        except k8s.config.ConfigException:
            if context is not None or "KUBERNETES_SERVICE_HOST" not in os.environ:
                raise
            k8s.config.load_incluster_config(client_configuration=configuration)
    except (k8s.config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, AttributeError) as error:
        reason = f"leads to no cluster: {' '.join(str(error).split())}"
        hint = "kubectl config get-contexts lists them; gcloud container clusters get-credentials NAME adds one"
        raise ConfigError(Problem(f"{KEY}.context", reason, context, hint=hint)) from None
    # A cluster that cannot be reached is said so at once; a controller asks again by itself.
    configuration.retries = False
    return k8s.client.ApiClient(configuration)


def _message(error: Any) -> str:
    """What the server said, in one line."""
    told = _body(error).get("message") or str(error.body or "").strip() or str(error.reason)
    return " ".join(str(told).split())


def _details(error: Any) -> dict[str, Any]:
    details = _body(error).get("details")
    return details if isinstance(details, dict) else {}


def _body(error: Any) -> dict[str, Any]:
    try:
        body = json.loads(error.body)
    except (TypeError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}
