"""The time of a step: kernels, exposed collectives, pipeline bubbles, and the optimizer.

Per micro-batch a stage computes its layers and waits for their tensor, context, and expert collectives. The schedule
adds a bubble. Compute overlaps gradient reductions and weight gathers as far as it reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache

from contracts.telemetry.items import Axis
from planner.cost.compute import ComputeTimer
from planner.cost.learning import Correction, RunGroup, find_correction, get_run_group, scale_to_measured
from planner.cost.pipeline_simulation import simulate, stretch_timeline
from planner.cost.resolved_plan import ResolvedPlan, resolve
from planner.cost.stage_time import (
    Pace,
    ParameterTimes,
    StageParts,
    StageTimer,
    Timing,
    average_parts,
    compute_bubble,
    compute_fill_share,
    compute_interleaved_exposure,
    get_micro_batch_s,
    scale_pace,
    scale_timing,
    slow_down,
)
from planner.facts.model_shapes import compute_model_flops
from planner.facts.resources import StackName
from planner.facts.spec import JobSpec, ModelSpec
from planner.hardware.calibration import Calibration, interpolate
from planner.hardware.cluster import Accelerator, Cluster, get_filled_per_node
from planner.hardware.stack_options import Stacks
from planner.hardware.stacks import OURS_ON_CPU, STACKS, Stack, compute_hardware_flops

Planned = JobSpec | ResolvedPlan
MAX_RECENT_PLANS = 8  # whose times a timer keeps


def get_step_timing(spec: Planned, cluster: Cluster) -> Timing:
    """Return the time of one optimizer step of the slowest rank."""
    return Timer(cluster).get_step(spec)


class Timer:
    """Predicts step times on one cluster. Not for use by several threads."""

    def __init__(self, cluster: Cluster, stacks: Mapping[StackName, Stack] = STACKS) -> None:
        self.cluster = cluster
        if cluster.profile:  # the profile was measured with the host's software, so no stack changes it
            stacks = {name: Stack(stack.title, stack.time_margin) for name, stack in stacks.items()}
        elif cluster.device == "cpu":
            stacks = {**stacks, "ours": OURS_ON_CPU, "unknown": OURS_ON_CPU}
        is_measured = cluster.profile is not None
        compiles = not is_measured and cluster.device != "cpu"
        self.stacks = Stacks(stacks, cluster.per_node, measured=is_measured, compiles=compiles)
        self.calibration = Calibration(cluster.profile) if cluster.profile else None
        self._compute = ComputeTimer(cluster.accelerator, self.stacks, self.calibration)
        self._get_step = lru_cache(maxsize=MAX_RECENT_PLANS)(self._create_step)
        self._get_correction = lru_cache(maxsize=None)(self._compute_correction)

    def _create_step(self, plan: ResolvedPlan) -> _StepTimer:
        return _StepTimer(StageTimer(plan, self.cluster, self._compute))

    def get_step(self, spec: Planned) -> Timing:
        """Return the time of one optimizer step, corrected by measured steps or runs on the cluster."""
        plan = resolve(spec)
        found, timing = self.get_correction(plan), self.predict(plan)
        return timing if found is None else scale_timing(timing, found.ratio)

    def get_correction(self, spec: Planned) -> Correction | None:
        """Return the correction from the user's measured steps, or from comparable runs on the cluster."""
        return self._get_correction(spec.model, get_run_group(spec))

    def _compute_correction(self, model: ModelSpec, group: RunGroup) -> Correction | None:
        if steps := [step for step in self.cluster.measured_steps if step.spec.resources.stack == group.stack]:
            return scale_to_measured([step.step_s / self.predict(step.spec).step_s for step in steps])
        found = find_correction(model, group, self.cluster.runs, lambda run: self.predict(run).step_s)
        if found is not None and found.has_other_sizes and self.calibration is not None:
            return None  # the calibration already measured how ranks share cores
        return found

    def predict(self, spec: Planned) -> Timing:
        """Return the time of one optimizer step without correction."""
        step = self._get_step(resolve(spec))
        return slow_down(step.alone, step.core_sharing, keeps_exposed=self.cluster.link_runs > 0)

    def get_rank_mean(self, spec: Planned) -> Timing:
        """Return the mean time of all ranks, which is what jobs measure.

        Waits for the slowest stage count as pp, except for the bubble of a schedule with equal stages.
        """
        plan = resolve(spec)
        whole = self.get_step(plan)
        if plan.layout.pp == 1:
            return whole
        step = self._get_step(plan)
        averaged = slow_down(step.average(), step.core_sharing, keeps_exposed=self.cluster.link_runs > 0)
        return scale_timing(averaged, whole.step_s / averaged.step_s)

    def get_relative_stages(self, spec: Planned, first: int) -> list[float]:
        """Return the micro-batch time of the `first` stages, relative to the slowest of all stages."""
        stages = self._get_step(resolve(spec)).stages
        slowest = stages.get_pace(stages.ranks).micro_batch_s
        return [get_micro_batch_s(stages.get_stage(index, stages.ranks)) / slowest for index in range(first)]

    def get_accelerator(self, spec: Planned) -> Accelerator:
        """Return the accelerator at the rates that the spec's stack reaches."""
        return self._compute.get_software(resolve(spec)).accelerator

    def get_peak_flops(self, spec: Planned) -> float:
        """Return the FLOP/s of the fastest matmul type of the spec."""
        return self._get_step(resolve(spec)).peak_flops


