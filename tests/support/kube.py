"""A real Kubernetes API server on loopback: etcd, kube-apiserver, and the garbage collection and Job controllers.

KUBEBUILDER_ASSETS names the folder of kube-apiserver and kube-controller-manager; etcd is there or on the PATH. There
is no kubelet and no JobSet controller: tests/support/kubelet.py acts as both, or tests set the states themselves.
"""

import json
import os
import secrets
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.polling import wait_for
from tests.support.ports import free_ports
from tests.support.skips import KUBERNETES

VARIABLE = "KUBEBUILDER_ASSETS"
BINARIES = ("kube-apiserver", "kube-controller-manager", "etcd")
APIS = ("api/v1", "batch/v1", "rbac.authorization.k8s.io/v1", "apiextensions.k8s.io/v1", "apiregistration.k8s.io/v1")
# Admission plugins that the tests do not need; some would wait for a disabled API.
UNUSED = ("ServiceAccount", "MutatingAdmissionWebhook", "ValidatingAdmissionWebhook", "DefaultIngressClass", "Priority")
UNUSED += ("RuntimeClass", "DefaultStorageClass", "PersistentVolumeClaimResize", "StorageObjectInUseProtection")


def missing() -> str:
    """Why no cluster can be started here; empty if one can."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return KUBERNETES
    if absent := [name for name in BINARIES if _binary(name) is None]:
        install = ": apt-get install etcd-server" if absent == ["etcd"] else ""
        return f"needs {', '.join(absent)} in {VARIABLE}={folder} or on the PATH{install}"
    try:
        subprocess.run([str(_binary(BINARIES[0])), "--version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs a {BINARIES[0]} for {os.uname().machine}; that of {VARIABLE}={folder} does not start: {error}"
    return ""


def _binary(name: str) -> str | None:
    return shutil.which(name, path=os.environ[VARIABLE]) or shutil.which(name)


class Server:
    """A cluster whose state is stored in one folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.kubeconfig = folder / "kubeconfig"
        self.pki = folder / "pki"
        self.pki.mkdir(parents=True)
        self._api, self._etcd, self._peer, self._manager = free_ports(4)
        self._tokens = {"admin": secrets.token_hex(16), "unprivileged": secrets.token_hex(16)}
        self._processes: list[subprocess.Popen] = []

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._api}"

    def start(self, *objects: dict[str, Any]) -> None:
        """`objects` are custom resource definitions, which must exist before the garbage collector starts."""
        self._make_keys()
        rights = {"admin": "system:masters", "unprivileged": "none"}
        rows = [f"{token},{user},{user},{rights[user]}" for user, token in self._tokens.items()]
        (self.pki / "tokens.csv").write_text("\n".join(rows) + "\n")
        self.kubeconfig.write_text(yaml.safe_dump(self._kubeconfig()))
        local = f"http://127.0.0.1:{self._etcd}"
        peer = f"http://127.0.0.1:{self._peer}"
        self._spawn(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={local}",
            f"--advertise-client-urls={local}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        wait_for(lambda: _is_ok(f"{local}/health", None))
        self._spawn_api(local)
        wait_for(lambda: self._is_ok("/readyz"))
        for definition in objects:
            self.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        group = [(item["spec"]["group"], item["spec"]["names"]["plural"]) for item in objects]
        for name, plural in group:
            wait_for(lambda name=name, plural=plural: self._is_ok(f"/apis/{name}/v1alpha2/{plural}"))
        self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--controllers=garbagecollector,job",
            f"--cert-dir={self.pki}",
            "--bind-address=127.0.0.1",
            "--port=0",
            f"--secure-port={self._manager}",
        )

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def post(self, path: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {self._tokens['admin']}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers, method="POST")
        urllib.request.urlopen(request, context=self._tls(), timeout=30).close()

    def _is_ok(self, path: str) -> bool:
        headers = {"Authorization": f"Bearer {self._tokens['admin']}"}
        return _is_ok(urllib.request.Request(self.url + path, headers=headers), self._tls())

    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.pki / "ca.crt"))

    def _kubeconfig(self) -> dict[str, Any]:
        """A context for each user."""
        cluster = {"server": self.url, "certificate-authority": str(self.pki / "ca.crt")}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token}} for user, token in self._tokens.items()],
            "contexts": [{"name": user, "context": {"cluster": "test", "user": user}} for user in self._tokens],
            "current-context": "admin",
        }

    def _spawn_api(self, etcd: str) -> None:
        pki = self.pki
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._api}",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--cert-dir={pki}",
            f"--tls-cert-file={pki / 'api.crt'}",
            f"--tls-private-key-file={pki / 'api.key'}",
            f"--token-auth-file={pki / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--anonymous-auth=false",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki / 'sa.pub'}",
            f"--service-account-signing-key-file={pki / 'sa.key'}",
            # Only the APIs that tests use: the server starts in half the time.
            f"--runtime-config=api/all=false,{','.join(f'{name}=true' for name in APIS)}",
            "--feature-gates=APIPriorityAndFairness=false",
            f"--disable-admission-plugins={','.join(UNUSED)}",
        )

    def _spawn(self, name: str, *arguments: str) -> None:
        path = _binary(name)
        assert path is not None
        # etcd does not start on untested architectures unless this variable allows it.
        env = {**os.environ, "ETCD_UNSUPPORTED_ARCH": {"aarch64": "arm64"}.get(os.uname().machine, "")}
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes.append(
                subprocess.Popen([path, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)
            )

    def _make_keys(self) -> None:
        """Create a certificate authority with the extensions that strict clients require, and the server's keys."""
        names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        authority = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"]
        (self.pki / "extensions").write_text(f"{names}\nextendedKeyUsage=serverAuth\nauthorityKeyIdentifier=keyid\n")
        signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "extensions", "-days", "2"]
        for command in (
            ["req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "2", "-subj", "/CN=ca", *authority],
            ["req", *key, "-keyout", "api.key", "-out", "api.csr", "-subj", "/CN=kube-apiserver"],
            ["x509", "-req", "-in", "api.csr", "-out", "api.crt", *signed],
            ["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key"],
            ["ec", "-in", "sa.key", "-pubout", "-out", "sa.pub"],
        ):
            subprocess.run(["openssl", *command], cwd=self.pki, check=True, capture_output=True)


@contextmanager
def serving(folder: Path, *definitions: dict[str, Any]) -> Iterator[Server]:
    server = Server(folder)
    try:
        server.start(*definitions)
        yield server
    finally:
        server.stop()


def _is_ok(request: str | urllib.request.Request, tls: ssl.SSLContext | None) -> bool:
    try:
        with urllib.request.urlopen(request, context=tls, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
