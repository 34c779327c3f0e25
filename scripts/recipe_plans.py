"""Print the tables "on another machine" of docs/recipes: memory and step time that task=plan estimates.

    python scripts/recipe_plans.py [PAGE...]

Every row is one `maxhydra task=plan` with the overrides shown. Without a machine's peak rates, or where the estimate of
the time does not apply, a row has memory only.
"""

import sys
from collections.abc import Sequence

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.analysis import PlanTask
from maxhydra.plan.case import Subject
from maxhydra.plan.estimate import GIB, Plan
from maxhydra.tasks.plan import plan_case

# The rates of these cards differ; only their memory matters.
GPU_24 = "hardware=gpu-a100 hardware.memory_gib=24 task.devices=1"
A100, H100, H200 = (f"hardware=gpu-{name} task.devices=1" for name in ("a100", "h100", "h200"))
EIGHT_H100, FOUR_HOSTS = "hardware=gpu-h100 task.devices=8", "hardware=gpu-h100 task.devices=32"
V5P, V6E = "hardware=tpu-v5p task.devices=16", "hardware=tpu-v6e task.devices=16"
FRUGAL = "train.loss_chunk=1024 model.dtypes.logits=bfloat16"
SMALL_STATE = "optimizer.moments=dynamic8 model.dtypes.weights=bfloat16"

# Page -> (overrides of all rows, whether the time applies, rows of machine, its options and the changes).
PRETRAIN = [
    ("one 24 GB GPU", GPU_24, f"train.per_device_batch_size=1 model.remat.policy=full {FRUGAL} {SMALL_STATE}"),
    ("one A100, 80 GB", A100, "train.per_device_batch_size=4"),
    ("one H100, 80 GB", H100, "train.per_device_batch_size=4"),
    ("one H200", H200, "train.per_device_batch_size=8"),
    ("8 H100", EIGHT_H100, "mesh.fsdp=8 train.per_device_batch_size=8"),
    ("4 hosts of 8 H100", FOUR_HOSTS, "mesh.data=4 mesh.fsdp=8 train.per_device_batch_size=8"),
    ("16 TPU v5p", V5P, "mesh.fsdp=16 train.per_device_batch_size=8"),
    ("16 TPU v6e", V6E, f"mesh.fsdp=16 train.per_device_batch_size=2 {FRUGAL}"),
]
LORA = [
    (
        "one 24 GB GPU",
        GPU_24,
        f"adapter=qlora train.per_device_batch_size=1 train.seq_len=2048 model.remat.policy=full {FRUGAL}",
    ),
    (
        "one 80 GB GPU",
        H100,
        f"train.per_device_batch_size=2 model.remat.policy=full model.dtypes.weights=bfloat16 {FRUGAL}",
    ),
    ("one H200", H200, "train.per_device_batch_size=4 model.remat.policy=minimal"),
    ("8 H100", EIGHT_H100, "mesh.fsdp=8 train.per_device_batch_size=2 model.remat.policy=minimal"),
    ("4 hosts of 8 H100", FOUR_HOSTS, "mesh.data=4 mesh.fsdp=8 train.per_device_batch_size=2"),
    ("16 TPU v6e", V6E, f"mesh.fsdp=16 train.per_device_batch_size=1 model.remat.policy=minimal {FRUGAL}"),
]
# A pair is two rows, so twice the batch of the recipe.
DPO = [
    (
        "one 24 GB GPU",
        GPU_24,
        f"adapter=qlora train.per_device_batch_size=2 train.seq_len=1024 model.remat.policy=full {FRUGAL}",
    ),
    (
        "one 80 GB GPU",
        H100,
        f"train.per_device_batch_size=4 model.remat.policy=full model.dtypes.weights=bfloat16 {FRUGAL}",
    ),
    ("one H200", H200, "train.per_device_batch_size=8 model.remat.policy=minimal"),
    ("8 H100", EIGHT_H100, "mesh.fsdp=8 train.per_device_batch_size=8 model.remat.policy=minimal"),
    ("4 hosts of 8 H100", FOUR_HOSTS, "mesh.data=4 mesh.fsdp=8 train.per_device_batch_size=8"),
    ("16 TPU v6e", V6E, f"mesh.fsdp=16 train.per_device_batch_size=2 model.remat.policy=minimal {FRUGAL}"),
]
DISTILL = [
    ("one 80 GB GPU", H100, "train.per_device_batch_size=2 model.remat.policy=full"),
    ("one H200", H200, "train.per_device_batch_size=4 model.remat.policy=minimal"),
    ("8 H100", EIGHT_H100, "mesh.fsdp=8 train.per_device_batch_size=4 model.remat.policy=minimal"),
    ("4 hosts of 8 H100", FOUR_HOSTS, "mesh.data=4 mesh.fsdp=8 train.per_device_batch_size=4"),
    ("16 TPU v6e", V6E, "mesh.fsdp=16 train.per_device_batch_size=2 model.remat.policy=full"),
]
GRPO = [
    ("one 24 GB GPU", GPU_24, f"train.per_device_batch_size=4 model.remat.policy=full {FRUGAL} {SMALL_STATE}"),
    ("one 80 GB GPU", H100, "train.per_device_batch_size=32 model.remat.policy=full"),
    ("one H200", H200, "train.per_device_batch_size=32 model.remat.policy=minimal"),
    ("8 H100", EIGHT_H100, "mesh.fsdp=8 train.per_device_batch_size=32 model.remat.policy=full"),
    ("4 hosts of 8 H100", FOUR_HOSTS, "mesh.data=4 mesh.fsdp=8 train.per_device_batch_size=8"),
    ("16 TPU v6e", V6E, "mesh.fsdp=16 train.per_device_batch_size=16 model.remat.policy=full"),
]
LORA_8B = "model=llama3.1-8b adapter=lora adapter.rank=16"
PAGES = {
    "pretrain": ("model=llama3.2-1b train.seq_len=4096", True, PRETRAIN),
    "lora": (f"{LORA_8B} train.seq_len=4096", False, LORA),
    "dpo": (f"{LORA_8B} train.seq_len=2048", False, DPO),
    "distill": ("model=llama3.2-1b train.seq_len=2048", False, DISTILL),
    "grpo": ("model=llama3.2-1b train.seq_len=512", False, GRPO),
}