class _StepTimer:
    """The step time of one plan without correction."""

    def __init__(self, stages: StageTimer) -> None:
        self.stages, self.plan, self._stack = stages, stages.plan, stages.stack
        self._cluster, self._calibration = stages.cluster, stages.calibration

    @cached_property
    def peak_flops(self) -> float:
        """FLOP/s of the fastest matmul type. Emulated fp8 is slower than bf16."""
        gemm, accelerator = self.plan.mix.gemm, self.stages.software.accelerator
        return max(accelerator.get_peak_flops(gemm), accelerator.get_peak_flops("bf16" if gemm == "fp8" else gemm))

    @cached_property
    def core_sharing(self) -> float:
        """How many times longer a step takes because ranks share cores. A calibration includes this."""
        cores, ranks = self._cluster.cores, self.stages.ranks
        if cores is None or self._calibration is not None:
            return 1.0
        return max(1.0, ranks * (1 - self.alone.bubble_s / self.alone.step_s) / cores)

    @cached_property
    def alone(self) -> Timing:
        """The step with one core per rank: the slowest stage, with the pipeline filling and draining."""
        pace, bubble = self._pace_and_bubble
        parts = self._get_parts(pace, self.stages.slowest_parameters)
        total = parts.total_s + bubble
        if straggling := self._get_straggling(total):
            parts.exposed_s["world"] = parts.exposed_s.get("world", 0.0) + straggling
            total += straggling
        spec = self.plan.spec
        model, hardware = compute_model_flops(spec), compute_hardware_flops(spec)
        peak = spec.layout.world_size * self.peak_flops * total
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

    def average(self) -> Timing:
        """Return the mean over all stages. Waits for the slowest stage count as pp."""
        pp = self.plan.layout.pp
        slowest, (pace, idle) = self.alone, self._pace_and_bubble
        mean = average_parts(self._weigh_stages(pace))
        exposed = {**mean.exposed_s, "world": slowest.exposed_s.get("world", 0.0)}
        rest = slowest.step_s - mean._replace(exposed_s=exposed).total_s
        even = idle * (pace.once_s - pace.once_s / pp) / (pace.once_s - pace.micro_batch_s)
        bubble = max(0.0, min(even, rest))
        exposed["pp"] = exposed.get("pp", 0.0) + rest - bubble
        parts = mean._replace(exposed_s={axis: seconds for axis, seconds in exposed.items() if seconds})
        return slowest._replace(**parts._asdict(), bubble_s=bubble)

    def _weigh_stages(self, slowest: Pace) -> Iterator[tuple[float, StageParts]]:
        """Yield (share of all stages, parts) of each different stage, slowed by shared cores like the slowest one."""
        stages, pp = self.stages, self.plan.layout.pp
        each = stages.ranks if self._calibration is None else max(1, stages.ranks // pp)
        times = slowest.micro_batch_s / stages.get_pace(each).micro_batch_s
        for group in self.plan.partition.equal_stages:
            stage = stages.get_stage(group[0], each)
            own = scale_pace(Pace(*stage, get_micro_batch_s(stage), slowest.once_s / times), times)
            yield len(group) / pp, self._get_parts(own, stages.get_parameters(group[0]))

    def _get_parts(self, pace: Pace, parameters: ParameterTimes) -> StageParts:
        m, halves = self.plan.train.micro_batches, pace.seconds
        exposed = {axis: m * seconds for axis, seconds in pace.waits.items()}
        if "pp" in exposed and self._stack.overlaps_sends and self.plan.layout.virtual_stages > 1:
            exposed["pp"] *= compute_fill_share(self.plan)
        for axis, seconds in parameters.others_s.items():
            exposed[axis] = exposed.get(axis, 0.0) + seconds
        if parameters.gathers_s or parameters.reduces_s:
            exposed["dp"] = self._get_exposed_dp(pace, parameters.gathers_s, parameters.reduces_s)
        return StageParts(
            compute_s=m * (halves.total_s - halves.recompute_s),
            recompute_s=m * halves.recompute_s,
            exposed_s=exposed,
            launch_s=m * halves.launch_s,
            optimizer_s=parameters.optimizer_s,
            forward_s=halves.forward_s,
            backward_input_s=halves.backward_input_s + halves.recompute_s,
            backward_weight_s=halves.backward_weight_s,
        )

    @cached_property
    def _pace_and_bubble(self) -> tuple[Pace, float]:
        """The slowest stage and its idle seconds. On shared cores a stage runs faster while others idle."""
        plan, ranks, pp = self.plan, self.stages.ranks, self.plan.layout.pp
        if self._calibration is None or pp == 1:
            pace = self.stages.get_pace(ranks)
            return pace, compute_bubble(plan, pace)
        each = max(1, ranks // pp)
        alone = self.stages.get_pace(each)
        forward = alone.seconds.forward_s / alone.seconds.total_s * alone.micro_batch_s
        weights = alone.seconds.backward_weight_s / alone.seconds.total_s * alone.micro_batch_s
        chunks, m = plan.layout.virtual_stages, plan.train.micro_batches
        timeline = simulate(
            plan.layout,
            m,
            forward_s=forward / chunks,
            inputs_s=(alone.micro_batch_s - forward - weights) / chunks,
            weights_s=weights / chunks,
            slowdowns=[get_micro_batch_s(self.stages.get_stage(i, each)) / alone.micro_batch_s for i in range(pp)],
        )
        slowdown = [self._get_slowdown(each, stages * each) for stages in range(1, pp + 1)]
        together = stretch_timeline(timeline, slowdown)
        busy = max(together.busy_s)
        return scale_pace(alone, busy / (m * alone.micro_batch_s)), together.step_s - busy

    def _get_slowdown(self, few: int, many: int) -> float:
        """Return how many times longer `many` active ranks take than `few`, interpolated between measured numbers."""
        assert self._calibration is not None
        points = [(n, self.stages.get_pace(n).micro_batch_s) for n in self._calibration.counts if n >= few]
        return (interpolate(many, points) or 1.0) / self.stages.get_pace(few).micro_batch_s

    def _get_exposed_dp(self, pace: Pace, gathers: float, reduces: float) -> float:
        """Return the exposed seconds of dp: reductions overlap with backward, gathers with forward.

        They overlap with one micro-batch, or with all of them if ZeRO repeats them. The first gather and the last
        reduction are always exposed.
        """
        idle = self._get_waits_inside_node(pace) + pace.seconds.launch_s
        halves = scale_pace(pace, 1 + idle / pace.seconds.total_s).seconds
        if not self.plan.train.overlap or self._cluster.device == "cpu":  # CPU ranks send with their compute cores
            return gathers + reduces
        stack, layout = self._stack, self.plan.layout
        m, zero, repeats = self.plan.train.micro_batches, layout.zero, layout.zero == 3 and not layout.keep_gathered
        backward = halves.total_s - halves.forward_s
        units = max(1, self.plan.model.num_layers // layout.pp)
        again = gathers / 2 if repeats else 0.0
        if layout.keep_gathered:  # each chunk but one is gathered twice
            again = gathers * (1 - layout.virtual_stages / (2 * layout.virtual_stages - 1))
        reduced = reduces + again
        forward_room = halves.forward_s * (m if repeats else 1)
        backward_room = backward * (m if zero >= 2 else 1)
        hides = stack.overlap.get("dp", 1.0)
        forward_room, backward_room = forward_room * hides, backward_room * hides
        first, last = (gathers - again) / units, reduces / units
        if zero >= 2:
            first, last = first / m if repeats else first, last / m
        if stack.reduces_by_chunk and zero <= 1 and layout.virtual_stages > 1:
            exposed = compute_interleaved_exposure(self.plan, gathers, halves.forward_s, overlaps_own=True)
            exposed += compute_interleaved_exposure(self.plan, reduces, backward, overlaps_own=False)
            return exposed + stack.contention * (gathers + reduces - exposed)
        exposed = max(last, reduced - backward_room)
        exposed += max(first, gathers - again - forward_room)
        return exposed + stack.contention * max(0.0, gathers + reduces - exposed)

    def _get_waits_inside_node(self, pace: Pace) -> float:
        """Return the waits inside a node, if dp crosses nodes: its collectives continue during these waits."""
        if not self.stages.crosses_nodes("dp"):
            return 0.0
        inside: list[Axis] = ["tp", "cp", "ep"]
        return sum(pace.waits.get(axis, 0.0) for axis in inside if not self.stages.crosses_nodes(axis))

    def _get_straggling(self, seconds: float) -> float:
        """Return the seconds that a step waits for its slowest node."""
        world = self.plan.layout.world_size
        nodes = -(-world // get_filled_per_node(world, self._cluster.per_node))
        return self._stack.step_s + seconds * self._stack.jitter * math.log2(nodes)
