"""The plan of a case: memory, traffic, time, whether it fits, and what to change."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from maxhydra.config import Config
from maxhydra.config.schema.hardware import DATA, REPLICA, Platform
from maxhydra.config.schema.model import RematPolicy
from maxhydra.config.schema.optimizer import USES
from maxhydra.config.schema.quantization import STORED_KINDS
from maxhydra.model import parameter_count
from maxhydra.model.block import Remat
from maxhydra.plan.case import Case, Subject
from maxhydra.plan.memory import Memory, memory
from maxhydra.plan.timing import StepTime, step_time
from maxhydra.plan.traffic import Overlap, Transfer, transfers
from maxhydra.runtime import Machine

GIB = 2**30
# Parts of device memory that a step may take by the estimate with remat none and minimal. Estimates have been up to
# 10 % too low; the other tasks also have pairs of rows, a reference, a teacher or an engine, which they do not include.
SHARES, OTHER_SHARES = (0.85, 0.97), (0.0, 0.65)
# Tokens whose logits are in memory at a time, if the loss is computed in chunks to save memory.
CHUNK_TOKENS = 4096
OTHER_TASKS = ("dpo", "grpo", "distill", "reward_model")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is estimated about one case."""

    case: Case
    memory: Memory
    transfers: tuple[Transfer, ...]
    time: StepTime | None
    """None if the hardware option has no peak rates."""
    limit: float | None
    """Bytes that may be used on a device; None if unknown."""

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else self.memory.peak <= self.limit

    @property
    def overrides(self) -> list[str]:
        """Overrides of mesh, remat policy and batch that give this case."""
        case = self.case
        within = {f"mesh.{axis}": size for axis, size in zip(case.mesh, case.sizes.within, strict=True)}
        across = {f"mesh.dcn.{axis}": size for axis, size in zip(case.mesh, case.sizes.across, strict=True)}
        sizes = {key: size for key, size in {**within, **across}.items() if size > 1}
        return [
            *(f"{key}={size}" for key, size in sizes.items()),
            *(["mesh.shard_state_over_data=true"] if case.shards_over_data else []),
            f"model.remat.policy={case.remat.policy.value}",
            f"train.per_device_batch_size={case.rows:g}",
            f"train.grad_accum={case.grad_accum}",
        ]

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        case, time = self.case, self.time
        wire: dict[str, dict[str, float]] = {}
        for item in self.transfers:
            by_axes = wire.setdefault("+".join(item.axes), {})
            by_axes[item.what] = by_axes.get(item.what, 0.0) + item.bytes
        facts: dict[str, Any] = {
            "devices": case.devices,
            "mesh": {axis: size for axis, size in case.mesh.items() if size > 1},
            "slices": {axis: n for axis, n in zip(case.mesh, case.sizes.across, strict=True) if n > 1},
            "parameters": parameter_count(list(case.subject.weights)),
            "shard_state_over_data": case.shards_over_data,
            "remat": case.remat.policy.value,
            "per_device_batch_size": case.rows,
            "grad_accum": case.grad_accum,
            "tokens_per_step": case.step_tokens,
            "flops_per_step": case.subject.step_flops * case.step_tokens,
            "bytes_per_device": {**dataclasses.asdict(self.memory), "peak": self.memory.peak, "limit": self.limit},
            "fits": self.fits,
            "sent_bytes": wire,
            "advice": list(advice(self)),
            "overrides": self.overrides,
        }
        if time is not None:
            facts["step"] = {
                "seconds": time.seconds,
                "mfu": time.mfu,
                "tokens_per_second": time.tokens_per_second,
                "compute": dataclasses.asdict(time.compute),
                "exposed_weights": time.exposed_weights,
                "exposed_activations": time.exposed_activations,
                "links": [{**dataclasses.asdict(link), "axes": "+".join(link.axes)} for link in time.links],
            }
        return facts


def make_plan(case: Case, *, memory_share: float) -> Plan:
    """The plan of a case."""
    capacity, found = case.config.hardware.memory_gib, transfers(case)
    return Plan(
        case=case,
        memory=memory(case),
        transfers=tuple(found),
        time=step_time(case, found),
        limit=None if capacity is None else capacity * GIB * memory_share,
    )


def advice(plan: Plan) -> Iterator[str]:
    """Concrete changes for a setup that does not fit or is bound by its network."""
    case, used = plan.case, plan.memory
    if plan.fits is False:
        yield from _less_memory(case, used)
    time = plan.time
    if time is None:
        return
    if used.host and case.config.hardware.links.host_gb_s is None:
        yield "the step time lacks the copies of what is offloaded: set hardware.links.host_gb_s"
    if time.exposed_weights > 0.1 * time.seconds:
        share = time.exposed_weights / time.seconds
        yield (
            f"{share:.0%} of the step waits for weights: raise train.per_device_batch_size={2 * case.rows:g}, "
            "or lower mesh.fsdp in favor of mesh.tensor or mesh.data"
        )
    if time.exposed_activations > 0.2 * time.seconds:
        waited = {item.axes for item in plan.transfers if item.overlap is Overlap.none}
        slow = max((link for link in time.links if link.axes in waited), key=lambda link: link.seconds)
        keys = ", ".join(f"mesh.{axis}" for axis in slow.axes)
        where = "the network between nodes" if slow.far_bytes > 0 else "the links of a node"
        yield f"{time.exposed_activations / time.seconds:.0%} of the step waits for {where}: lower {keys}"
    if plan.fits and case.remat.policy is RematPolicy.full and plan.limit and used.peak < 0.5 * plan.limit:
        yield "memory is half empty: try model.remat.policy=minimal or a larger train.per_device_batch_size"


