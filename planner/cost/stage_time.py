"""The time of each pipeline stage of a plan, and of a step by part. All times are seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from contracts.telemetry.items import Axis, Op
from planner.cost.axis_traffic import compute_row_bytes, count_dispatched_rows
from planner.cost.compute import ComputeTimer, ModuleSeconds
from planner.cost.memory import count_held_parameters
from planner.cost.pipeline_simulation import compute_bubble_ratio
from planner.cost.resolved_plan import ResolvedPlan
from planner.cost.traffic import GroupTraffic, get_micro_batch_traffic, get_step_end_traffic
from planner.facts.precision import FP32_BYTES
from planner.hardware.cluster import Cluster, NodeSpan, get_node_span
from planner.hardware.kernel_time import compute_collective_seconds, compute_kernel_seconds
from planner.hardware.kernels import MemoryKernel
from planner.hardware.stacks import OVERLAPPED_EXPERTS


class Pace(NamedTuple):
    """The slowest stage on one micro-batch.

    Attributes:
        seconds: its compute.
        waits: its exposed waits by axis.
        micro_batch_s: compute and waits together.
        once_s: one micro-batch through all stages.
    """

    seconds: ModuleSeconds
    waits: dict[Axis, float]
    micro_batch_s: float
    once_s: float


class StageParts(NamedTuple):
    """Seconds per step of a stage without its idle time, and per micro-batch of its forward and both backwards.

    Attributes:
        exposed_s: communication that compute does not overlap, by axis.
        launch_s: time that the device waits for its host.
        backward_input_s: backward of inputs, with recomputed kernels.
    """

    compute_s: float
    recompute_s: float
    exposed_s: dict[Axis, float]
    launch_s: float
    optimizer_s: float
    forward_s: float
    backward_input_s: float
    backward_weight_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.recompute_s + sum(self.exposed_s.values()) + self.launch_s + self.optimizer_s


class Timing(NamedTuple):
    """Seconds of one step of the slowest stage or the mean stage. `Parts` and the bubble add up to `step_s`."""

    step_s: float
    compute_s: float
    recompute_s: float
    exposed_s: dict[Axis, float]
    launch_s: float
    optimizer_s: float
    bubble_s: float
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    model_flops: int
    hardware_flops: int
    mfu: float
    hfu: float
    tokens_per_s: float

    @property
    def host_share(self) -> float:
        """Share of the step in which the device waits for its host."""
        return self.launch_s / self.step_s


def average_parts(weighed: Iterable[tuple[float, StageParts]]) -> StageParts:
    """Return the mean of (share, parts). The shares add up to 1."""
    rows = list(weighed)
    plain = [name for name in StageParts._fields if name != "exposed_s"]
    seconds = {name: sum(share * getattr(parts, name) for share, parts in rows) for name in plain}
    axes = dict.fromkeys(axis for _, parts in rows for axis in parts.exposed_s)
    exposed = {axis: sum(share * parts.exposed_s.get(axis, 0.0) for share, parts in rows) for axis in axes}
    return StageParts(**seconds, exposed_s=exposed)


def scale_timing(timing: Timing, ratio: float) -> Timing:
    """Return the timing with all seconds multiplied by `ratio`."""
    whole = ("model_flops", "hardware_flops", "mfu", "hfu", "tokens_per_s", "exposed_s")
    seconds = {name: value * ratio for name, value in timing._asdict().items() if name not in whole}
    shares = {name: getattr(timing, name) / ratio for name in ("mfu", "hfu", "tokens_per_s")}
    exposed = {axis: value * ratio for axis, value in timing.exposed_s.items()}
    return timing._replace(**seconds, **shares, exposed_s=exposed)


def slow_down(alone: Timing, times: float, *, keeps_exposed: bool) -> Timing:
    """Return the timing with all seconds multiplied by `times`.

    `keeps_exposed`: exposed seconds stay, because runs on these cores measured the links.
    """
    scaled = scale_timing(alone, times)
    if not keeps_exposed:
        return scaled
    step_s = scaled.step_s - (times - 1) * sum(alone.exposed_s.values())
    whole = scale_timing(scaled, step_s / scaled.step_s)
    return scaled._replace(
        step_s=step_s, exposed_s=alone.exposed_s, mfu=whole.mfu, hfu=whole.hfu, tokens_per_s=whole.tokens_per_s
    )


def get_micro_batch_s(stage: tuple[ModuleSeconds, dict[Axis, float]]) -> float:
    """Return the seconds that a stage computes and waits per micro-batch."""
    module, waits = stage
    return module.total_s + module.launch_s + sum(waits.values())


def compute_exposed(seconds: float, overlap: float, module: ModuleSeconds) -> float:
    """Return the exposed part of a wait of which compute overlaps a fraction."""
    return seconds - min(overlap * seconds, module.total_s)


def subtract_seconds(module: ModuleSeconds, seconds: float) -> ModuleSeconds:
    """Return the times without `seconds`, taken from each in proportion."""
    return ModuleSeconds(*(part * (1 - seconds / module.total_s) for part in module))


def scale_pace(pace: Pace, times: float) -> Pace:
    """Return the pace with all seconds multiplied by `times`."""
    module = ModuleSeconds(*(part * times for part in pace.seconds))
    waits = {axis: seconds * times for axis, seconds in pace.waits.items()}
    return Pace(module, waits, pace.micro_batch_s * times, pace.once_s * times)


def compute_bubble(plan: ResolvedPlan, pace: Pace) -> float:
    """Return the idle seconds of the slowest stage while the pipeline fills and drains."""
    if plan.layout.pp == 1:
        return 0.0
    module = pace.seconds
    inputs = module.backward_input_s + module.recompute_s
    ratio = compute_bubble_ratio(
        plan.layout, plan.train.micro_batches, module.forward_s, inputs, module.backward_weight_s
    )
    return (pace.once_s - pace.micro_batch_s) * ratio


def compute_fill_share(plan: ResolvedPlan) -> float:
    """Return the share of a rank's forwards that fill the pipeline, and of backwards that drain it.

    Nothing of the other kind runs next to them (`get_pp_rank_microbatches` in Megatron's schedules.py).
    """
    layout = plan.layout
    chunks = layout.pp - 1
    if layout.virtual_stages > 1:
        chunks = 2 * chunks + (layout.virtual_stages - 1) * layout.pp
    return min(1.0, (chunks + 1) / (plan.train.micro_batches * layout.virtual_stages))


def compute_interleaved_exposure(plan: ResolvedPlan, seconds: float, compute_s: float, *, overlaps_own: bool) -> float:
    """Return the exposed seconds of an interleaved pipeline's gathers or reductions, chunk after chunk.

    One chunk's share is exposed, and any time beyond the fill or drain phase (schedules.py of Megatron).

    Args:
        compute_s: compute of a stage on one micro-batch.
        overlaps_own: a chunk computes while its own weights arrive.
    """
    layout = plan.layout
    chunks, units = layout.virtual_stages, max(1, plan.model.num_layers // layout.pp)
    later = min(layout.pp, plan.train.micro_batches) * (chunks - 1) / chunks * compute_s
    hidden = compute_s / chunks if overlaps_own else 0.0
    return max(seconds / units, seconds / chunks - hidden, seconds - hidden - later)


MAX_WAIT_SHARE = 0.9  # of a measured layer; collectives measured elsewhere may take longer than the layer


class ParameterTimes(NamedTuple):
    """Seconds per step of a stage's parameters. `others_s` counts collectives of axes other than dp."""

    others_s: dict[Axis, float]
    gathers_s: float
    reduces_s: float
    optimizer_s: float


class StageTimer:
    """Times each pipeline stage of one plan on a cluster."""

    def __init__(self, plan: ResolvedPlan, cluster: Cluster, compute: ComputeTimer) -> None:
        self.plan, self.cluster, self.calibration = plan, cluster, compute.calibration
        self.software = compute.get_software(plan)
        self.stack = self.software.stack
        self.ranks = min(plan.layout.world_size, cluster.per_node)  # at work on a node
        self._compute = compute
        self._paces: dict[int, Pace] = {}
        self._stages: dict[tuple[int, int], tuple[ModuleSeconds, dict[Axis, float]]] = {}
        self._parameters: dict[int, ParameterTimes] = {}

    def get_pace(self, ranks: int) -> Pace:
        """Return the slowest stage and one micro-batch through all stages, with `ranks` at work on a node."""
        if ranks not in self._paces:
            groups = self.plan.partition.equal_stages
            stages = [self.get_stage(group[0], ranks) for group in groups]
            slowest = max(stages, key=get_micro_batch_s)
            once = sum(get_micro_batch_s(stage) * len(group) for stage, group in zip(stages, groups, strict=True))
            self._paces[ranks] = Pace(*slowest, get_micro_batch_s(slowest), once)
        return self._paces[ranks]

    def get_stage(self, index: int, ranks: int) -> tuple[ModuleSeconds, dict[Axis, float]]:
        """Return the compute of one micro-batch on a stage, and its exposed waits in seconds by axis."""
        if (index, ranks) not in self._stages:
            self._stages[index, ranks] = self._time_stage(index, ranks)
        return self._stages[index, ranks]

    def _time_stage(self, index: int, ranks: int) -> tuple[ModuleSeconds, dict[Axis, float]]:
        plan, stack, layout, own = self.plan, self.stack, self.plan.layout, self.plan.partition.stages[index]
        module = self._compute.time_stage(plan, index, ranks)
        waits: dict[Axis, float] = defaultdict(float)
        for row in get_micro_batch_traffic(plan, index):
            if row.op != "recv":  # the time of the sender is counted
                share = self._get_dispatch_share(row) if row.axis == "ep" else 1.0
                waits[row.axis] += share * self._time_row(self._convert(row), ranks) / plan.train.micro_batches
        exposed_tp = 0.0  # the dispatcher of experts sends these collectives, and no matmul overlaps them
        if stack.shards_dispatch and layout.tp > 1 and layout.sequence_parallel:
            gathers = 2 + (layout.regather or layout.recompute == "full")  # of a dense MLP, which experts do not need
            mlp = self._time_tp({"all_gather": gathers, "reduce_scatter": 2}, plan.micro_batch.hidden_bytes, ranks)
            waits["tp"] -= own.num_moe_layers * mlp
            if plan.model.moe:
                size = count_dispatched_rows(plan) * compute_row_bytes(plan)
                exposed_tp = own.num_moe_layers * self._time_tp({"all_gather": 2, "reduce_scatter": 2}, size, ranks)
        if stack.gathers_logits and layout.tp > 1 and own.stage.last:
            logits = plan.micro_batch.tokens * plan.micro_batch.vocab_rows * layout.tp
            waits["tp"] += self._time_tp({"all_gather": 1}, logits * plan.mix.compute_bytes, ranks)
        if self._compute.has_measured_collectives(plan, ranks):
            waits["tp"] = min(waits["tp"], MAX_WAIT_SHARE * module.total_s)
            module = subtract_seconds(module, waits["tp"])
        if "cp" in waits and layout.cp_method == "ring":
            waits["cp"] = max(0.0, waits["cp"] - module.attention_s)  # the next block is sent during attention
        overlap: dict[Axis, float] = {**stack.overlap}
        if layout.schedule == "dualpipev" and stack.overlaps_dual_pipe:
            overlap |= OVERLAPPED_EXPERTS
        if not layout.sequence_parallel:
            overlap.pop("tp", None)  # all-reduces are not divided into steps that overlap with their matmul
        if experts := overlap.get("ep"):
            overlap["ep"] = experts * (1 - compute_fill_share(plan))
        exposed = {axis: compute_exposed(seconds, overlap.get(axis, 0.0), module) for axis, seconds in waits.items()}
        if exposed_tp:
            exposed["tp"] += exposed_tp
        return module, exposed

    @cached_property
    def slowest_parameters(self) -> ParameterTimes:
        """The largest of each time over all stages."""
        parts = [self.get_parameters(group[0]) for group in self.plan.partition.equal_stages]
        axes = {axis for part in parts for axis in part.others_s}
        others = {axis: max(part.others_s.get(axis, 0.0) for part in parts) for axis in axes}
        return ParameterTimes(others, *(max(column) for column in zip(*(part[1:] for part in parts), strict=True)))

    def get_parameters(self, index: int) -> ParameterTimes:
        """Return the times of the parameters of a stage."""
        if index not in self._parameters:
            self._parameters[index] = self._time_parameters(index)
        return self._parameters[index]

    def _time_parameters(self, index: int) -> ParameterTimes:
        others: dict[Axis, float] = defaultdict(float)
        gathers, reduces = 0.0, 0.0
        for row in get_step_end_traffic(self.plan, index):
            seconds = self._time_row(self._convert(row), self.ranks)
            if row.axis != "dp":
                others[row.axis] += seconds
            elif row.op == "all_gather":
                gathers += seconds
            else:
                reduces += seconds
        return ParameterTimes(dict(others), gathers, reduces, self._time_optimizer(index))

    def crosses_nodes(self, axis: Axis) -> bool:
        """Return whether the groups of an axis span several nodes."""
        group = self.plan.get_group(axis)
        return get_node_span(group.size, group.stride, self.cluster.per_node, self.plan.layout.world_size).nodes > 1

    def _convert(self, row: GroupTraffic) -> GroupTraffic:
        """Return the collective as the stack sends it."""
        mix, stack = self.plan.mix, self.stack
        if stack.all_reduces_fp32 and row.axis == "dp" and row.op != "all_gather":
            return row._replace(op="all_reduce", payload_bytes=row.payload_bytes * FP32_BYTES // mix.gradient_bytes)
        return row

    def _get_dispatch_share(self, row: GroupTraffic) -> float:
        """Return the bytes that the stack sends to experts, relative to Meshboard's trainer."""
        moe, layout, stack = self.plan.model.moe, self.plan.layout, self.stack
        if moe is None or not stack.shards_dispatch:
            return 1.0
        top, part = moe.experts_per_token, 1 / (layout.tp if layout.sequence_parallel else 1)
        if not stack.dispatches_per_node:
            return part
        nodes = self._get_span(row).nodes
        places = nodes if nodes > 1 else row.group_size
        reached = places * (1 - (1 - 1 / places) ** top)  # expected places of `top` evenly spread experts
        return min(reached, top) / top * part

    def _time_tp(self, counts: dict[Op, int], size: int, ranks: int) -> float:
        """Return the time of collectives of `size` bytes over the tensor ranks."""
        group = self.plan.get_group("tp")
        rows = (GroupTraffic(op, "tp", group.size, group.stride, n, n * size) for op, n in counts.items())
        return sum(self._time_row(row, ranks) for row in rows)

    def _time_row(self, row: GroupTraffic, ranks: int) -> float:
        place = self._get_span(row)
        if self.calibration is not None and row.count and place.nodes == 1:  # a calibration measures one host
            each = self.calibration.get_collective_s(row.op, row.group_size, row.payload_bytes / row.count, ranks)
            if each is not None:
                return row.count * each
        seconds = row.count * compute_collective_seconds(row.op, row.payload_bytes / row.count, place, self.cluster)
        return seconds / self.stack.link_efficiency

    def _get_span(self, row: GroupTraffic) -> NodeSpan:
        return get_node_span(row.group_size, row.stride, self.cluster.per_node, self.plan.layout.world_size)

    def _time_optimizer(self, index: int) -> float:
        held = count_held_parameters(self.plan, index)
        if self.calibration is not None:
            measured = self.calibration.get_optimizer_s(held, self.ranks)
            if measured is not None:
                return measured
        host_s = self.stack.tensor_s * self.plan.partition.count_tensors(index)
        moved = MemoryKernel(self.plan.mix.update_bytes * held)
        return compute_kernel_seconds(moved, self.cluster.accelerator, "fp32", FP32_BYTES) + host_s
