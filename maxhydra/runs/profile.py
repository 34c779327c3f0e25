"""Summaries of the profiles of a run (runtime/profiler.py), from the trace.json.gz that jax writes next to each XPlane.

The trace holds the operations that each device executed, with start and duration. A summary is stored as summary.json
in the folder of the profile, because a trace can take seconds to read.
"""

import contextlib
import dataclasses
import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from maxhydra.record.atomic_io import replace_file
from maxhydra.record.facts import OPERATIONS, PROFILES, STEP_EVENT
from maxhydra.runs.page import Html, concat, element, head_row, scrolling, section

SUMMARY, FORMAT = "summary.json", 2
TOP = 15
# Share below which a part is not listed.
SMALLEST = 0.001
COLUMNS = ("operation", "source", "calls", "ms / step", "share")
_COLLECTIVE = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective|^(send|recv)\b|nccl", re.IGNORECASE
)
# Parts of an op_name that tracing adds; the rest are the scopes and functions of the model.
_WRAPPER = re.compile(r"^(p?jit|jvp|transpose|vmap|checkpoint|remat|shard_map|custom_jvp|custom_vjp\w*)\((.*)\)$")
_CONTROL = {"while", "body", "cond", "closed_call", "checkpoint", "rematted_computation"}
# Named scopes of the model and the training step.
SCOPES = {
    *(
        "embedding",
        "per_layer",
        "norm",
        "attention",
        "compressed",
        "mla",
        "indexer",
        "delta",
        "convolution",
        "mlp",
        "moe",
        "router",
    ),
    *("ssm", "loss", "logprobs", "update", "vision", "audio", "engram", "hyper_connection"),
}
Event = dict[str, Any]
Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Operation:
    """Operations of the compiled program that have the same source, summed over their executions.

    Shares are of the time of the profile.
    """

    name: str
    """Of several operations, what their names have in common, and their number."""
    source: str
    """Where the operation comes from in the model: the scopes and the operation of its op_name."""
    calls: int
    milliseconds: float
    """Per step and device, without the operations inside it."""
    share: float


@dataclasses.dataclass(frozen=True)
class Summary:
    """The time of all devices from their first to their last operation. Shares are means over the devices."""

    steps: int
    devices: int
    milliseconds: float
    """Per step."""
    idle: float
    """Share in which a device executed nothing."""
    collectives: float
    """Share in which a device executed a collective operation."""
    exposed: float
    """Share in which a device executed only collective operations."""
    parts: dict[str, float]
    """Share of each named scope, forward and backward, largest first; `other` is outside of them."""
    operations: list[Operation]

    @property
    def text(self) -> str:
        return (
            f"{self.steps} steps of {self.milliseconds:,.2f} ms on {self.devices} device{'s' * (self.devices > 1)}: "
            f"idle {self.idle:.1%}, collectives {self.collectives:.1%} (not overlapped {self.exposed:.1%})"
        )

    @property
    def parts_text(self) -> str:
        return ", ".join(f"{name} {share:.1%}" for name, share in self.parts.items() if share >= SMALLEST)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return [
            (item.name, item.source, f"{item.calls:,}", f"{item.milliseconds:.3f}", f"{item.share:.1%}")
            for item in self.operations
        ]


def profile_folders(run: Path) -> list[Path]:
    """The folders of a run's profiles, in the order of their steps."""
    found = [path for path in (run / PROFILES).glob("step_*") if trace_path(path) is not None]
    return sorted(found, key=lambda path: (len(path.name.partition("-")[0]), path.name))


def trace_path(folder: Path) -> Path | None:
    """The newest trace of a profile; a repeated step adds another."""
    return max(folder.glob("plugins/profile/*/*.trace.json.gz"), default=None)


