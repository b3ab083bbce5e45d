"""How long a step takes: kernels, collectives over the links they cross, bubbles, and what hides behind what.

An estimate. Per micro-batch a stage computes its layers and waits for their tensor, context and expert collectives;
the schedule adds a bubble; gradients and gathered weights hide behind compute as far as it reaches; the optimiser
comes last.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from contracts.telemetry.vocabulary import Axis
from planner.cost import beyond
from planner.cost.alike import unlike_stages
from planner.cost.compute import Compute, Halves
from planner.cost.correction import Correction, corrected_by
from planner.cost.memory import held_parameters
from planner.cost.pace import Pace, bubble, filling, in_turns, less, micro_batch_s, scaled, unhidden
from planner.cost.pipes import simulate, stretched
from planner.cost.timed import Parts, Timing, corrected, crowded, mean_parts
from planner.cost.traffic import Collective, micro_batch_traffic, step_end_traffic
from planner.facts.layout import V_SCHEDULES, get_axis_group
from planner.facts.model_shapes import compute_model_flops
from planner.facts.precision import FP8_BYTES, FP32_BYTES, get_mixed_precision
from planner.facts.resources import StackName
from planner.facts.spec import JobSpec, Layout
from planner.facts.stages import count_tensors, get_stage_layers
from planner.hardware.calibration import Calibration, line
from planner.hardware.cluster import Accelerator, Cluster, NodeSpan, get_filled_per_node, get_node_span
from planner.hardware.kernel_time import compute_collective_seconds, compute_kernel_seconds
from planner.hardware.kernels import MemoryKernel
from planner.hardware.stack_options import Stacks
from planner.hardware.stacks import OURS_ON_CPU, STACKS, Stack, hardware_flops

MOST_WAITING = 0.9  # of a measured layer: what its collectives were measured at elsewhere may exceed it


def step_time(spec: JobSpec, cluster: Cluster) -> Timing:
    """Time of one optimiser step, of the slowest rank."""
    return Timer(cluster).step(spec)


class Timer:
    """Times specs on one cluster; what layouts share is computed once. Not for use by several threads."""

    def __init__(self, cluster: Cluster, stacks: Mapping[StackName, Stack] = STACKS) -> None:
        self.cluster = cluster
        if cluster.profile:  # a host was measured with its software: nothing comes on top
            stacks = {name: Stack(stack.title, stack.within) for name, stack in stacks.items()}
        elif cluster.device == "cpu":
            stacks = {**stacks, "ours": OURS_ON_CPU}
        measured = cluster.profile is not None
        compiles = not measured and cluster.device != "cpu"
        self.stacks = Stacks(stacks, cluster.per_node, measured=measured, compiles=compiles)
        self.calibration = Calibration(cluster.profile) if cluster.profile else None
        self._compute = Compute(cluster.accelerator, self.stacks, self.calibration)
        self._paces: dict[tuple[object, ...], Pace] = {}
        self._corrections: dict[tuple[object, ...], Correction | None] = {}
        self._sums: dict[tuple[object, ...], tuple[dict[Axis, float], float, float, float]] = {}

    def step(self, spec: JobSpec) -> Timing:
        """Time of one optimiser step, corrected by what ran on the cluster before."""
        found, timing = self.correction(spec), self.predicted(spec)
        return timing if found is None else corrected(timing, found.ratio)

    def correction(self, spec: JobSpec) -> Correction | None:
        """What comparable runs on the cluster say of this prediction."""
        key = (spec.model, spec.resources.stack, spec.layout.world_size, spec.train.precision, spec.train.compile)
        if key not in self._corrections:
            found = corrected_by(spec, self.cluster.runs, lambda run: self.predicted(run).step_s)
            if found is not None and found.borrowed and self.calibration is not None:
                found = None  # a calibration knows how ranks share its cores
            self._corrections[key] = found
        return self._corrections[key]

    def predicted(self, spec: JobSpec) -> Timing:
        """Without correction."""
        alone = self._alone(spec)
        return crowded(alone, self._crowding(spec, alone), links_told=self.cluster.link_runs > 0)

    def _crowding(self, spec: JobSpec, alone: Timing) -> float:
        """Times as long as with a core for each rank: those at work take turns on a node's. A calibration was measured
        so."""
        cores, ranks = self.cluster.cores, min(spec.layout.world_size, self.cluster.per_node)
        if cores is None or self.calibration is not None:
            return 1.0
        return max(1.0, ranks * (1 - alone.bubble_s / alone.step_s) / cores)

    def _alone(self, spec: JobSpec) -> Timing:
        """With a core for each rank: the pace of the slowest stage, filling and draining through all of them."""
        pace, bubble = self._paced(spec)
        parts = self._parts(spec, pace, self._parameters(spec))
        total = parts.total_s + bubble
        if straggling := self._straggling(spec, total):
            parts.exposed_s["world"] = parts.exposed_s.get("world", 0.0) + straggling
            total += straggling
        model, hardware = compute_model_flops(spec), hardware_flops(spec)
        peak = spec.layout.world_size * self.peak(spec) * total
        return Timing(
            step_s=total,
            **parts._asdict(),
            bubble_s=bubble,
            model_flops=model,
            hardware_flops=hardware,
            mfu=model / peak,
            hfu=hardware / peak,
            tokens_per_s=spec.train.global_batch * spec.train.seq_len / total,
        )

    def over_ranks(self, spec: JobSpec) -> Timing:
        """The same step as ranks spend it in the mean, which is what is measured of them. What stages wait for the
        slowest is pp's, beyond the bubble that a schedule has with even ones."""
        whole = self.step(spec)
        if spec.layout.pp == 1:
            return whole
        slowest, (pace, idle) = self._alone(spec), self._paced(spec)
        mean = mean_parts(self._of_stages(spec, pace))
        exposed = {**mean.exposed_s, "world": slowest.exposed_s.get("world", 0.0)}
        rest = slowest.step_s - mean._replace(exposed_s=exposed).total_s
        even = idle * (pace.once_s - pace.once_s / spec.layout.pp) / (pace.once_s - pace.micro_batch_s)
        bubble = max(0.0, min(even, rest))
        exposed["pp"] = exposed.get("pp", 0.0) + rest - bubble
        parts = mean._replace(exposed_s={axis: seconds for axis, seconds in exposed.items() if seconds})
        averaged = slowest._replace(**parts._asdict(), bubble_s=bubble)
        made = crowded(averaged, self._crowding(spec, slowest), links_told=self.cluster.link_runs > 0)
        return corrected(made, whole.step_s / made.step_s)

    def _of_stages(self, spec: JobSpec, slowest: Pace) -> Iterator[tuple[float, Parts]]:
        """(share of all stages, parts of one) of those unlike each other; on shared cores each as much slower than
        alone as the slowest is."""
        ranks, pp = self._ranks_at_work(spec), spec.layout.pp
        each = ranks if self.calibration is None else max(1, ranks // pp)
        times = slowest.micro_batch_s / self._pace(spec, each).micro_batch_s
        for index, number in unlike_stages(spec).items():
            stage = self._stage(spec, index, each)
            own = scaled(Pace(*stage, micro_batch_s(stage), slowest.once_s / times), times)
            yield number / pp, self._parts(spec, own, self._stage_parameters(spec, index))

    def _parts(self, spec: JobSpec, pace: Pace, sums: tuple[dict[Axis, float], float, float, float]) -> Parts:
        m, halves, (others, gathers, reduces, optimizer) = spec.train.micro_batches, pace.halves, sums
        exposed = {axis: m * seconds for axis, seconds in pace.waits.items()}
        if "pp" in exposed and self.stacks.of(spec).hides_sends and spec.layout.virtual_stages > 1:
            exposed["pp"] *= filling(spec)
        for axis, seconds in others.items():
            exposed[axis] = exposed.get(axis, 0.0) + seconds
        if gathers or reduces:
            exposed["dp"] = self._exposed_dp(spec, pace, gathers, reduces)
        return Parts(
            compute_s=m * (halves.total_s - halves.recompute_s),
            recompute_s=m * halves.recompute_s,
            exposed_s=exposed,
            launch_s=m * halves.launch_s,
            optimizer_s=optimizer,
            forward_s=halves.forward_s,
            backward_input_s=halves.backward_input_s + halves.recompute_s,
            backward_weight_s=halves.backward_weight_s,
        )

    def stages(self, spec: JobSpec, first: int) -> list[float]:
        """What a micro-batch takes on each of the `first` stages, over what it takes on the slowest of all."""
        ranks = self._ranks_at_work(spec)
        slowest = self._pace(spec, ranks).micro_batch_s
        return [micro_batch_s(self._stage(spec, index, ranks)) / slowest for index in range(first)]

    def accelerator(self, spec: JobSpec) -> Accelerator:
        """What products run on, at the rates that the spec's stack reaches."""
        return self._compute.accelerator(spec)

    def peak(self, spec: JobSpec) -> float:
        """FLOP/s of the fastest type that products run in: where fp8 is emulated, those that stay wide are faster."""
        gemm, accelerator = get_mixed_precision(spec.train.precision).gemm, self.accelerator(spec)
        return max(accelerator.get_peak_flops(gemm), accelerator.get_peak_flops("bf16" if gemm == "fp8" else gemm))

    def _ranks_at_work(self, spec: JobSpec) -> int:
        return min(spec.layout.world_size, self.cluster.per_node)

    def _paced(self, spec: JobSpec) -> tuple[Pace, float]:
        """The slowest stage, and what it idles. On shared cores a stage is faster while others idle."""
        ranks = self._ranks_at_work(spec)
        if self.calibration is None or spec.layout.pp == 1:
            pace = self._pace(spec, ranks)
            return pace, bubble(spec, pace)
        each = max(1, ranks // spec.layout.pp)
        alone = self._pace(spec, each)
        forward = alone.halves.forward_s / alone.halves.total_s * alone.micro_batch_s
        weights = alone.halves.backward_weight_s / alone.halves.total_s * alone.micro_batch_s
        chunks = spec.layout.virtual_stages
        timeline = simulate(
            spec.layout,
            spec.train.micro_batches,
            forward_s=forward / chunks,
            inputs_s=(alone.micro_batch_s - forward - weights) / chunks,
            weights_s=weights / chunks,
            longer=[micro_batch_s(self._stage(spec, i, each)) / alone.micro_batch_s for i in range(spec.layout.pp)],
        )
        slowdown = [self._slowdown(spec, each, stages * each) for stages in range(1, spec.layout.pp + 1)]
        together = stretched(timeline, slowdown)
        busy = max(together.busy_s)
        return scaled(alone, busy / (spec.train.micro_batches * alone.micro_batch_s)), together.step_s - busy

    def _slowdown(self, spec: JobSpec, few: int, many: int) -> float:
        """How many times as long `many` ranks at work need as `few`: on a line between the numbers measured."""
        assert self.calibration is not None
        points = [(n, self._pace(spec, n).micro_batch_s) for n in self.calibration.counts if n >= few]
        return (line(many, points) or 1.0) / self._pace(spec, few).micro_batch_s

    def _pace(self, spec: JobSpec, ranks: int) -> Pace:
        """The slowest stage, and one micro-batch through all of them, with so many ranks at work on a node."""
        layout, train = spec.layout, spec.train
        key = (
            *(layout.tp, layout.cp, layout.ep, layout.pp, layout.virtual_stages, layout.schedule in V_SCHEDULES),
            *(
                layout.zero == 3,
                layout.balance,
                layout.sequence_parallel,
                layout.regather,
                layout.scatter_gather,
                layout.recompute,
                layout.cp_method,
            ),
            *(layout.dp, spec.micro_batch_size, train.seq_len, train.precision, train.attention, train.dropout),
            *(spec.model, train.document_end is None, ranks, self.stacks.said(spec)),
            train.micro_batches if "ep" in self.stacks.of(spec).hidden else 0,
            self._compute.accumulated(spec),
        )
        if key not in self._paces:
            stages = {index: self._stage(spec, index, ranks) for index in unlike_stages(spec)}
            slowest = max(stages.values(), key=micro_batch_s)
            once = sum(micro_batch_s(stages[index]) * number for index, number in unlike_stages(spec).items())
            self._paces[key] = Pace(*slowest, micro_batch_s(slowest), once)
        return self._paces[key]

    def _stage(self, spec: JobSpec, index: int, ranks: int) -> tuple[Halves, dict[Axis, float]]:
        """Compute of one micro-batch on stage `index`, and the seconds it waits by axis."""
        stack, layout, own = self.stacks.of(spec), spec.layout, get_stage_layers(spec, index)
        halves = self._compute.of_stage(spec, own, ranks)
        waits: dict[Axis, float] = defaultdict(float)
        for row in micro_batch_traffic(spec, index):
            if row.op != "recv":  # the sender's time is counted
                share = self._dispatched(spec, row) if row.axis == "ep" else 1.0
                waits[row.axis] += (
                    share * self._row_seconds(spec, self._cast(spec, row), ranks) / spec.train.micro_batches
                )
        bare = 0.0  # of tp, what no product hides: experts' dispatcher sends it
        if stack.divides_dispatch and layout.tp > 1 and layout.sequence_parallel:
            waits["tp"] -= own.num_moe_layers * self._together_s(spec, beyond.mlp_sums(spec), ranks)
            if not stack.experts_whole:
                bare = own.num_moe_layers * self._together_s(spec, beyond.gathered_experts(spec), ranks)
        if stack.inputs_apart and layout.tp > 1:
            waits["tp"] += own.num_layers * self._together_s(spec, beyond.inputs_apart(spec), ranks)
        if stack.gathers_logits and layout.tp > 1 and own.stage.last:
            waits["tp"] += self._together_s(spec, beyond.gathered_logits(spec), ranks)
        if self._compute.with_collectives(spec, ranks):
            waits["tp"] = min(waits["tp"], MOST_WAITING * halves.total_s)
            halves = less(halves, waits["tp"])
        if "cp" in waits and spec.layout.cp_method == "ring":
            waits["cp"] = max(0.0, waits["cp"] - halves.attention_s)  # the next part travels meanwhile
        hidden: dict[Axis, float] = {**stack.hidden}
        if hides := hidden.get("ep"):
            hidden["ep"] = hides * (1 - filling(spec))
        shown = {axis: unhidden(seconds, hidden.get(axis, 0.0), halves) for axis, seconds in waits.items()}
        if bare:
            shown["tp"] += bare
        return halves, shown

    def _parameters(self, spec: JobSpec) -> tuple[dict[Axis, float], float, float, float]:
        """Seconds a step where most is needed: by axis but dp, of dp's gathers, of its sums, of the optimiser."""
        layout, train = spec.layout, spec.train
        repeats = train.micro_batches if layout.zero >= 2 else 1
        key = (
            *(layout.tp, layout.cp, layout.ep, layout.pp, layout.virtual_stages, layout.schedule in V_SCHEDULES),
            *(
                layout.balance,
                layout.sequence_parallel,
                layout.dp,
                layout.dp_replicas,
                layout.zero,
                layout.keep_gathered,
                repeats,
                train.precision,
            ),
            *(spec.model, self.stacks.said(spec)),
        )
        if key not in self._sums:
            parts = [self._stage_parameters(spec, index) for index in unlike_stages(spec)]
            axes = {axis for others, *_ in parts for axis in others}
            others = {axis: max(part[0].get(axis, 0.0) for part in parts) for axis in axes}
            gathers, reduces, optimizer = (max(column) for column in zip(*(part[1:] for part in parts), strict=True))
            self._sums[key] = others, gathers, reduces, optimizer
        return self._sums[key]

    def _stage_parameters(self, spec: JobSpec, index: int) -> tuple[dict[Axis, float], float, float, float]:
        others: dict[Axis, float] = defaultdict(float)
        if self.stacks.of(spec).frozen:
            return others, 0.0, 0.0, 0.0
        gathers, reduces, late = 0.0, 0.0, 1.0
        if self._sums_late(spec):
            late = FP32_BYTES / get_mixed_precision(spec.train.precision).gradient_bytes / spec.train.micro_batches
        for row in step_end_traffic(spec, index):
            seconds = self._row_seconds(spec, self._cast(spec, row), self._ranks_at_work(spec))
            if row.axis != "dp":
                others[row.axis] += seconds
            elif row.op == "all_gather":
                gathers += seconds
            else:
                reduces += seconds * late
        return dict(others), gathers, reduces, self._optimizer(spec, index)

    def _cast(self, spec: JobSpec, row: Collective) -> Collective:
        """As the stack sends it."""
        mix, stack = get_mixed_precision(spec.train.precision), self.stacks.of(spec)
        if stack.sums_whole and row.axis == "dp" and row.op != "all_gather":
            return row._replace(op="all_reduce", payload_bytes=row.payload_bytes * FP32_BYTES // mix.gradient_bytes)
        narrow = {"tp": stack.narrow_gathers, "dp": stack.narrow_parameters}.get(row.axis, False)
        if not narrow or mix.gemm != "fp8" or row.op != "all_gather":
            return row
        return row._replace(payload_bytes=row.payload_bytes * FP8_BYTES // mix.compute_bytes)

    def _sums_late(self, spec: JobSpec) -> bool:
        return spec.layout.zero >= 2 and self.stacks.of(spec).sums_late

    def _dispatched(self, spec: JobSpec, row: Collective) -> float:
        """Share of what `ours` sends to experts that the stack sends."""
        moe, layout, stack = spec.model.moe, spec.layout, self.stacks.of(spec)
        if moe is None or not stack.divides_dispatch:
            return 1.0
        top, part = moe.experts_per_token, 1 / (layout.tp if layout.sequence_parallel else 1)
        if not stack.shares_dispatch:
            return part
        nodes = self._span(spec, row).nodes
        places = nodes if nodes > 1 else row.group_size
        reached = places * (1 - (1 - 1 / places) ** top)  # of them, by `top` even choices
        return min(reached, top) / top * part

    def _together_s(self, spec: JobSpec, rows: Iterable[Collective], ranks: int) -> float:
        return sum(self._row_seconds(spec, row, ranks) for row in rows)

    def _row_seconds(self, spec: JobSpec, row: Collective, ranks: int) -> float:
        place = self._span(spec, row)
        if self.calibration is not None and row.count and place.nodes == 1:  # one host was measured
            each = self.calibration.collective_s(row.op, row.group_size, row.payload_bytes / row.count, ranks)
            if each is not None:
                return row.count * each
        seconds = row.count * compute_collective_seconds(row.op, row.payload_bytes / row.count, place, self.cluster)
        return seconds / self.stacks.of(spec).links

    def _span(self, spec: JobSpec, row: Collective) -> NodeSpan:
        return get_node_span(row.group_size, row.stride, self.cluster.per_node, spec.layout.world_size)

    def _optimizer(self, spec: JobSpec, index: int) -> float:
        if self.calibration is not None:
            measured = self.calibration.optimizer_s(held_parameters(spec, index), self._ranks_at_work(spec))
            if measured is not None:
                return measured
        moved = get_mixed_precision(spec.train.precision).update_bytes * held_parameters(spec, index)
        host_s = self.stacks.of(spec).tensor_s * count_tensors(spec, index)
        return compute_kernel_seconds(MemoryKernel(moved), self.cluster.accelerator, "fp32", FP32_BYTES) + host_s

    def _exposed_dp(self, spec: JobSpec, pace: Pace, gathers: float, reduces: float) -> float:
        """Gradient sums hide behind backward, gathers behind forward: of one micro-batch, of all of them where ZeRO
        repeats them. The first gather and the last sum have nothing to hide behind."""
        idle = self._waits_inside(spec, pace) + pace.halves.launch_s
        halves = scaled(pace, 1 + idle / pace.halves.total_s).halves
        if not spec.train.overlap or self.cluster.device == "cpu":  # a CPU's ranks send with the cores they compute on
            return gathers + reduces
        stack = self.stacks.of(spec)
        m, zero, repeats = spec.train.micro_batches, spec.layout.zero, _gathers_each_time(spec.layout)
        backward = halves.total_s - halves.forward_s
        units = max(1, spec.model.num_layers // spec.layout.pp)
        again = gathers / 2 if repeats else 0.0
        if spec.layout.keep_gathered:  # all chunks but one twice
            again = gathers * (1 - spec.layout.virtual_stages / (2 * spec.layout.virtual_stages - 1))
        reduced = reduces + again
        forward_room = halves.forward_s * (m if repeats else 1)
        backward_room = backward * (m if zero >= 2 else 1)
        hides = stack.hidden.get("dp", 1.0)
        forward_room, backward_room = forward_room * hides, backward_room * hides
        first, last = (gathers - again) / units, reduces / units
        if zero >= 2:
            first, last = first / m if repeats else first, last / m
        if stack.sums_chunks and zero <= 1 and spec.layout.virtual_stages > 1:
            exposed = in_turns(spec, gathers, halves.forward_s, own=True) + in_turns(spec, reduces, backward, own=False)
            return exposed + stack.contention * (gathers + reduces - exposed)
        if self._sums_late(spec):  # beside the last micro-batch's backward alone
            late = reduces + again / m - backward_room / m
            exposed = max(0.0, (again - backward_room) * (1 - 1 / m)) + max(reduces / units, late)
        else:
            exposed = max(last, reduced - backward_room)
        exposed += max(first, gathers - again - forward_room)
        return exposed + stack.contention * max(0.0, gathers + reduces - exposed)

    def _waits_inside(self, spec: JobSpec, pace: Pace) -> float:
        """What compute waits for inside a node, where sums and gathers leave it: they go on meanwhile."""
        if not self._crosses(spec, "dp"):
            return 0.0
        inside: list[Axis] = ["tp", "cp", "ep"]
        return sum(pace.waits.get(axis, 0.0) for axis in inside if not self._crosses(spec, axis))

    def _crosses(self, spec: JobSpec, axis: Axis) -> bool:
        group = get_axis_group(spec.layout, axis)
        return get_node_span(group.size, group.stride, self.cluster.per_node, spec.layout.world_size).nodes > 1

    def _straggling(self, spec: JobSpec, seconds: float) -> float:
        """What a step waits for the slowest of its nodes."""
        nodes = -(-spec.layout.world_size // get_filled_per_node(spec.layout.world_size, self.cluster.per_node))
        stack = self.stacks.of(spec)
        return stack.step_s + seconds * stack.jitter * math.log2(nodes)


def _gathers_each_time(layout: Layout) -> bool:
    """Whether each micro-batch gathers the parameters anew."""
    return layout.zero == 3 and not layout.keep_gathered
