"""Load, memory, disk and GPUs of the machine that serves the dashboard."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from maxhydra.record.processes import memory_info

GPU_QUERY = ("--query-gpu=name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


def machine(folder: Path) -> dict[str, Any]:
    """Load, memory and disk of the serving machine, and its GPUs if nvidia-smi is installed."""
    memory = memory_info()
    disk = shutil.disk_usage(folder)
    return {
        "load": round(os.getloadavg()[0], 2),
        "processors": os.cpu_count(),
        "memory": [memory["MemTotal"] - memory["MemAvailable"], memory["MemTotal"]] if memory else None,
        "disk": [disk.used, disk.total],
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, Any]]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", *GPU_QUERY], capture_output=True, text=True, timeout=5, check=True)
        rows = [line.split(", ") for line in done.stdout.splitlines()]
        return [
            {"name": name, "busy": float(busy) / 100, "memory": [float(used) * 2**20, float(total) * 2**20]}
            for name, busy, used, total in rows
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
