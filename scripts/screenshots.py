"""Take the screenshots of the dashboard in docs/images: light and dark, desktop and phone.

    python scripts/screenshots.py [FOLDER]

Serves synthetic runs to a headless Chromium (apt-get install chromium chromium-driver; pip install -e '.[test]').
"""

import base64
import io
import json
import math
import os
import random
import socket
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from maxhydra.record.atomic_io import process_start
from maxhydra.runs.registry import Registry
from maxhydra.runs.server import Server
from tests.support.browser import chromium, set_color_scheme
from tests.support.run_folders import change_facts, write_run

ROOT = Path(__file__).parent.parent
DESKTOP, PHONE = (1440, 900), (390, 844)
# Larger files do not belong into a repository.
MAX_BYTES = 150_000
SWEEP_RUNS, STEPS = 18, 300
# File name -> size of the window, color scheme, address of the view, and the element to wait for.
SHOTS = {
    "dashboard.png": (DESKTOP, "light", "#search=seeds&group=optimizer.learning_rate&smoothing=0.6", ".u-over"),
    "dashboard_dark.png": (DESKTOP, "dark", "#sweep=width&tab=sweep&open=width", "#trials tbody"),
    "dashboard_phone.png": (PHONE, "light", "#run=baseline&search=base", ".u-over"),
    "dashboard_phone_dark.png": (PHONE, "dark", "#sweep=width&tab=sweep&search=width", "#trials tbody"),
}
SEEDS = "&".join(f"run=seeds/{number}" for number in range(9))


def write_runs(outputs: Path) -> None:
    """A search over two settings, three learning rates with three seeds each, and single runs, one of them live."""
    rng = random.Random(0)
    for number in range(SWEEP_RUNS):
        rate, layers = 10 ** rng.uniform(-4, -2), rng.choice([2, 4, 8, 12])
        floor = 2.4 + 0.5 * (math.log10(rate) + 2.9) ** 2 + 1.2 / layers
        status = "failed" if number == 7 else "pruned" if number in (3, 11) else "finished"
        _write(
            outputs / "width" / f"{number}_lr={rate:.2g}_layers={layers}", rng, floor, rate, number % 3, status, layers
        )
    for number in range(9):
        rate = (3e-4, 1e-3, 3e-3)[number // 3]
        floor = 2.5 + (math.log10(rate) + 2.8) ** 2 + rng.gauss(0, 0.05)
        _write(outputs / "seeds" / f"{number}", rng, floor, rate, number % 3)
    _write(outputs / "baseline", rng, 2.7, 1e-3, 0)
    live = _write(outputs / "long", rng, 2.45, 1e-3, 1, "running")
    (session,) = json.loads((live / "run.json").read_text())["sessions"]
    own = {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": process_start(os.getpid())}
    change_facts(live, sessions=[{**session, **own}])


def _write(
    folder: Path, rng: random.Random, floor: float, rate: float, seed: int, status: str = "finished", layers: int = 2
) -> Path:
    steps = {"finished": STEPS, "running": 190}.get(status, 120)
    moment = time.time() - rng.uniform(600, 2e5)
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
    write_run(folder, rate=rate, seed=seed, steps=steps, status=status, created=created, devices="8 x NVIDIA H200")
    config = (folder / "config.yaml").read_text().replace("num_layers: 2", f"num_layers: {layers}")
    (folder / "config.yaml").write_text(config.replace("steps: 40", f"steps: {STEPS}"))
    lines = []
    for step in range(1, steps + 1):
        loss = floor + 5 / (1 + step / 15) + rng.gauss(0, 0.05)
        row = {"step": step, "loss": loss, "grad_norm": 0.6 + 4 / step + rng.random() / 4}
        row |= {"learning_rate": rate * min(1, step / 30) * (0.55 + 0.45 * math.cos(step / 100)), "step_time": 0.42}
        row |= {"tokens_per_second": 1.24e6 + rng.gauss(0, 9e3), "tflops_per_device": 412 + rng.gauss(0, 4)}
        row |= {"mfu": 0.417 + rng.gauss(0, 0.004), "system/device_memory_gib": 96 + rng.random()}
        row |= {"system/gpu_utilization": 0.97 + rng.random() / 50, "system/gpu_power_w": 5200 + rng.gauss(0, 60)}
        lines.append(json.dumps(row))
        if step % 20 == 0:
            lines.append(json.dumps({"step": step, "eval/loss": floor + 5 / (1 + step / 15) + 0.08}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if status == "finished":
        change_facts(folder, objective={"name": "eval/loss", "value": floor + 5 / (1 + STEPS / 15) + 0.08})
    return folder


def take(browser, server: Server, path: Path, shot: tuple) -> None:
    (width, height), scheme, address, selector = shot
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    set_color_scheme(browser, scheme)
    browser.get("about:blank")
    browser.get(server.url + address.replace("#search=seeds&", f"#search=seeds&{SEEDS}&"))
    deadline = time.monotonic() + 30
    while not browser.execute_script("return document.querySelector(arguments[0])", selector):
        if time.monotonic() > deadline:
            raise SystemExit(f"{path.name}: {selector} did not appear")
        time.sleep(0.1)
    time.sleep(1.5)
    if width < 500:
        browser.execute_script("document.querySelector('.chosen-bar').scrollIntoView()")
    content = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])
    palette = io.BytesIO()
    Image.open(io.BytesIO(content)).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
        palette, "PNG", optimize=True
    )
    content = palette.getvalue()
    if len(content) > MAX_BYTES:
        raise SystemExit(f"{path.name}: {len(content)} bytes, more than {MAX_BYTES}")
    path.write_bytes(content)
    print(f"{path}: {len(content) / 1000:.0f} kB")


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        outputs = Path(temporary) / "outputs"
        write_runs(outputs)
        server = Server(Registry(outputs), host="127.0.0.1", port=0)
        server.start()
        with chromium() as browser:
            for name, shot in SHOTS.items():
                take(browser, server, folder / name, shot)
        server.shutdown()


if __name__ == "__main__":
    main()
