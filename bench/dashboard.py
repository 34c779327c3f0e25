"""Measures the dashboard with many runs in Chromium: first paint, the list of runs, the first curves, and a poll.

    python bench/dashboard.py --runs 10000

The runs are those of bench/runs.py. First paint is PerformancePaintTiming's first-contentful-paint, from the start of
the navigation; the index of the runs exists, as on every start of the server but the first.
"""

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

from bench.runs import write_runs
from maxhydra.runs.registry import Registry
from maxhydra.runs.server import Server
from tests.support.browser import chromium

# Milliseconds since the start of the navigation at which the page shows its first rows, and its first curve.
WATCH = """
window.shown = {};
const look = () => {
  if (!shown.rows && document.querySelector('#body tr')) shown.rows = performance.now();
  if (!shown.curves && document.querySelector('.u-over')) shown.curves = performance.now();
  if (!shown.curves) requestAnimationFrame(look);
};
look();
"""
PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def load(browser, url: str) -> dict[str, float]:
    browser.get("about:blank")
    browser.get(url)
    deadline = time.monotonic() + 60
    while not browser.execute_script("return window.shown?.curves") and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"first paint": browser.execute_script(PAINT), **browser.execute_script("return window.shown")}


def time_request(url: str) -> tuple[float, int]:
    start = time.perf_counter()
    with urllib.request.urlopen(url) as response:
        content = response.read()
    return 1000 * (time.perf_counter() - start), len(content)


def measure(folder: Path, repeats: int) -> dict[str, object]:
    server = Server(Registry(folder), host="127.0.0.1", port=0)
    server.start()
    with chromium() as browser:
        browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        loads = [load(browser, server.url) for _ in range(repeats)]
    token = json.load(urllib.request.urlopen(f"{server.url}api/runs"))["token"]
    (all_runs, size), (poll, _) = (
        time_request(f"{server.url}api/runs"),
        time_request(f"{server.url}api/runs?since={token}"),
    )
    server.shutdown()
    medians = {f"{name}, ms": round(statistics.median(each[name] for each in loads)) for name in loads[0]}
    return {**medians, "all runs, ms": round(all_runs), "all runs, MB": round(size / 1e6, 2), "poll, ms": round(poll)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="existing runs; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not any(folder.glob("*")):
            write_runs(folder, options.runs, 100)
        print(json.dumps(measure(folder, options.repeats), indent=1))


if __name__ == "__main__":
    main()
