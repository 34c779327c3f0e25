"""Where a job runs: node labels, chips and processes, from the hardware option and the launcher settings."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.hardware import Cluster, Hardware, Platform
from maxhydra.launch.base import KEY
from maxhydra.launch.gke.networking import NETWORKS
from maxhydra.launch.gke.settings import GkeSettings, is_pod_local

RESOURCES = {Platform.tpu: "google.com/tpu", Platform.gpu: "nvidia.com/gpu"}
LABELS = {Platform.tpu: "cloud.google.com/gke-tpu-accelerator", Platform.gpu: "cloud.google.com/gke-accelerator"}
TOPOLOGY = "cloud.google.com/gke-tpu-topology"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Nodes and chips that a job requests."""

    platform: Platform
    slices: int
    nodes: int
    """Per slice; one process per node."""
    chips: int
    """Per node; 0 on CPU."""
    selector: dict[str, str]
    """Node labels."""

    @property
    def processes(self) -> int:
        return self.slices * self.nodes

    @property
    def resources(self) -> dict[str, int]:
        return {RESOURCES[self.platform]: self.chips} if self.chips else {}

    @property
    def tolerations(self) -> list[dict[str, Any]]:
        """Tolerations for the taints that keep other pods off accelerator nodes."""
        return [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in self.resources]


def choose_placement(settings: GkeSettings, hardware: Hardware) -> Placement:
    """Compute the placement. Raises ConfigError if the settings do not fit the hardware."""
    if problems := list(_problems(settings, hardware)):
        raise ConfigError(problems)
    placement = _placement(settings, hardware)
    if placement.processes > 1 and (problems := list(_multi_process_problems(settings, hardware))):
        raise ConfigError(problems)
    return placement


def _placement(settings: GkeSettings, hardware: Hardware) -> Placement:
    nodes, chips, labels = settings.nodes, 0, dict[str, str | None]()
    if hardware.platform is not Platform.cpu:
        labels[LABELS[hardware.platform]] = hardware.gke.accelerator
        chips = settings.chips_per_node or hardware.gke.chips_per_node
    if settings.topology is not None:
        total = _chips(settings.topology)
        chips = total if total <= hardware.gke.one_node_chips else hardware.gke.chips_per_node
        nodes = total // chips
        labels[TOPOLOGY] = settings.topology
    # null removes a label, or all of them: other clusters have other labels, or none.
    labels = {} if settings.node_selector is None else labels | settings.node_selector
    selector = {name: value for name, value in labels.items() if value is not None}
    return Placement(hardware.platform, settings.slices, nodes, chips, selector)


def _problems(settings: GkeSettings, hardware: Hardware) -> Iterator[Problem]:
    platform = hardware.platform
    if platform is Platform.auto:
        hint = "list the options with maxhydra explain hardware"
        reason = "must name the hardware, because it selects the nodes"
        yield Problem("hardware", reason, "auto", "tpu-v5e, gpu-h100, cpu, ...", hint)
        return
    if platform is not Platform.cpu and hardware.gke.accelerator is None and _selects_accelerator(settings, platform):
        hint = f"see the node labels in kubectl describe node, or set {KEY}.node_selector=null for any node"
        yield Problem("hardware.gke.accelerator", "is unknown", hint=hint)
    yield from _network_problems(settings, hardware)
    if platform is Platform.tpu:
        yield from _slice_problems(settings, hardware)
        misplaced = {"nodes": settings.nodes != 1, "chips_per_node": settings.chips_per_node is not None}
        reason = f"is determined by {KEY}.topology on TPU"
    else:
        misplaced = {"topology": settings.topology is not None}
        misplaced["chips_per_node"] = platform is Platform.cpu and settings.chips_per_node is not None
        reason = f"has no effect with hardware.platform={platform.value}"
    for name in (name for name, is_misplaced in misplaced.items() if is_misplaced):
        yield Problem(f"{KEY}.{name}", reason, getattr(settings, name))


def _selects_accelerator(settings: GkeSettings, platform: Platform) -> bool:
    return settings.node_selector is not None and LABELS[platform] not in settings.node_selector


def _network_problems(settings: GkeSettings, hardware: Hardware) -> Iterator[Problem]:
    """Problems of a GPU network on nodes that do not have it."""
    network = NETWORKS.get(settings.network)
    if network is None:
        return
    if hardware.gke.accelerator not in network.accelerators:
        reason = f"has no network {settings.network} on GKE"
        accepted = ", ".join(network.accelerators)
        yield Problem("hardware.gke.accelerator", reason, hardware.gke.accelerator, accepted)
    elif settings.chips_per_node not in (None, hardware.gke.chips_per_node):
        reason = f"must be a whole node with {KEY}.network={settings.network}"
        yield Problem(f"{KEY}.chips_per_node", reason, settings.chips_per_node, str(hardware.gke.chips_per_node))


def _multi_process_problems(settings: GkeSettings, hardware: Hardware) -> Iterator[Problem]:
    """Problems of a job with several processes, which form a cluster and write one checkpoint."""
    if hardware.distributed.cluster is Cluster.none:
        reason = "disables multi-process initialization, but the job has several processes"
        yield Problem("hardware.distributed.cluster", reason, Cluster.none, "auto")
    if settings.workload != "jobset":
        reason = "runs one process, but the job has several"
        yield Problem(f"{KEY}.workload", reason, settings.workload, "jobset")
    if is_pod_local(settings.outputs):
        reason = "is local to each pod, but the pods of a job write one checkpoint together"
        yield Problem(f"{KEY}.outputs", reason, settings.outputs, "gs://bucket/folder, pvc://claim/folder")


def _slice_problems(settings: GkeSettings, hardware: Hardware) -> Iterator[Problem]:
    facts, topology = hardware.gke, settings.topology
    example = "x".join(["4"] * facts.dimensions)
    if topology is None:
        yield Problem(f"{KEY}.topology", "is required for a TPU", accepted=f"such as {example}")
    elif topology.count("x") + 1 != facts.dimensions:
        reason = f"is not a slice shape of {facts.accelerator}"
        yield Problem(f"{KEY}.topology", reason, topology, f"{facts.dimensions} numbers, such as {example}")
    elif _chips(topology) > facts.one_node_chips and _chips(topology) % facts.chips_per_node:
        reason = f"has {_chips(topology)} chips, but a node of {facts.accelerator} has {facts.chips_per_node}"
        yield Problem(f"{KEY}.topology", reason, topology, f"a multiple, such as {example}")


def _chips(topology: str) -> int:
    return math.prod(int(size) for size in topology.split("x"))
