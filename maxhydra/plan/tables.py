"""Plans as text for the terminal."""

import math
from collections.abc import Iterator, Sequence

from maxhydra.config.schema.hardware import REPLICA
from maxhydra.plan.estimate import Plan, advice
from maxhydra.plan.memory import POINTS, STATE, Memory
from maxhydra.plan.timing import StepTime

# Parts of Memory in the order of the table, with what they are called there.
PARTS = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "outer": "shared weights and outer momentum",
    "cast_weights": "weights in the compute dtype",
    "gradients": "gradients of the layers",
    "separate_gradients": "gradients of unrolled layers",
    "activations": "saved activations",
    "layer": "activations of layers in work",
    "gathered": "gathered weights of layers in work",
    "tables": "embedding and head of ZeRO-1",
    "logits": "gradient of the logits",
    "loss": "logits and head",
    "batch": "batch",
}


def readable_bytes(count: float) -> str:
    """1536 -> 1.5 KiB."""
    power = min(4, max(0, int(math.log2(max(count, 1)) // 10)))
    return f"{count / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def readable_seconds(seconds: float) -> str:
    """0.0123 -> 12.3 ms."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with aligned columns, the last to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *first, last in rows:
        cells = [cell.ljust(width) for cell, width in zip(first, widths, strict=False)]
        yield "  ".join([*cells, last.rjust(widths[-1])])


def mesh_text(plan: Plan) -> str:
    """`fsdp=64 x tensor=8`, with `, ZeRO-1` if it is used."""
    sizes = {axis: size for axis, size in plan.case.mesh.items() if size > 1}
    text = " x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one device"
    return f"{text}, ZeRO-1" if plan.case.shards_over_data else text


def plan_lines(plan: Plan) -> Iterator[str]:
    """The plan of one case."""
    case, used = plan.case, plan.memory
    yield (
        f"{case.devices:,} devices ({mesh_text(plan)}), remat {case.remat.policy.value}, {case.step_tokens:,.0f} "
        f"tokens a step ({case.rows:g} sequences of {case.seq_len:,} per device, {case.grad_accum} accumulated)"
    )
    yield "\nmemory per device"
    shown = {name: getattr(used, part) for part, name in PARTS.items()}
    yield from table([(name, readable_bytes(count)) for name, count in shown.items() if count])
    limit = "" if plan.limit is None else f" of {readable_bytes(plan.limit)}, {'fits' if plan.fits else 'DOES NOT FIT'}"
    yield f"peak {readable_bytes(used.peak)} {used.peak_point}{limit}"
    if used.host:
        yield f"host memory per device: {readable_bytes(used.host)} of optimizer state"
    yield from _traffic_lines(plan)
    if plan.time is None:
        yield "\nno step time: the hardware option has no peak rates; choose one such as hardware=gpu-h200"
    else:
        yield from _time_lines(plan.time)
    for line in advice(plan):
        yield f"advice: {line}"


def memory_parts(used: Memory) -> dict[str, float]:
    """Bytes at the peak by part."""
    parts = (*STATE, *POINTS[used.peak_point])
    return {name: getattr(used, part) for part, name in PARTS.items() if part in parts}


def _traffic_lines(plan: Plan) -> Iterator[str]:
    if not plan.transfers:
        return
    links = {} if plan.time is None else {link.axes: link for link in plan.time.links}
    rows = [("sent per device and step", "what", "near links", "network", "seconds")]
    for axes in dict.fromkeys(item.axes for item in plan.transfers):
        items = [item for item in plan.transfers if item.axes == axes]
        what = ", ".join(dict.fromkeys(item.what for item in items))
        total = sum(item.bytes for item in items)
        link = links.get(axes)
        near, far = (total, 0.0) if link is None else (link.near_bytes, link.far_bytes)
        seconds = "" if link is None else readable_seconds(link.seconds)
        rows.append(("+".join(axes), what, readable_bytes(near), readable_bytes(far), seconds))
    yield ""
    yield from table(rows)
    diloco = plan.case.config.train.diloco
    for item in plan.transfers:
        if item.axes == (REPLICA,) and diloco.period is not None:
            sent, parts = readable_bytes(item.bytes * diloco.period), f" in {diloco.fragments} parts"
            yield f"replicas: {sent} every {diloco.period} steps{parts * (diloco.fragments > 1)}; mean per step above"


def time_parts(time: StepTime) -> dict[str, float]:
    """Seconds of a step by what the device does or waits for."""
    return {
        "matmuls": time.compute.matmul,
        "attention": time.compute.attention,
        "elementwise": time.compute.elementwise,
        "recomputation": time.compute.recomputed,
        "optimizer": time.compute.optimizer,
        "copies to and from host memory": time.compute.host,
        "waiting for weights": time.exposed_weights,
        "waiting for activations": time.exposed_activations,
    }


def _time_lines(time: StepTime) -> Iterator[str]:
    yield "\nstep time"
    yield from table([(name, readable_seconds(seconds)) for name, seconds in time_parts(time).items() if seconds])
    yield (
        f"step {readable_seconds(time.seconds)}, {time.tokens_per_second:,.0f} tokens/s, MFU {time.mfu:.1%} "
        "(estimated, see docs/plan.md)"
    )


def search_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """The best plans of a search, and the overrides of the first."""
    rows = [("mesh", "remat", "batch", "accumulated", "memory", "step", "tokens/s", "MFU")]
    for plan in plans:
        time = plan.time
        speed = ("", "", "")
        if time is not None:
            speed = (readable_seconds(time.seconds), f"{time.tokens_per_second:,.0f}", f"{time.mfu:.1%}")
        case = plan.case
        batch = (case.remat.policy.value, f"{case.rows:g}", str(case.grad_accum))
        rows.append((mesh_text(plan), *batch, readable_bytes(plan.memory.peak), *speed))
    yield from table(rows)
    if plans and not plans[0].fits:
        yield f"none of them fits in {readable_bytes(plans[0].limit or 0)}; these need the least memory"
