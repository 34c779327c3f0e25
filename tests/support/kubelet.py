"""Replacements for parts that tests/support/kube.py lacks: a kubelet that runs pods as processes, a JobSet controller.

The node and its log endpoint are real objects of the API server, which asks the endpoint for logs as it would a
kubelet. Pods of Jobs come from the real Job controller. Mount paths in commands, variables and files are replaced by
folders of this machine; images are ignored.
"""

import contextlib
import datetime
import http.server
import signal
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.kube import Server
from tests.support.skips import import_optional

k8s = import_optional("kubernetes", extra="gke")

NODE, WORKER = "loopback", "worker"
JOBSETS = {"group": "jobset.x-k8s.io", "version": "v1alpha2", "plural": "jobsets"}
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
POLL_SECONDS = 0.2
LOG_SECONDS = 30


class Kubelet:
    """Runs the pods of one namespace. `python` replaces the interpreter in their commands."""

    def __init__(self, server: Server, namespace: str, folder: Path, *, python: str, environment: Mapping[str, str]):
        api = k8s.config.new_client_from_config(str(server.kubeconfig))
        self._core, self._objects = k8s.client.CoreV1Api(api), k8s.client.CustomObjectsApi(api)
        self._namespace, self._folder = namespace, folder
        self._python, self._environment = python, environment
        self._processes: dict[str, subprocess.Popen] = {}
        self._ended: set[str] = set()
        self._stopping = threading.Event()
        self._logs = _log_server(server, folder)

    @contextmanager
    def running(self) -> Iterator[None]:
        node = {"metadata": {"name": NODE}}
        with contextlib.suppress(k8s.client.ApiException):  # left by an earlier test
            self._core.create_node(node)
        endpoint = {"kubeletEndpoint": {"Port": self._logs.server_address[1]}}
        address = [{"type": "InternalIP", "address": "127.0.0.1"}]
        self._core.patch_node_status(NODE, {"status": {"daemonEndpoints": endpoint, "addresses": address}})
        threads = [threading.Thread(target=target) for target in (self._loop, self._logs.serve_forever)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._logs.shutdown()
            for thread in threads:
                thread.join()
            for process in self._processes.values():
                process.kill()
                process.wait()

    def _loop(self) -> None:
        while not self._stopping.wait(POLL_SECONDS):
            with _ignore_changes():
                self._reconcile_job_sets()
            for pod in self._core.list_namespaced_pod(self._namespace).items:
                with _ignore_changes():
                    self._reconcile_pod(pod)

    def _reconcile_job_sets(self) -> None:
        """Create the pod of a new JobSet, and set the condition of one whose pod has ended."""
        for item in self._objects.list_namespaced_custom_object(namespace=self._namespace, **JOBSETS)["items"]:
            name, uid = item["metadata"]["name"], item["metadata"]["uid"]
            if "deletionTimestamp" in item["metadata"] or item.get("status", {}).get("conditions"):
                continue
            pods = self._core.list_namespaced_pod(self._namespace, label_selector=f"{JOBSET_LABEL}={name}").items
            if not pods:
                template = item["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
                owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": name, "uid": uid}
                labels = {**template["metadata"]["labels"], JOBSET_LABEL: name, "jobset.sigs.k8s.io/job-index": "0"}
                metadata = {"name": f"{name}-w-0-0-{uid[:5]}", "labels": labels}
                metadata["ownerReferences"] = [owner | {"blockOwnerDeletion": True}]
                self._core.create_namespaced_pod(self._namespace, {"metadata": metadata, "spec": template["spec"]})
            elif pods[0].status.phase in ("Succeeded", "Failed"):
                kind = "Completed" if pods[0].status.phase == "Succeeded" else "Failed"
                now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                condition = {
                    "type": kind,
                    "status": "True",
                    "reason": kind,
                    "message": "its pod ended",
                    "lastTransitionTime": now,
                }
                status = {"status": {"conditions": [condition]}}
                self._objects.patch_namespaced_custom_object_status(
                    namespace=self._namespace, name=name, body=status, **JOBSETS
                )

    def _reconcile_pod(self, pod: Any) -> None:
        name, process = pod.metadata.name, self._processes.get(pod.metadata.name)
        if process is None:
            self._start(pod)
        elif process.poll() is None and pod.metadata.deletion_timestamp is not None:
            process.send_signal(signal.SIGTERM)
        elif process.poll() is not None:
            if name not in self._ended:
                self._report_end(name, process.returncode)
            if pod.metadata.deletion_timestamp is not None:
                self._core.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0)

    def _start(self, pod: Any) -> None:
        name = pod.metadata.name
        worker = next(item for item in pod.spec.containers if item.name == WORKER)
        volumes = {volume.name: volume for volume in pod.spec.volumes}
        root = self._folder / name
        folders: dict[str, Path] = {"/dev/termination-log": root / "termination-log"}
        for mount in worker.volume_mounts:
            folders[mount.mount_path] = root / mount.name
            if (host := volumes[mount.name].host_path) is not None:
                folders[mount.mount_path] = Path(host.path)
            folders[mount.mount_path].mkdir(parents=True, exist_ok=True)
        files = self._core.read_namespaced_config_map(volumes["config"].config_map.name, self._namespace).data
        for file, text in files.items():
            (root / "config" / file).write_text(_moved(text, folders))
        if pod.spec.node_name is None:
            target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
            binding = {"metadata": {"name": name}, "target": target}
            self._core.create_namespaced_binding(self._namespace, binding, _preload_content=False)
        variables = {entry.name: _moved(entry.value or "", folders) for entry in worker.env}
        first, *rest = (_moved(word, folders) for word in worker.command)
        command = [self._python if first == "python" else first, *rest]
        with open(root / "log", "wb") as log:
            environment = {**self._environment, **variables}
            self._processes[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=root)
        self._set_status(name, "Running", {"running": {}})

    def _report_end(self, name: str, code: int) -> None:
        path = self._folder / name / "termination-log"
        message = path.read_text() if path.exists() else ""
        terminated = {"exitCode": code if code >= 0 else 128 - code, "reason": "Error" if code else "Completed"}
        phase = "Failed" if code else "Succeeded"
        self._set_status(name, phase, {"terminated": terminated | {"message": message}})
        self._ended.add(name)

    def _set_status(self, name: str, phase: str, state: dict[str, Any]) -> None:
        container = {"name": WORKER, "state": state, "ready": phase == "Running", "restartCount": 0}
        container |= {"image": "x", "imageID": "x"}
        status = {"status": {"phase": phase, "containerStatuses": [container]}}
        self._core.patch_namespaced_pod_status(name, self._namespace, status)


@contextmanager
def _ignore_changes() -> Iterator[None]:
    """Ignore an object that was changed or deleted between requests, or does not exist yet, until the next round."""
    try:
        yield
    except k8s.client.ApiException as error:
        if error.status not in (404, 409):
            raise


def _moved(text: str, folders: Mapping[str, Path]) -> str:
    for path, folder in folders.items():
        text = text.replace(path, str(folder))
    return text


def _log_server(server: Server, folder: Path) -> http.server.ThreadingHTTPServer:
    """HTTPS endpoint of the node, /containerLogs/NAMESPACE/POD/CONTAINER, which the API server forwards requests to."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urllib.parse.urlparse(self.path)
            query, log = urllib.parse.parse_qs(url.query), folder / url.path.split("/")[3] / "log"
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            if "follow" not in query:
                self.wfile.write(log.read_bytes())
                return
            deadline, position = time.monotonic() + LOG_SECONDS, 0
            ended = log.with_name("termination-log")
            while time.monotonic() < deadline:
                is_over = ended.exists()
                content = log.read_bytes()[position:]
                self.wfile.write(content)
                position += len(content)
                if is_over:
                    return
                time.sleep(POLL_SECONDS)

        def log_message(self, *arguments: Any) -> None:
            pass

    endpoint = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(server.pki / "api.crt", server.pki / "api.key")
    endpoint.socket = tls.wrap_socket(endpoint.socket, server_side=True)
    return endpoint
