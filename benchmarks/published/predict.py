"""Predict the published rows without a fit of constants."""

from __future__ import annotations

import re
from typing import NamedTuple

from benchmarks.published.extra_memory import (
    compute_eager_bytes,
    compute_frozen_bytes,
    compute_kempner_bytes,
    compute_megatron_memory,
)
from benchmarks.published.mapping import MappedRow, map_row
from benchmarks.published.megatron_tests import OVERLAPS_EXPERTS, SENDS_TO_ALL, get_test_graphs
from benchmarks.published.recipes import get_cuda_graphs, overlaps_experts, uses_all_to_all, uses_flash_attention_2
from benchmarks.published.recompute import find_recompute
from benchmarks.published.rows import PublishedRow, SkipError
from benchmarks.published.software import get_attention_kernel, is_flash_attention_1
from planner.cost.estimate import compute_allowance, get_rank_memory
from planner.cost.learning import compute_memory_interval, compute_time_interval
from planner.cost.memory import get_max_bytes, get_memory
from planner.cost.resolved_plan import resolve
from planner.cost.timing import Timer
from planner.facts.model_shapes import compute_model_flops
from planner.facts.resources import SoftwareSpec
from planner.facts.spec import JobSpec, Recompute
from planner.hardware.stack_options import HOST_MARGINS

NOT_ESTIMATED = "neither a step nor a peak"


class RowPrediction(NamedTuple):
    """Prediction and measurement of a row in seconds or bytes. For out-of-memory rows, seconds and 0.

    `said` is the estimate of a page with all facts that a spec can have, or the reason why there is none. `alone` is
    the estimate of a step with a spec that names only the stack.
    """

    row: PublishedRow
    planned: MappedRow
    predicted: float
    measured: float
    fits: bool
    said: PageEstimate | str = NOT_ESTIMATED
    alone: PageEstimate | str = NOT_ESTIMATED

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class Predictor:
    """Predict rows, with one timer per cluster and stack."""

    def __init__(self) -> None:
        self._timers: dict[tuple[str, str], Timer] = {}
        self._speaker = PageEstimator()

    def predict(self, row: PublishedRow) -> RowPrediction:
        """Return the prediction for a row.

        Raises:
            SkipError: The planner does not support the row. The error has the reason.
        """
        planned = map_row(row)
        spec = planned.spec
        if planned.usual_recompute:
            spec = self._apply_usual_recompute(planned)
            planned = planned._replace(spec=spec)
        needed = self._predict_peak_bytes(planned, spec)
        fits = needed <= _get_capacity_bytes(planned) or (
            planned.any_recompute and self._fits_with_any_recompute(planned)
        )
        again = _replace_recompute(spec, "selective") if planned.makes_again else spec
        if row.kind == "out_of_memory":
            return RowPrediction(row, planned, self._predict_s(planned, again) if fits else 0.0, 0.0, fits)
        if row.kind == "time":
            seconds = self._predict_s(planned, again)
            output = self._estimate_on_page(row, planned)
            alone = self._estimate_on_page(row, planned, stack_alone=True)
            return RowPrediction(row, planned, seconds, _get_measured_s(row, spec), fits, output, alone)
        if row.kind == "steady":
            return RowPrediction(row, planned, _compute_steady_bytes(planned, spec.layout.pp - 1), row.num_bytes, fits)
        peak = (
            _compute_tensor_bytes(spec, planned.stage)
            + compute_eager_bytes(planned, spec)
            + compute_kempner_bytes(planned, spec)
        )
        peak += sum(compute_megatron_memory(planned))
        result = {
            "device": needed,
            "reserved": peak * (1 + planned.cluster.accelerator.fragmentation),
            "allocated": peak,
        }
        return RowPrediction(
            row, planned, result[planned.meter], row.num_bytes, fits, self._estimate_on_page(row, planned)
        )

    def _estimate_on_page(
        self, row: PublishedRow, planned: MappedRow, *, stack_alone: bool = False
    ) -> PageEstimate | str:
        try:
            if row.kind == "time":
                return self._speaker.estimate_step(row, planned, stack_alone=stack_alone)
            return self._speaker.estimate_peak(row, planned)
        except SkipError as reason:
            return str(reason)

    def _fits_with_any_recompute(self, planned: MappedRow) -> bool:
        """Return True if the row fits with full recompute, when its recompute is unknown."""
        return self._predict_peak_bytes(planned, _replace_recompute(planned.spec, "full")) <= _get_capacity_bytes(
            planned
        )

    def _apply_usual_recompute(self, planned: MappedRow) -> JobSpec:
        """Set full recompute if the recipe is unknown and ZeRO-3 does not fit otherwise.

        Recipes with other axes recompute at most single modules.
        """
        light = _replace_recompute(planned.spec, "selective")
        if planned.spec.layout.zero < 3 or self._predict_peak_bytes(planned, light) <= _get_capacity_bytes(planned):
            return light
        return _replace_recompute(planned.spec, "full")

    def _predict_s(self, planned: MappedRow, spec: JobSpec) -> float:
        key = planned.cluster.model_dump_json(), repr(planned.kernels)
        if key not in self._timers:
            self._timers[key] = Timer(planned.cluster, {planned.stack: planned.kernels})
        timer = self._timers[key]
        return timer.get_step(spec).step_s * planned.scale

    def _predict_peak_bytes(self, planned: MappedRow, spec: JobSpec) -> float:
        tensors = (
            _compute_tensor_bytes(spec, None)
            + compute_eager_bytes(planned, spec)
            + compute_kempner_bytes(planned, spec)
        )
        tensors -= compute_frozen_bytes(planned, spec)
        return tensors + compute_allowance(spec, planned.cluster, tensors)


