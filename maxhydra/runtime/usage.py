"""Memory, CPU, network, GPU utilization and power over time, sampled by a thread and logged as metrics `system/*`.

GPU figures come from NVML, the library of the NVIDIA driver, through ctypes: no package and no process is needed.
Whatever a machine does not report is left out.
"""

import ctypes
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from maxhydra.record.processes import memory_info

log = logging.getLogger("maxhydra")
GIB, MIB = 2**30, 2**20
# Values of which the largest sample counts; of others the mean.
PEAKS = ("system/device_memory_peak_gib",)
NVML = "libnvidia-ml.so.1"


class UsageSampler:
    """Samples until `close`; without an interval it does nothing."""

    def __init__(self, seconds: float | None, *, sample: Callable[[], dict[str, float]] | None = None):
        """`sample` returns the values of one sample; default: those of this process and its devices."""
        self._seconds = seconds
        self._samples: defaultdict[str, list[float]] = defaultdict(list)
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        if seconds is not None:
            self._sample = sample or _ProcessUsage()
            threading.Thread(target=self._run, name="usage", daemon=True).start()

    def take(self) -> dict[str, float]:
        """Means, or peaks, of the samples since the last call; empty if there are none."""
        with self._lock:
            samples, self._samples = self._samples, defaultdict(list)
        return {name: max(values) if name in PEAKS else sum(values) / len(values) for name, values in samples.items()}

    def close(self) -> None:
        self._is_closed.set()

    def _run(self) -> None:
        while not self._is_closed.wait(self._seconds):
            try:
                values = self._sample()
            except Exception as error:
                log.warning("stopped recording system/*: %s: %s", type(error).__name__, error)
                return
            with self._lock:
                for name, value in values.items():
                    self._samples[name].append(value)


class _ProcessUsage:
    """Samples this process, its host and its local devices."""

    def __init__(self) -> None:
        self._moment, self._cpu, self._network = time.monotonic(), time.process_time(), network_bytes()
        self._devices = jax.local_devices()
        self._gpus = GpuUsage.open() if self._devices[0].platform == "gpu" else None

    def __call__(self) -> dict[str, float]:
        moment, cpu, network = time.monotonic(), time.process_time(), network_bytes()
        seconds = max(moment - self._moment, 1e-9)
        share = (cpu - self._cpu) / seconds / (os.cpu_count() or 1)
        rates = {
            f"system/network_{name}_mib_s": max(0, total - self._network.get(name, total)) / seconds / MIB
            for name, total in network.items()
        }
        self._moment, self._cpu, self._network = moment, cpu, network
        values = {"system/cpu_share": share, **rates, **host_memory(), **device_memory(self._devices)}
        return values if self._gpus is None else {**values, **self._gpus.sample()}


def host_memory(proc: Path = Path("/proc")) -> dict[str, float]:
    """Resident memory of this process, and the used share of the host's; empty without /proc."""
    try:
        pages = int((proc / "self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return {}
    host = memory_info(proc)
    used = 1 - host["MemAvailable"] / host["MemTotal"]
    return {"system/host_rss_gib": pages * os.sysconf("SC_PAGE_SIZE") / GIB, "system/host_memory_share": used}


def network_bytes(proc: Path = Path("/proc")) -> dict[str, int]:
    """Bytes that the host has received and sent, without those to itself; empty without /proc."""
    try:
        lines = (proc / "net/dev").read_text().splitlines()[2:]
        interfaces = {name.strip(): counts.split() for name, _, counts in (line.partition(":") for line in lines)}
        counted = [counts for name, counts in interfaces.items() if name != "lo"]
        return {
            "received": sum(int(counts[0]) for counts in counted),
            "sent": sum(int(counts[8]) for counts in counted),
        }
    except (OSError, ValueError, IndexError):
        return {}


def device_memory(devices: list[Any]) -> dict[str, float]:
    """Bytes in use and their peak on the fullest local device; empty if the backend does not report them (CPU)."""
    stats = [device.memory_stats() or {} for device in devices]
    names = {"bytes_in_use": "system/device_memory_gib", "peak_bytes_in_use": "system/device_memory_peak_gib"}
    return {
        name: max(stat[key] for stat in stats) / GIB
        for key, name in names.items()
        if all(key in stat for stat in stats)
    }


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class GpuUsage:
    """Utilization and power of the visible GPUs of this host."""

    def __init__(self, library: Any, handles: list[Any]):
        self._library, self._handles = library, handles

    @classmethod
    def open(cls, library: Any = None, *, visible: str | None = None) -> "GpuUsage | None":
        """None without NVML. `visible`: value of CUDA_VISIBLE_DEVICES, indices or UUIDs."""
        try:
            library = library or ctypes.CDLL(NVML)
        except OSError:
            return None
        if library.nvmlInit_v2() != 0:
            return None
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "") if visible is None else visible
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        chosen = [name.strip() for name in names.split(",") if name.strip()] or [str(i) for i in range(count.value)]
        handles = []
        for name in chosen:
            handle = ctypes.c_void_p()
            if name.isdigit():
                code = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
            else:
                code = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
            handles += [handle] if code == 0 else []
        return cls(library, handles) if handles else None

    def sample(self) -> dict[str, float]:
        """Mean utilization, the share of time in which a kernel ran, and total power in watts."""
        busy, watts = [], []
        for handle in self._handles:
            utilization, milliwatts = _Utilization(), ctypes.c_uint()
            if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization)) == 0:
                busy.append(utilization.gpu / 100)
            if self._library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts)) == 0:
                watts.append(milliwatts.value / 1000)
        values = {"system/gpu_utilization": sum(busy) / len(busy)} if busy else {}
        return {**values, "system/gpu_power_w": sum(watts)} if watts else values
