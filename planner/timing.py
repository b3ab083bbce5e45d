"""How long a step takes: kernels, collectives over the links they cross, bubbles, and what hides behind what.

An estimate. Per micro-batch a stage computes its layers and waits for their tensor, context and expert collectives;
the schedule adds a bubble; gradients and gathered weights hide behind compute as far as it reaches; the optimiser
comes last.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from contracts.telemetry import Axis
from planner.cluster import Cluster, collective_seconds, kernel_seconds, span
from planner.flops import hardware_flops, model_flops
from planner.kernels import Kernel, Pass, Work, embedding_work, head_work, layer_work
from planner.memory import held_parameters
from planner.precision import FP32_BYTES, mix_of
from planner.spec import JobSpec
from planner.traffic import Collective, stage_traffic
from planner.traffic.shapes import Held, held

ADAM_PASSES = 7  # moments and weights read and written, gradient read: fp32 each


class Timing(NamedTuple):
    """Seconds of one step of the slowest stage by what they are spent on; the parts add up to `step_s`.

    `exposed_s` counts of each axis only what compute does not hide.
    """

    step_s: float
    compute_s: float
    recompute_s: float
    exposed_s: dict[Axis, float]
    bubble_s: float
    optimizer_s: float
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    model_flops: int
    hardware_flops: int
    mfu: float
    hfu: float
    tokens_per_s: float


class Halves(NamedTuple):
    """Seconds of a piece of the model: forward, backward of inputs, backward of weights, what recompute repeats."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    recompute_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_input_s + self.backward_weight_s + self.recompute_s


class StageTime(NamedTuple):
    """One stage: compute of a micro-batch, seconds a micro-batch waits by axis, and what the step as a whole adds."""

    halves: Halves
    waits: dict[Axis, float]
    step_waits: dict[Axis, float]
    optimizer_s: float

    @property
    def micro_batch_s(self) -> float:
        return self.halves.total_s + sum(self.waits.values())


def step_time(spec: JobSpec, cluster: Cluster) -> Timing:
    """Time of one optimiser step, of the slowest rank."""
    return Timer(cluster).step(spec)