def _replace_recompute(spec: JobSpec, policy: Recompute) -> JobSpec:
    return spec.model_copy(update={"layout": spec.layout.model_copy(update={"recompute": policy})})


def _get_capacity_bytes(planned: MappedRow) -> int:
    return planned.cluster.accelerator.memory_bytes


def _compute_tensor_bytes(spec: JobSpec, stage: int | None) -> int:
    if stage is not None:
        return sum(get_memory(spec, stage).values())
    plan = resolve(spec)
    plan = resolve(spec)
    return max(get_max_bytes(plan, stages) for stages in plan.partition.equal_stages)


def _compute_steady_bytes(planned: MappedRow, stage: int) -> float:
    """Return bytes between steps: weights, gradients, moments (1910.02054 figure 1), and PP messages."""
    parts = get_memory(planned.spec, stage)
    return (
        sum(parts[name] for name in ("parameters", "gradients", "optimizer", "buffers"))
        + compute_megatron_memory(planned).steady
    )


def _get_measured_s(row: PublishedRow, spec: JobSpec) -> float:
    seconds = row.seconds
    if seconds is None and row.fields["measure_name"] == "model_tflops_per_gpu":
        # By the page's own formula, in which attention is not halved (NeMo's flops_formulas.py), as here.
        seconds = compute_model_flops(spec) / (row.value * 1e12 * spec.layout.world_size)
    if not seconds or seconds <= 0:
        raise SkipError("no step time")
    return seconds


class PageEstimate(NamedTuple):
    """Predicted seconds or bytes, their margin of error, and the share of a step that waits for the host.

    `has_software_facts`: the spec has all known facts of the software.
    """

    predicted: float
    share: float
    host_share: float = 0.0
    has_software_facts: bool = False

    @property
    def software_level(self) -> str:
        """Number of facts of the software in the spec."""
        return "software in spec" if self.has_software_facts else "only the stack"

    @property
    def host_wait_level(self) -> str:
        """Class of `HOST_WITHIN` of the step."""
        least = next((least for least, _ in HOST_MARGINS if self.host_share >= least), None)
        return "no wait for host" if least is None else f"waits {least:.1%} or more for host"


