"""Samples of memory, CPU and GPUs: against the operating system, and with a library that stands for NVML."""

import ctypes
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from maxhydra.runtime.usage import GpuUsage, UsageSampler, _ProcessUsage, device_memory, host_memory, network_bytes
from tests.support.polling import wait_for


def resident_gib() -> float:
    """VmRSS, which the kernel reports in KiB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 2**20


def test_this_process() -> None:
    def clocks() -> np.ndarray:
        return np.array([time.process_time(), time.monotonic()])

    # The moments of both samples are within these intervals, however long the process is not scheduled.
    before, usage, started = clocks(), _ProcessUsage(), clocks()
    while time.process_time() - started[0] < 0.3:
        pass
    worked, values, after = clocks(), usage(), clocks()
    shortest, longest = worked - started, after - before
    share = values["system/cpu_share"] * (os.cpu_count() or 1)
    assert 0.9 * shortest[0] / longest[1] < share < 1.1 * longest[0] / shortest[1]
    found, expected = values["system/host_rss_gib"], resident_gib()
    assert abs(found - expected) < 0.1 * expected
    assert 0 < values["system/host_memory_share"] < 1
    assert host_memory(Path("/nowhere")) == {}


def test_network_traffic_without_loopback(tmp_path: Path) -> None:
    header = "Inter-|   Receive  | Transmit\n face |bytes packets ...\n"
    lines = "".join(
        f"{name}: {n} 1 0 0 0 0 0 0 {n + 1} 1 0 0 0 0 0 0\n" for name, n in (("lo", 7), (" eth0", 10), ("ib0", 5))
    )
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "dev").write_text(header + lines)
    assert network_bytes(tmp_path) == {"received": 15, "sent": 17}
    assert network_bytes(Path("/nowhere")) == {}
    usage = _ProcessUsage()
    usage._network = {"received": 0, "sent": 0}
    total, values = network_bytes(), usage()
    assert (values["system/network_received_mib_s"] > 0) == (total["received"] > 0)


def test_the_fullest_device_counts() -> None:
    devices = [
        SimpleNamespace(memory_stats=lambda n=n: {"bytes_in_use": n << 30, "peak_bytes_in_use": 9}) for n in (1, 3)
    ]
    assert device_memory(devices)["system/device_memory_gib"] == 3
    assert device_memory([SimpleNamespace(memory_stats=lambda: None)]) == {}


class Nvml:
    """Two GPUs; the second does not report its power."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = 2

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = 2
        return 0 if name == b"GPU-b" else 1

    def nvmlDeviceGetUtilizationRates(self, handle: ctypes.c_void_p, rates: Any) -> int:
        rates._obj.gpu = 100 if handle.value == 1 else 50
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: ctypes.c_void_p, milliwatts: Any) -> int:
        milliwatts._obj.value = 650_500
        return 0 if handle.value == 1 else 3


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", {"system/gpu_utilization": 0.75, "system/gpu_power_w": 650.5}),
        ("0", {"system/gpu_utilization": 1.0, "system/gpu_power_w": 650.5}),
        ("GPU-b", {"system/gpu_utilization": 0.5}),
    ],
)
def test_gpus(visible: str, expected: dict[str, float]) -> None:
    gpus = GpuUsage.open(Nvml(), visible=visible)
    assert gpus is not None and gpus.sample() == expected
    assert GpuUsage.open(Nvml(), visible="GPU-unknown") is None


def test_means_and_peaks_since_the_last_call() -> None:
    values = iter([(1.0, 5.0), (3.0, 4.0)])

    def sample() -> dict[str, float]:
        mean, peak = next(values)
        return {"system/cpu_share": mean, "system/device_memory_peak_gib": peak}

    sampler = UsageSampler(0.01, sample=sample)
    # After the second sample, `next` raises, which ends the thread and not the run.
    wait_for(lambda: len(sampler._samples["system/device_memory_peak_gib"]) == 2)
    assert sampler.take() == {"system/cpu_share": 2.0, "system/device_memory_peak_gib": 5.0}
    assert sampler.take() == {}
    sampler.close()
    assert UsageSampler(None).take() == {}
