"""What a user's page says of a published row, whose spec says what it can of the row's software, or only its stack."""

from __future__ import annotations

import re
from typing import NamedTuple

from benchmarks.published.mapping import Planned
from benchmarks.published.own_tests import OVERLAPS_EXPERTS, SENDS_TO_ALL, graphs_of_test
from benchmarks.published.recipes import graphs_of, overlaps_experts, runs_flash_2, sends_to_all
from benchmarks.published.repeated import repeated_by
from benchmarks.published.rows import PublishedRow, SkipError
from benchmarks.published.software import attention_kernel, is_flash_1
from planner.cost.estimate import get_rank_memory
from planner.cost.learning import compute_memory_interval, compute_time_interval
from planner.cost.timing import Timer
from planner.facts.resources import SoftwareSpec
from planner.facts.spec import JobSpec
from planner.hardware.stack_options import HOST_MARGINS


class Said(NamedTuple):
    """Seconds or bytes as predicted for the row's spec, how far off they are told to be, and of a step the share that
    the device waits for its host. `told`: the spec says what is known of its software."""

    predicted: float
    share: float
    host_share: float = 0.0
    told: bool = False

    @property
    def known(self) -> str:
        """How much of the software its spec says."""
        return "software in spec" if self.told else "only the stack"

    @property
    def waits(self) -> str:
        """Which of `HOST_WITHIN` the step falls under."""
        least = next((least for least, _ in HOST_MARGINS if self.host_share >= least), None)
        return "no wait for host" if least is None else f"waits {least:.1%} or more for host"


class Speaker:
    """Keeps one timer for each cluster."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def of_step(self, row: PublishedRow, planned: Planned, *, stack_alone: bool = False) -> Said:
        """Of a row that measures time. `stack_alone`: the spec names its stack and no more of its software.

        Raises:
            SkipError: no spec says it.
        """
        spec, cluster, software = spec_of(row, planned), planned.cluster, software_of(row, planned)
        if not stack_alone:
            spec = with_software(spec, software)
        elif software is not None and software.nvfp4:
            raise SkipError("no stack alone says fp4")
        timer = self._timers.setdefault(cluster.model_dump_json(), Timer(cluster))
        timing = timer.get_step(spec)
        told = spec.resources.software is not None
        share = compute_time_interval(cluster, spec, None, timing.host_share)["share"]
        return Said(timing.step_s * planned.scale, share, timing.host_share, told)

    def of_peak(self, row: PublishedRow, planned: Planned) -> Said:
        """Of a row that measures memory, by the meter that it was read from.

        Raises:
            SkipError: no spec says it.
        """
        spec, cluster = spec_of(row, planned), planned.cluster
        stages = range(spec.layout.pp) if planned.stage is None else [planned.stage]
        parts = max((get_rank_memory(spec, stage, cluster) for stage in stages), key=lambda parts: sum(parts.values()))
        whole = sum(parts.values())
        tensors = whole - parts["allowance"]
        held = tensors * (1 + cluster.accelerator.fragmentation)
        predicted = {"device": whole, "reserved": round(held), "allocated": tensors}[planned.meter]
        return Said(predicted, compute_memory_interval(cluster, spec, None, predicted)["share"])


def spec_of(row: PublishedRow, planned: Planned) -> JobSpec:
    """What a spec says of the row beside its software; layers are repeated all or none.

    Raises:
        SkipError: no spec says it.
    """
    if row.adapts:
        raise SkipError("a spec has no adapters with frozen weights")
    spec = planned.spec
    layout = spec.layout
    if planned.makes_again:
        layout = layout.model_copy(update={"recompute": "selective"})
    elif (repeated := repeated_by(row)) and 0 < repeated.layers < 0.5:
        layout = layout.model_copy(update={"recompute": "none"})
    resources = spec.resources.model_copy(update={"device": planned.cluster.device, "stack": planned.stack})
    return spec.model_copy(update={"layout": layout, "resources": resources})


def software_of(row: PublishedRow, planned: Planned) -> SoftwareSpec | None:
    """What a spec can say of the row's software; None where nothing is known, or the stack leaves nothing open."""
    if planned.stack == "scaling":
        return _of_scaling(row)
    if planned.stack != "megatron":
        return None
    if planned.own_tests:
        return SoftwareSpec(
            cuda_graphs=graphs_of_test(planned.text),
            deterministic=True,
            dispatcher="alltoall" if planned.spec.model.moe and re.search(SENDS_TO_ALL, planned.text) else "flex",
            overlap_experts=planned.spec.model.moe is not None
            and re.search(OVERLAPS_EXPERTS, planned.text) is not None,
        )
    return SoftwareSpec(
        cuda_graphs=graphs_of(row),
        dispatcher="alltoall" if sends_to_all(row) else "flex",
        overlap_experts=planned.spec.model.moe is not None and overlaps_experts(row),
        attention_kernel="flash_2" if runs_flash_2(row) else "own",
        nvfp4="fp4" in row.text("precision").lower(),
    )


def _of_scaling(row: PublishedRow) -> SoftwareSpec | None:
    kernel = attention_kernel(row)
    if not kernel:
        return None
    return SoftwareSpec(
        attention_kernel="eager" if kernel.startswith("torch") else "flash_1" if is_flash_1(kernel) else "own",
        fused_norms="rms kernel" in kernel,
    )


def with_software(spec: JobSpec, software: SoftwareSpec | None) -> JobSpec:
    resources = spec.resources.model_copy(update={"software": software})
    return spec.model_copy(update={"resources": resources})