class PageEstimator:
    """Estimate rows, with one timer per cluster."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def estimate_step(self, row: PublishedRow, planned: MappedRow, *, stack_alone: bool = False) -> PageEstimate:
        """Estimate a row with a time. `stack_alone`: the spec names only the stack.

        Raises:
            SkipError: No spec describes the row.
        """
        spec, cluster, software = build_page_spec(row, planned), planned.cluster, build_software(row, planned)
        if not stack_alone:
            spec = replace_software(spec, software)
        elif software is not None and software.nvfp4:
            raise SkipError("no stack alone says fp4")
        timer = self._timers.setdefault(cluster.model_dump_json(), Timer(cluster))
        timing = timer.get_step(spec)
        result = spec.resources.software is not None
        share = compute_time_interval(cluster, spec, None, timing.host_share)["share"]
        return PageEstimate(timing.step_s * planned.scale, share, timing.host_share, result)

    def estimate_peak(self, row: PublishedRow, planned: MappedRow) -> PageEstimate:
        """Estimate a row with a peak memory, with the meter of the row.

        Raises:
            SkipError: No spec describes the row.
        """
        spec, cluster = build_page_spec(row, planned), planned.cluster
        stages = range(spec.layout.pp) if planned.stage is None else [planned.stage]
        parts = max((get_rank_memory(spec, stage, cluster) for stage in stages), key=lambda parts: sum(parts.values()))
        whole = sum(parts.values())
        tensors = whole - parts["allowance"]
        held = tensors * (1 + cluster.accelerator.fragmentation)
        predicted = {"device": whole, "reserved": round(held), "allocated": tensors}[planned.meter]
        return PageEstimate(predicted, compute_memory_interval(cluster, spec, None, predicted)["share"])


def build_page_spec(row: PublishedRow, planned: MappedRow) -> JobSpec:
    """Return the spec of a row without its software. Recompute applies to all layers or none.

    Raises:
        SkipError: No spec describes the row.
    """
    if row.has_adapters:
        raise SkipError("a spec has no adapters with frozen weights")
    spec = planned.spec
    layout = spec.layout
    if planned.makes_again:
        layout = layout.model_copy(update={"recompute": "selective"})
    elif (repeated := find_recompute(row)) and 0 < repeated.layers < 0.5:
        layout = layout.model_copy(update={"recompute": "none"})
    resources = spec.resources.model_copy(update={"device": planned.cluster.device, "stack": planned.stack})
    return spec.model_copy(update={"layout": layout, "resources": resources})


def build_software(row: PublishedRow, planned: MappedRow) -> SoftwareSpec | None:
    """Return the facts of the software that a spec can have, or None if there are none."""
    if planned.stack == "scaling":
        return _build_scaling_software(row)
    if planned.stack != "megatron":
        return None
    if planned.own_tests:
        return SoftwareSpec(
            cuda_graphs=get_test_graphs(planned.text),
            deterministic=True,
            dispatcher="alltoall" if planned.spec.model.moe and re.search(SENDS_TO_ALL, planned.text) else "flex",
            overlap_experts=planned.spec.model.moe is not None
            and re.search(OVERLAPS_EXPERTS, planned.text) is not None,
        )
    return SoftwareSpec(
        cuda_graphs=get_cuda_graphs(row),
        dispatcher="alltoall" if uses_all_to_all(row) else "flex",
        overlap_experts=planned.spec.model.moe is not None and overlaps_experts(row),
        attention_kernel="flash_2" if uses_flash_attention_2(row) else "own",
        nvfp4="fp4" in row.text("precision").lower(),
    )


def _build_scaling_software(row: PublishedRow) -> SoftwareSpec | None:
    kernel = get_attention_kernel(row)
    if not kernel:
        return None
    return SoftwareSpec(
        attention_kernel="eager"
        if kernel.startswith("torch")
        else "flash_1"
        if is_flash_attention_1(kernel)
        else "own",
        fused_norms="rms kernel" in kernel,
    )


def replace_software(spec: JobSpec, software: SoftwareSpec | None) -> JobSpec:
    resources = spec.resources.model_copy(update={"software": software})
    return spec.model_copy(update={"resources": resources})