class Timer:
    """Times specs on one cluster; what layouts share is computed once. Not for use by several threads."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._pieces: dict[tuple[object, ...], tuple[Halves, ...]] = {}

    def step(self, spec: JobSpec) -> Timing:
        """Time of one optimiser step: the pace of the slowest stage, filling and draining through all of them."""
        m, stages = spec.train.micro_batches, unlike_stages(spec)
        times = {index: self.stage(spec, index) for index in stages}
        slowest = max(times.values(), key=lambda stage: stage.micro_batch_s)
        once = sum(times[index].micro_batch_s * number for index, number in stages.items())
        bubble = _bubble(spec, slowest, once)
        exposed: dict[Axis, float] = defaultdict(float)
        for axis, seconds in slowest.waits.items():
            exposed[axis] += m * seconds
        for axis in {axis for stage in times.values() for axis in stage.step_waits}:
            exposed[axis] += max(stage.step_waits.get(axis, 0.0) for stage in times.values())
        optimizer = max(stage.optimizer_s for stage in times.values())
        halves = slowest.halves
        compute = m * (halves.total_s - halves.recompute_s)
        total = compute + m * halves.recompute_s + sum(exposed.values()) + bubble + optimizer
        model, hardware = model_flops(spec), hardware_flops(spec)
        peak = spec.layout.world_size * self.cluster.accelerator.peak(mix_of(spec.train.precision).gemm) * total
        return Timing(
            step_s=total,
            compute_s=compute,
            recompute_s=m * halves.recompute_s,
            exposed_s=dict(exposed),
            bubble_s=bubble,
            optimizer_s=optimizer,
            forward_s=halves.forward_s,
            backward_input_s=halves.backward_input_s + halves.recompute_s,
            backward_weight_s=halves.backward_weight_s,
            model_flops=model,
            hardware_flops=hardware,
            mfu=model / peak,
            hfu=hardware / peak,
            tokens_per_s=spec.train.global_batch * spec.train.seq_len / total,
        )

    def stage(self, spec: JobSpec, index: int) -> StageTime:
        """Times of pipeline stage `index`."""
        own = held(spec, index)
        halves = self._compute(spec, own)
        waits, step_waits = self._waits(spec, index, halves)
        return StageTime(halves, waits, step_waits, self._optimizer(spec, index))

    def _compute(self, spec: JobSpec, own: Held) -> Halves:
        layer, moe, embedding, head = self._piece(spec)
        dense = own.num_layers - own.num_moe_layers
        parts = [(layer, dense), (moe, own.num_moe_layers), (embedding, own.stage.first), (head, own.stage.last)]
        return Halves(*(sum(part[i] * number for part, number in parts) for i in range(4)))

    def _piece(self, spec: JobSpec) -> tuple[Halves, ...]:
        """Layer, layer with experts, embedding and head: of one micro-batch on one rank."""
        layout, train = spec.layout, spec.train
        key = (
            *(layout.tp, layout.cp, layout.ep, layout.sequence_parallel, layout.recompute, spec.model),
            *(spec.micro_batch_size, train.seq_len, train.precision, train.attention, train.dropout),
        )
        if key not in self._pieces:
            moe = Halves(0, 0, 0)
            if spec.model.moe:
                moe = self._layer(spec, layer_work(spec, moe=True))
            ends = (self._halves(spec, embedding_work(spec)), self._halves(spec, head_work(spec)))
            self._pieces[key] = (self._layer(spec, layer_work(spec)), moe, *ends)
        return self._pieces[key]

    def _layer(self, spec: JobSpec, work: Work) -> Halves:
        halves = self._halves(spec, work)
        if spec.layout.recompute == "full":
            return halves._replace(recompute_s=halves.forward_s)
        if spec.layout.recompute == "selective":
            return halves._replace(recompute_s=self._seconds(spec, work.scores))
        return halves

    def _halves(self, spec: JobSpec, work: Work) -> Halves:
        parts = (work.forward, work.backward_input, work.backward_weight)
        return Halves(*(self._seconds(spec, kernels) for kernels in parts))

    def _seconds(self, spec: JobSpec, kernels: Sequence[Kernel]) -> float:
        """The device's time, or the host's to launch the kernels where that is longer."""
        mix, accelerator = mix_of(spec.train.precision), self.cluster.accelerator
        device = sum(kernel_seconds(k, accelerator, mix.gemm, mix.compute) for k in kernels)
        return max(device, len(kernels) * accelerator.launch_s)

    def _waits(self, spec: JobSpec, index: int, halves: Halves) -> tuple[dict[Axis, float], dict[Axis, float]]:
        """(seconds a micro-batch, seconds a step) by axis that compute does not hide."""
        m = spec.train.micro_batches
        waits: dict[Axis, float] = defaultdict(float)
        step_waits: dict[Axis, float] = defaultdict(float)
        gathers = reduces = 0.0
        for row in stage_traffic(spec, index):
            seconds = self._row_seconds(row)
            if row.op == "recv":
                continue  # the sender's time is counted
            if row.axis in ("tp", "cp", "ep") or row.op == "send":
                waits[row.axis] += seconds / m
            elif row.axis != "dp":
                step_waits[row.axis] += seconds
            elif row.op == "all_gather":
                gathers += seconds
            else:
                reduces += seconds
        if "cp" in waits and spec.layout.cp_method == "ring":
            waits["cp"] = max(0.0, waits["cp"] - RING_HIDES * halves.total_s)
        if gathers or reduces:
            step_waits["dp"] += _exposed_dp(spec, halves, gathers, reduces)
        return dict(waits), dict(step_waits)

    def _row_seconds(self, row: Collective) -> float:
        place = span(row.group_size, row.stride, self.cluster.per_node)
        return row.count * collective_seconds(row.op, row.payload_bytes / row.count, place, self.cluster)

    def _optimizer(self, spec: JobSpec, index: int) -> float:
        moved = ADAM_PASSES * FP32_BYTES * held_parameters(spec, index)
        return kernel_seconds(Pass(moved), self.cluster.accelerator, "fp32", FP32_BYTES)


RING_HIDES = 0.5  # of a layer's compute is attention that a ring can hide behind, at long sequences


def unlike_stages(spec: JobSpec) -> dict[int, int]:
    """{a stage: how many hold as much of the model as it does}"""
    kinds: dict[tuple[object, ...], int] = {}
    counts: dict[int, int] = defaultdict(int)
    for index in range(spec.layout.pp):
        own = held(spec, index)
        key = (tuple(len(chunk) for chunk in own.stage.chunks), own.num_moe_layers, own.stage.first, own.stage.last)
        counts[kinds.setdefault(key, index)] += 1
    return dict(counts)


def _bubble(spec: JobSpec, slowest: StageTime, once: float) -> float:
    """Seconds the slowest stage idles. `once`: one micro-batch through all stages, forward and backward."""
    layout, m = spec.layout, spec.train.micro_batches
    others = once - slowest.micro_batch_s
    if layout.schedule == "naive":
        return m * others
    if layout.schedule in ("interleaved_zero_bubble", "zbv", "dualpipev"):
        # Weight gradients fill the gap: once where a stage keeps p micro-batches (2401.10241 section 3), twice in a V.
        fills = 2 if layout.schedule == "interleaved_zero_bubble" else 3
        share = slowest.halves.backward_weight_s / slowest.micro_batch_s
        others = max(0.0, others * (1 - fills * share))
    return others / layout.virtual_stages


def _exposed_dp(spec: JobSpec, halves: Halves, gathers: float, reduces: float) -> float:
    """Gradient sums hide behind backward, gathers behind forward: of one micro-batch, of all of them where ZeRO
    repeats them. The first gather and the last sum have nothing to hide behind."""
    if not spec.train.overlap:
        return gathers + reduces
    m, zero = spec.train.micro_batches, spec.layout.zero
    backward = halves.total_s - halves.forward_s
    units = max(1, spec.model.num_layers // spec.layout.pp)
    again = gathers / 2 if zero == 3 else 0.0
    reduced = reduces + again
    forward_room = halves.forward_s * (m if zero == 3 else 1)
    backward_room = backward * (m if zero >= 2 else 1)
    first, last = (gathers - again) / units, reduces / units
    if zero >= 2:
        first, last = first / m if zero == 3 else first, last / m
    return max(first, gathers - again - forward_room) + max(last, reduced - backward_room)