def _less_memory(case: Case, used: Memory) -> Iterator[str]:
    """What to change if a setup does not fit, by the largest part of its memory."""
    config = case.config
    if used.logits + used.loss > 0.15 * used.temporaries:
        if not case.loss_chunk:
            yield "logits are large: train.loss_chunk=1024"
        if config.model.dtypes.logits.value == "float32":
            yield "logits are large: model.dtypes.logits=bfloat16"
    if case.remat.policy is not RematPolicy.full and used.activations > 0.2 * used.peak:
        yield "activations are large: model.remat.policy=full"
    if used.state > 0.6 * used.peak:
        yield from _less_state(case)
    if used.activations + used.layer > 0.3 * used.peak:
        yield f"activations are large: train.per_device_batch_size={case.rows / 2:g}"
        if config.hardware.platform is not Platform.cpu and case.mesh["tensor"] == 1:
            yield "or split them: mesh.tensor=2, mesh.sequence=2"


def _less_state(case: Case) -> Iterator[str]:
    """What to change if weights and optimizer state do not fit."""
    data, has_replicas = case.mesh[DATA], case.mesh[REPLICA] > 1
    if data > 1 and not case.shards_over_data and not has_replicas:
        yield (
            f"weights and moments are replicated: mesh.data=1 mesh.fsdp={data * case.mesh['fsdp']}, "
            "or mesh.shard_state_over_data=true"
        )
    else:
        yield f"weights and moments are large: task.devices={2 * case.devices}"
    if case.config.optimizer.moments is None and "moments" in USES[case.config.optimizer.kind]:
        yield "moments are large: optimizer.moments=dynamic8"
    elif not case.config.optimizer.offload and not has_replicas:
        yield "moments are large: optimizer.offload=true"
    elif not case.config.optimizer.offload_weights and not has_replicas:
        yield "weights are large: optimizer.offload_weights=true"


def fit_memory(case: Case, limit: float, *, shares: tuple[float, float] = SHARES) -> Case:
    """The case with the remat policy that recomputes least of those with which a training step fits in `limit` bytes.

    If train.loss_chunk is null, the loss is computed in chunks where that avoids remat full, or full does not fit
    otherwise: chunks cost 3 to 4 % of a step, remat full about 20 %.
    `shares`: parts of the limit that a step may take by the estimate with the policies none and minimal.
    """
    none, minimal, full = (
        dataclasses.replace(case, remat=Remat(policy, (), ()))
        for policy in (RematPolicy.none, RematPolicy.minimal, RematPolicy.full)
    )
    choices = [(none, shares[0]), (minimal, shares[1]), (full, 1.0)]
    if case.config.train.loss_chunk is None and (chunk := _largest_chunk(case)) < case.seq_len:
        chunked = [dataclasses.replace(each, loss_chunk=chunk) for each in (minimal, full)]
        choices = [*choices[:2], (chunked[0], shares[1]), choices[2], (chunked[1], 1.0)]
    return next((each for each, share in choices if memory(each).peak <= share * limit), choices[-1][0])


def _largest_chunk(case: Case) -> int:
    """Positions per chunk of the loss, which divide the sequence, with at most CHUNK_TOKENS tokens on a device."""
    most = max(1, int(CHUNK_TOKENS * case.seq_len / case.stream_tokens))
    return max(n for n in range(1, min(most, case.seq_len) + 1) if case.seq_len % n == 0)


def with_remat(config: Config, *, devices: int, slices: int, memory_gib: float | None) -> Config:
    """The config with model.remat.policy=auto replaced by a policy that fits in device memory, if that is known.

    Also with train.loss_chunk, if it is null. Weights that are stored quantized are not trained.
    """
    if not config.quantization.kinds.isdisjoint(STORED_KINDS):
        return config
    if config.model.remat.policy is not RematPolicy.auto or memory_gib is None:
        return config
    case = Case.of(Subject.of(config), devices=devices, slices=slices)
    shares = OTHER_SHARES if config.task.name in OTHER_TASKS else SHARES
    chosen = fit_memory(case, memory_gib * GIB, shares=shares)
    remat = dataclasses.replace(config.model.remat, policy=chosen.remat.policy)
    model, train = dataclasses.replace(config.model, remat=remat), config.train
    return dataclasses.replace(config, model=model, train=dataclasses.replace(train, loss_chunk=chosen.loss_chunk))


def with_remat_on(machine: Machine, config: Config) -> Config:
    """The config with model.remat.policy=auto replaced by a policy that fits on this machine; see `with_remat`."""
    planned, slices = dataclasses.replace(config, hardware=machine.hardware), config.mesh.slices or 1
    chosen = with_remat(planned, devices=machine.devices, slices=slices, memory_gib=machine.memory_gib)
    return dataclasses.replace(config, model=chosen.model, train=chosen.train)