def estimate(overrides: str) -> Plan:
    config = compose(["task=plan", *overrides.split()]).config
    assert isinstance(config.task, PlanTask)
    return plan_case(Subject.of(config), config.task)


def print_page(name: str) -> None:
    base, has_time, rows = PAGES[name]
    print(f"\n## {name}: maxhydra task=plan {base} ...", flush=True)
    names = ["machine", "changes", "peak GiB", "limit GiB", *(["step", "tokens/s", "MFU"] if has_time else [])]
    print_row(names)
    print_row(["---"] * len(names))
    for machine, options, changes in rows:
        plan = estimate(f"{base} {options} {changes}")
        assert plan.limit is not None
        peak = f"{plan.memory.peak / GIB:.1f}"
        figures = [peak if plan.fits else f"{peak}, does not fit", f"{plan.limit / GIB:.1f}"]
        if has_time:
            is_timed = plan.time is not None and "memory_gib" not in options
            figures += _time(plan) if is_timed else [""] * 3
        print_row([machine, f"`{changes}`", *figures])


def print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _time(plan: Plan) -> list[str]:
    assert plan.time is not None
    seconds = plan.time.seconds
    return [f"{seconds:.2f} s", f"{plan.case.step_tokens / seconds:,.0f}", f"{plan.time.mfu:.0%}"]


if __name__ == "__main__":
    for page in sys.argv[1:] or PAGES:
        print_page(page)