def summarize_profile(folder: Path) -> Summary:
    """The stored summary, or one of the newest trace; ValueError if that cannot be read."""
    trace, stored = trace_path(folder), folder / SUMMARY
    if trace is None:
        raise ValueError(f"{folder} has no trace")
    try:
        content = json.loads(stored.read_text(encoding="utf-8"))
        if content.pop("format") == FORMAT and content.pop("trace") == trace.parent.name:
            operations = [Operation(**item) for item in content.pop("operations")]
            return Summary(operations=operations, **content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    try:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        names = _read_names(folder / OPERATIONS)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{trace} cannot be read: {error}") from None
    summary = summarize_events(events, names)
    content = {"format": FORMAT, "trace": trace.parent.name, **dataclasses.asdict(summary)}
    with contextlib.suppress(OSError):  # the folder of another user
        replace_file(stored, json.dumps(content, indent=1) + "\n")
    return summary


def _read_names(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def summarize_events(events: Iterable[Event], names: dict[str, str]) -> Summary:
    """Summarize trace events; `names` maps operations of the compiled program to their op_name."""
    events = list(events)
    marks = [event.get("args", {}) for event in events if event.get("name") == STEP_EVENT]
    steps = max(1, len({mark["step_num"] for mark in marks if "step_num" in mark}))
    devices = _device_events(events)
    times: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    span = busy = collectives = exposed = 0.0
    for threads in devices.values():
        intervals: list[tuple[str, Interval]] = []
        for thread in threads.values():
            for name, interval, own in _self_times(thread):
                times[name] += own
                calls[name] += 1
                intervals.append((name, interval))
        every = _union(interval for _, interval in intervals)
        span += max(end for _, end in every) - min(start for start, _ in every)
        length = _length(every)
        busy += length
        # A loop or a call contains its operations, collective ones too.
        leaves = [(name, interval) for name, interval in intervals if not re.match(r"(while|call|conditional)\b", name)]
        collectives += _length(_union(interval for name, interval in leaves if _COLLECTIVE.search(name)))
        compute = _length(_union(interval for name, interval in leaves if not _COLLECTIVE.search(name)))
        exposed += _length(_union(interval for _, interval in leaves)) - compute
    count, span = max(1, len(devices)), max(span, 1e-9)
    sources = {name: shorten_source(names.get(name, "")) for name in times}
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name, source in sources.items():
        groups[source or name].append(name)
    totals = {key: sum(times[name] for name in members) for key, members in groups.items()}
    operations = [
        Operation(
            _common_name(members := groups[key]),
            sources[members[0]],
            sum(calls[name] for name in members),
            time / 1e3 / steps / count,
            time / span,
        )
        for key, time in _largest(totals)[:TOP]
    ]
    parts: defaultdict[str, float] = defaultdict(float)
    for name, time in times.items():
        parts[part_of(names.get(name, ""))] += time / span
    return Summary(
        steps=steps,
        devices=len(devices),
        milliseconds=span / count / 1e3 / steps,
        idle=1 - busy / span,
        collectives=collectives / span,
        exposed=exposed / span,
        parts=dict(_largest(parts)),
        operations=operations,
    )


def _common_name(names: list[str]) -> str:
    """The name of an operation, or that of several from the same source, such as those of unrolled layers."""
    if len(names) == 1:
        return names[0]
    stems = Counter(re.sub(r"[._]\d+$", "", name) for name in names)
    return f"{stems.most_common(1)[0][0]} ({len(names)})"


def _largest(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])


def _device_events(events: list[Event]) -> dict[Any, dict[Any, list[Event]]]:
    """Executed operations by device and thread. A CPU is the host: there, operations are the events with `hlo_op`."""
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int | None], str] = {}
    for event in events:
        if event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    accelerators = {pid for pid, name in processes.items() if name.startswith("/device:")}
    found: dict[Any, dict[Any, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.get("ph") != "X":
            continue
        pid, thread = event["pid"], (event["pid"], event.get("tid"))
        if pid in accelerators:
            # Streams of a GPU, operations of a TPU; other lines group the same operations differently.
            if threads.get(thread, "").startswith(("Stream", "XLA Ops")):
                found[pid][thread].append(event)
        elif not accelerators and "hlo_op" in event.get("args", {}):
            found[event["args"].get("device_ordinal")][thread].append(event)
    for device in found.values():
        kinds = {thread: threads.get(thread, "").startswith("Stream") for thread in device}
        if any(kinds.values()):
            for thread in [thread for thread, is_stream in kinds.items() if not is_stream]:
                del device[thread]
    return found


def _self_times(events: list[Event]) -> Iterator[tuple[str, Interval, float]]:
    """(name, interval, time without nested operations) of each event of one thread.

    A kernel of a GPU may start before the previous one of its stream has ended; the overlap counts once.
    """
    stack: list[list[Any]] = []
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
        start, duration = float(event["ts"]), float(event.get("dur", 0.0))
        while stack and stack[-1][1][1] <= start:
            yield tuple(stack.pop())  # type: ignore[misc]
        if stack:
            stack[-1][2] -= min(start + duration, stack[-1][1][1]) - start
        name = str(event.get("args", {}).get("hlo_op") or event["name"])
        stack.append([name, (start, start + duration), duration])
    for entry in reversed(stack):
        yield tuple(entry)  # type: ignore[misc]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def shorten_source(op_name: str) -> str:
    """jit(step)/transpose(jvp(while))/body/mlp/dot_general -> backward mlp/dot_general."""
    is_backward = "transpose(jvp(" in op_name
    parts = []
    for part in op_name.split("/"):
        while match := _WRAPPER.match(part):
            part = "" if match[1] in ("jit", "pjit") else match[2]
        if part and part not in _CONTROL:
            parts.append(part)
    return ("backward " if is_backward else "") + "/".join(parts[-3:])


def part_of(op_name: str) -> str:
    """The named scope of an operation, and whether it belongs to the backward pass."""
    found = next((part for part in re.split(r"[/();]", op_name) if part in SCOPES), None)
    if found is None:
        return "other"
    return f"backward {found}" if "transpose(" in op_name.partition(found)[0] else found


def profile_section(run: Path) -> Html:
    """The section of the report; empty for a run without profiles."""
    parts = []
    for folder in profile_folders(run):
        try:
            summary = summarize_profile(folder)
        except ValueError as error:
            parts.append(element("p", str(error), class_="empty"))
            continue
        rows = [element("tr", *(element("td", cell) for cell in row)) for row in summary.rows]
        table = scrolling(element("table", head_row(COLUMNS), element("tbody", *rows), class_="sessions"))
        parts.append(
            concat(element("h3", folder.name), element("p", summary.text), element("p", summary.parts_text), table)
        )
    return section("Profile", *parts) if parts else Html()
