"""The planner's answer to each published row. Nothing is fitted here."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.published.beside import eager_bytes, frozen_bytes, kempner_bytes, own_bytes
from benchmarks.published.mapping import Planned, plan_of
from benchmarks.published.rows import PublishedRow, SkipError
from benchmarks.published.said import Said, Speaker
from planner.cost.estimate import compute_allowance
from planner.cost.memory import get_max_bytes, get_memory
from planner.cost.resolved_plan import resolve
from planner.cost.timing import Timer
from planner.facts.model_shapes import compute_model_flops
from planner.facts.spec import JobSpec, Recompute

UNASKED = "neither a step nor a peak"


class Answer(NamedTuple):
    """Prediction and measurement in the row's unit: seconds, bytes; of what ran out of memory seconds, and 0.

    `said`: what a page says, of a step or a peak, that is told what a spec can tell; else why not. `alone`: of a step,
    what it says where the spec names the row's stack and no more of its software.
    """

    row: PublishedRow
    planned: Planned
    predicted: float
    measured: float
    fits: bool
    said: Said | str = UNASKED
    alone: Said | str = UNASKED

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Predictor:
    """Keeps one timer for each cluster and stack."""

    def __init__(self) -> None:
        self._timers: dict[tuple[str, str], Timer] = {}
        self._speaker = Speaker()

    def answer(self, row: PublishedRow) -> Answer:
        """What the planner says of the row.

        Raises:
            SkipError: with the reason.
        """
        planned = plan_of(row)
        spec = planned.spec
        if planned.usual_recompute:
            spec = self._usual_recompute(planned)
            planned = planned._replace(spec=spec)
        needed = self._needed(planned, spec)
        fits = needed <= _room(planned) or (planned.any_recompute and self._fits_somehow(planned))
        again = _recomputing(spec, "selective") if planned.makes_again else spec
        if row.kind == "out_of_memory":
            return Answer(row, planned, self._seconds(planned, again) if fits else 0.0, 0.0, fits)
        if row.kind == "time":
            seconds = self._seconds(planned, again)
            said = self._said(row, planned)
            alone = self._said(row, planned, stack_alone=True)
            return Answer(row, planned, seconds, _measured_seconds(row, spec), fits, said, alone)
        if row.kind == "steady":
            return Answer(row, planned, _steady(planned, spec.layout.pp - 1), row.num_bytes, fits)
        peak = _tensors(spec, planned.stage) + eager_bytes(planned, spec) + kempner_bytes(planned, spec)
        peak += sum(own_bytes(planned))
        told = {"device": needed, "reserved": peak * (1 + planned.cluster.accelerator.fragmentation), "allocated": peak}
        return Answer(row, planned, told[planned.meter], row.num_bytes, fits, self._said(row, planned))

    def _said(self, row: PublishedRow, planned: Planned, *, stack_alone: bool = False) -> Said | str:
        try:
            if row.kind == "time":
                return self._speaker.of_step(row, planned, stack_alone=stack_alone)
            return self._speaker.of_peak(row, planned)
        except SkipError as reason:
            return str(reason)

    def _fits_somehow(self, planned: Planned) -> bool:
        """Where a recipe's recompute is not told, with as much of it as there is."""
        return self._needed(planned, _recomputing(planned.spec, "full")) <= _room(planned)

    def _usual_recompute(self, planned: Planned) -> JobSpec:
        """Where a recipe is not told: whole layers only where ZeRO-3 would not fit otherwise. Recipes with other axes
        repeat single modules at most."""
        light = _recomputing(planned.spec, "selective")
        if planned.spec.layout.zero < 3 or self._needed(planned, light) <= _room(planned):
            return light
        return _recomputing(planned.spec, "full")

    def _seconds(self, planned: Planned, spec: JobSpec) -> float:
        key = planned.cluster.model_dump_json(), repr(planned.kernels)
        if key not in self._timers:
            self._timers[key] = Timer(planned.cluster, {planned.stack: planned.kernels})
        timer = self._timers[key]
        return timer.get_step(spec).step_s * planned.scale

    def _needed(self, planned: Planned, spec: JobSpec) -> float:
        tensors = _tensors(spec, None) + eager_bytes(planned, spec) + kempner_bytes(planned, spec)
        tensors -= frozen_bytes(planned, spec)
        return tensors + compute_allowance(spec, planned.cluster, tensors)


def _recomputing(spec: JobSpec, policy: Recompute) -> JobSpec:
    return spec.model_copy(update={"layout": spec.layout.model_copy(update={"recompute": policy})})


def _room(planned: Planned) -> int:
    return planned.cluster.accelerator.memory_bytes


def _tensors(spec: JobSpec, stage: int | None) -> int:
    if stage is not None:
        return sum(get_memory(spec, stage).values())
    plan = resolve(spec)
    plan = resolve(spec)
    return max(get_max_bytes(plan, stages) for stages in plan.partition.equal_stages)


def _steady(planned: Planned, stage: int) -> float:
    """What stays between steps: weights, gradients and moments as the stack keeps them (1910.02054 figure 1), and what
    a pipe's chunks were sent last."""
    parts = get_memory(planned.spec, stage)
    return sum(parts[name] for name in ("parameters", "gradients", "optimizer", "buffers")) + own_bytes(planned).steady


def _measured_seconds(row: PublishedRow, spec: JobSpec) -> float:
    seconds = row.seconds
    if seconds is None and row.fields["measure_name"] == "model_tflops_per_gpu":
        # By the page's own formula, in which attention is not halved (NeMo's flops_formulas.py), as here.
        seconds = compute_model_flops(spec) / (row.value * 1e12 * spec.layout.world_size)
    if not seconds or seconds <= 0:
        raise SkipError("no step time")
    return seconds
