"""Cost of the rollout store: appending a batch of completions, and the queries of the dashboard.

python bench/rollout_store.py [--completions 1000000] [--batch 256] [--folder FOLDER]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from maxhydra.record.rollout_store import RolloutWriter, search
from maxhydra.record.rollouts import Query

QUERIES = {
    "newest page": Query(),
    "best rewards": Query(order="best"),
    "steps 1000 to 1100, rewards over 0.9": Query(first_step=1000, last_step=1100, min_reward=0.9),
    "one prompt over all steps": Query(prompt_number=77, order="oldest"),
    "page 1,000 of the worst": Query(order="worst", start=20_000),
    "text that a completion in 50,000 contains": Query(text="completion 123450 "),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--completions", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        writer, seconds = RolloutWriter(folder, "train", keep=2 * args.completions), []
        for step in range(args.completions // args.batch):
            start = step * args.batch
            records = [record(start + row) for row in range(args.batch)]
            begin = time.perf_counter()
            writer.append(step, records)
            seconds.append(time.perf_counter() - begin)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(f"{args.completions:,} completions, {size / 2**20:,.0f} MiB")
        print(
            f"append of {args.batch}: median {1e3 * statistics.median(seconds):.2f} ms, max {1e3 * max(seconds):.0f} ms"
        )
        for name, query in QUERIES.items():
            begin = time.perf_counter()
            page = search(folder, query)
            print(f"{name}: {time.perf_counter() - begin:.3f} s, {len(page.records)} of {page.total}")


def record(number: int) -> dict[str, object]:
    return {
        "prompt_number": number // 8 % 10_000,
        "sample": number % 8,
        "prompt": f"What is {number % 977} + {number % 311}? " + "Explain each step. " * 8,
        "completion": f"This is completion {number} of the model. " * 6,
        "expected": str(number % 977 + number % 311),
        "reward": number * 7919 % 1000 / 999,
        "terms": {"exact": 1.0, "brief": 0.25},
        "is_correct": True,
        "errors": 0,
        "tokens": 64,
        "finish": "stop",
        "is_used": True,
        "advantage": 0.5,
    }


if __name__ == "__main__":
    main()
