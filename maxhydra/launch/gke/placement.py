"""On which nodes a job runs: labels and resources, from the hardware option and the settings."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.schema.hardware import Cluster, Hardware, Platform
from maxhydra.launch.gke.settings import GkeSettings
from maxhydra.launch.gke.volumes import is_of_a_pod
from maxhydra.launch.settings import KEY

RESOURCES = {Platform.tpu: "google.com/tpu", Platform.gpu: "nvidia.com/gpu"}
LABELS = {Platform.tpu: "cloud.google.com/gke-tpu-accelerator", Platform.gpu: "cloud.google.com/gke-accelerator"}
TOPOLOGY = "cloud.google.com/gke-tpu-topology"


@dataclasses.dataclass(frozen=True)
class Placement:
    """What a job needs of the cluster."""

    platform: Platform
    slices: int
    nodes: int
    """Of a slice; each runs one process."""
    chips: int
    """Of a node; none on a CPU."""
    selector: dict[str, str]
    """Labels of the nodes."""

    @property
    def processes(self) -> int:
        return self.slices * self.nodes

    @property
    def resources(self) -> dict[str, int]:
        return {RESOURCES[self.platform]: self.chips} if self.chips else {}

    @property
    def tolerations(self) -> list[dict[str, Any]]:
        """Nodes with chips keep off whoever does not ask for any."""
        return [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in self.resources]


def place(settings: GkeSettings, hardware: Hardware) -> Placement:
    """ConfigError where the settings and the hardware do not go together."""
    if problems := list(_problems(settings, hardware)):
        raise ConfigError(problems)
    placement = _placed(settings, hardware)
    if placement.processes > 1 and (problems := list(_meeting_problems(settings, hardware))):
        raise ConfigError(problems)
    return placement


def _placed(settings: GkeSettings, hardware: Hardware) -> Placement:
    nodes, chips, labels = settings.nodes, 0, {}
    if hardware.platform is not Platform.cpu:
        assert hardware.gke.accelerator is not None
        labels[LABELS[hardware.platform]] = hardware.gke.accelerator
        chips = settings.chips_per_node or hardware.gke.chips_per_node
    if settings.topology is not None:
        total = _chips(settings.topology)
        chips = total if total <= hardware.gke.one_node_chips else hardware.gke.chips_per_node
        nodes = total // chips
        labels[TOPOLOGY] = settings.topology
    return Placement(hardware.platform, settings.slices, nodes, chips, labels | settings.node_selector)


def _problems(settings: GkeSettings, hardware: Hardware) -> Iterator[Problem]:
    platform = hardware.platform
    if platform is Platform.auto:
        hint = "maxhydra explain hardware lists the options"
        yield Problem("hardware", "does not say which nodes to ask for", "auto", "tpu-v5e, gpu-h100, cpu, ...", hint)
        return
    if platform is not Platform.cpu and hardware.gke.accelerator is None:
        yield Problem("hardware.gke.accelerator", "is not known", hint="kubectl describe node shows the label's value")
    if platform is Platform.tpu:
        yield from _slice_problems(settings, hardware)
        misplaced = {"nodes": settings.nodes != 1, "chips_per_node": settings.chips_per_node is not None}
        told = f"follows from {KEY}.topology on a TPU"
    else:
        misplaced = {"topology": settings.topology is not None}
        misplaced["chips_per_node"] = platform is Platform.cpu and settings.chips_per_node is not None
        told = f"means nothing to hardware.platform={platform.value}"
    for name in (name for name, is_misplaced in misplaced.items() if is_misplaced):
        yield Problem(f"{KEY}.{name}", told, getattr(settings, name))


def _meeting_problems(settings: GkeSettings, hardware: Hardware) -> Iterator[Problem]:
    """Of a job with several processes, which meet, and save together."""
    if hardware.distributed.cluster is Cluster.none:
        reason = "leaves each process alone, and the job has several"
        yield Problem("hardware.distributed.cluster", reason, Cluster.none, "auto")
    if is_of_a_pod(settings.outputs):
        reason = "is a folder of each pod alone, and the pods of a job save together"
        yield Problem(f"{KEY}.outputs", reason, settings.outputs, "gs://bucket/folder, pvc://claim/folder")


def _slice_problems(settings: GkeSettings, hardware: Hardware) -> Iterator[Problem]:
    facts, topology = hardware.gke, settings.topology
    example = "x".join(["4"] * facts.dimensions)
    if topology is None:
        yield Problem(f"{KEY}.topology", "must be given for a TPU", accepted=f"such as {example}")
    elif topology.count("x") + 1 != facts.dimensions:
        reason = f"is no slice of {facts.accelerator}"
        yield Problem(f"{KEY}.topology", reason, topology, f"{facts.dimensions} numbers, such as {example}")
    elif _chips(topology) > facts.one_node_chips and _chips(topology) % facts.chips_per_node:
        reason = f"is {_chips(topology)} chips, and a node of {facts.accelerator} has {facts.chips_per_node}"
        yield Problem(f"{KEY}.topology", reason, topology, f"a multiple, such as {example}")


def _chips(topology: str) -> int:
    return math.prod(int(side) for side in topology.split("x"))
