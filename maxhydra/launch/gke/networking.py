"""Patches of pod templates, and GPU networks of GKE as such patches: interfaces, sidecar, volumes, NCCL variables.

Sources: the GKE guides "Maximize GPU network bandwidth" (TCPX, TCPXO) and "GPUDirect RDMA", and the manifests and
release notes of github.com/GoogleCloudPlatform/container-engine-accelerators (gpudirect-tcpx, -tcpxo, -rdma). The
sidecars are init containers that restart, so that they end with the worker. Networks have the names of the guides.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from maxhydra.launch.gke.settings import WORKER

Patch = dict[str, Any]

REGISTRY = "us-docker.pkg.dev/gce-ai-infra"
RXDM = "/fts/entrypoint_rxdm_container.sh"
LIBRARIES = "/usr/local/nvidia/lib64"
GPU_DEVICES = [*(f"/dev/nvidia{index}" for index in range(8)), "/dev/nvidiactl", "/dev/nvidia-uvm"]


def merge_patch(target: Any, patch: Any) -> Any:
    """Merge a patch: mappings by key, where null removes one, lists of named items by name; other values replace."""
    if isinstance(target, dict) and isinstance(patch, dict):
        merged = {**target, **{key: merge_patch(target.get(key), value) for key, value in patch.items()}}
        return {key: value for key, value in merged.items() if value is not None}
    if isinstance(patch, list) and isinstance(target, list) and (key := _merge_key([*target, *patch])):
        changes = {item[key]: item for item in patch}
        merged_items = [merge_patch(item, changes.pop(item[key], {})) for item in target]
        return [*merged_items, *changes.values()]
    return merge_patch({}, patch) if isinstance(patch, dict) and target is None else patch


def _merge_key(items: list[Any]) -> str | None:
    """Key that identifies the items of a list, as in Kubernetes; None if the list is replaced as a whole."""
    for key in ("mountPath", "name"):
        if items and all(isinstance(item, dict) and key in item for item in items):
            return key
    return None


@dataclasses.dataclass(frozen=True)
class Network:
    """A network between the GPUs of several nodes."""

    accelerators: tuple[str, ...]
    """Values of the node label gke-accelerator of nodes that have it."""
    interfaces: dict[str, str]
    """Interface -> network."""
    host_paths: dict[str, str]
    """Volume -> folder of the node."""
    mounts: dict[str, str]
    """Volume -> mount path in the worker."""
    variables: dict[str, str]
    sidecar: Patch | None = None
    devices: tuple[str, ...] = ()
    """Devices of the sidecar."""
    capabilities: tuple[str, ...] = ()
    """Capabilities of the worker."""
    profile: str | None = None
    """Script whose variables the worker needs."""


def _nics(names: Mapping[int, str]) -> dict[str, str]:
    return {"eth0": "default", **{f"eth{index}": name for index, name in names.items()}}


def _sidecar(name: str, image: str, command: list[str], capabilities: list[str], mounts: dict[str, str]) -> Patch:
    return {
        "name": name,
        "image": f"{REGISTRY}/{image}",
        "restartPolicy": "Always",
        "command": command,
        "securityContext": {"capabilities": {"add": capabilities}},
        "env": _variables({"LD_LIBRARY_PATH": LIBRARIES}),
        "volumeMounts": _mounts(mounts),
    }


def _variables(values: Mapping[str, str]) -> list[Patch]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _mounts(paths: Mapping[str, str]) -> list[Patch]:
    return [{"name": name, "mountPath": path} for name, path in paths.items()]


CHUNKS = {
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "NCCL_P2P_PCI_CHUNKSIZE": "524288",
    "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
    "NCCL_CROSS_NIC": "0",
    "NCCL_NET_GDR_LEVEL": "PIX",
    "NCCL_SOCKET_IFNAME": "eth0",
    "LD_LIBRARY_PATH": LIBRARIES,
}
HOST = {"gpu-libraries": "/home/kubernetes/bin/nvidia/lib64", "sys": "/sys", "proc-sys": "/proc/sys"}
HOST_MOUNTS = {"gpu-libraries": LIBRARIES, "sys": "/hostsysfs", "proc-sys": "/hostprocsysfs"}

TCPX = Network(
    accelerators=("nvidia-h100-80gb",),
    interfaces=_nics({index: f"vpc{index}" for index in range(1, 5)}),
    host_paths={**HOST, "tcpx-socket": "/run/tcpx"},
    mounts={"gpu-libraries": LIBRARIES, "tcpx-socket": "/run/tcpx"},
    variables={
        **CHUNKS,
        "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4",
        "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
        "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx",
        # Cores of the NUMA node of each interface on a3-highgpu-8g, for sending and receiving.
        "NCCL_GPUDIRECTTCPX_TX_BINDINGS": "eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177",
        "NCCL_GPUDIRECTTCPX_RX_BINDINGS": "eth1:22-35,126-139;eth2:22-35,126-139;eth3:74-87,178-191;eth4:74-87,178-191",
        "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "500000",
        "NCCL_DYNAMIC_CHUNK_SIZE": "524288",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_SOCKET_NTHREADS": "1",
        "NCCL_BUFFSIZE": "4194304",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_P2P_PXN_LEVEL": "0",
    },
    sidecar=_sidecar(
        "tcpx-daemon",
        "gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.12",
        [
            "/tcpgpudmarxd/build/app/tcpgpudmarxd",
            *("--gpu_nic_preset", "a3vm", "--gpu_shmem_type", "fd", "--uds_path", "/run/tcpx"),
            *("--setup_param", "--verbose 128 2 0 "),
        ],
        ["NET_ADMIN"],
        {**HOST_MOUNTS, "tcpx-socket": "/run/tcpx"},
    ),
    devices=tuple(GPU_DEVICES),
    capabilities=("IPC_LOCK",),
)
TCPXO = Network(
    accelerators=("nvidia-h100-mega-80gb",),
    interfaces=_nics({index: f"vpc{index}" for index in range(1, 9)}),
    host_paths={**HOST, "aperture-devices": "/dev/aperture_devices"},
    mounts={"gpu-libraries": LIBRARIES, "aperture-devices": "/dev/aperture_devices"},
    variables={
        **CHUNKS,
        "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
        "NCCL_FASTRAK_CTRL_DEV": "eth0",
        "NCCL_FASTRAK_IFNAME": "eth1,eth2,eth3,eth4,eth5,eth6,eth7,eth8",
        "NCCL_FASTRAK_NUM_FLOWS": "2",
        "NCCL_FASTRAK_USE_SNAP": "1",
        "NCCL_FASTRAK_USE_LLCM": "1",
        "NCCL_FASTRAK_ENABLE_CONTROL_CHANNEL": "0",
        "NCCL_FASTRAK_ENABLE_HOTPATH_LOGGING": "0",
        "NCCL_FASTRAK_PLUGIN_ACCEPT_TIMEOUT_MS": "600000",
        "NCCL_TUNER_PLUGIN": "libnccl-tuner.so",
        "NCCL_TUNER_CONFIG_PATH": f"{LIBRARIES}/a3plus_tuner_config.textproto",
        "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE": f"{LIBRARIES}/a3plus_guest_config.textproto",
        "NCCL_NVLSTREE_MAX_CHUNKSIZE": "131072",
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_BUFFSIZE": "8388608",
        "NCCL_PROTO": "Simple,LL128",
    },
    sidecar=_sidecar(
        "tcpxo-daemon",
        "gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.21",
        [
            "/bin/sh",
            "-c",
            f"chmod 755 {RXDM} && {RXDM} --num_hops=2 --num_nics=8",
        ],
        ["NET_ADMIN", "NET_BIND_SERVICE"],
        HOST_MOUNTS,
    ),
    devices=(*GPU_DEVICES, "/dev/dmabuf_import_helper"),
)
RDMA = Network(
    accelerators=("nvidia-h200-141gb", "nvidia-b200"),
    # eth1 is the second host interface, which the guide leaves out of pods.
    interfaces=_nics({index + 2: f"rdma-{index}" for index in range(8)}),
    host_paths={"gpu-driver": "/home/kubernetes/bin/nvidia", "gib": "/home/kubernetes/bin/gib"},
    mounts={"gpu-driver": "/usr/local/nvidia", "gib": "/usr/local/gib"},
    variables={"LD_LIBRARY_PATH": LIBRARIES},
    profile="/usr/local/gib/scripts/set_nccl_env.sh",
)
NETWORKS = {"tcpx": TCPX, "tcpxo": TCPXO, "rdma": RDMA}


def network_patch(name: str, worker: Mapping[str, Any], *, given: Collection[str]) -> Patch:
    """Patch of a pod template; empty for the default network. Variables `given` by the user keep their values."""
    network = NETWORKS.get(name)
    if network is None:
        return {}
    interfaces = [{"interfaceName": nic, "network": target} for nic, target in network.interfaces.items()]
    annotations = {
        "networking.gke.io/default-interface": "eth0",
        "networking.gke.io/interfaces": json.dumps(interfaces),
    }
    container: Patch = {
        "name": WORKER,
        "env": _variables({key: value for key, value in network.variables.items() if key not in given}),
        "volumeMounts": _mounts(network.mounts),
    }
    if network.capabilities:
        container["securityContext"] = {"capabilities": {"add": list(network.capabilities)}}
    if network.profile is not None:
        container["command"] = ["bash", "-c", f'source {network.profile} && exec "$@"', "bash", *worker["command"]]
    volumes = [{"name": volume, "hostPath": {"path": path}} for volume, path in network.host_paths.items()]
    spec: Patch = {"containers": [container], "volumes": volumes}
    if network.sidecar is not None:
        devices = "".join(f"- path: {path}\n" for path in network.devices)
        annotations[f"devices.gke.io/container.{network.sidecar['name']}"] = devices
        spec["initContainers"] = [network.sidecar]
    return {"metadata": {"annotations": annotations}, "spec": spec}
