"""What a user's page says of a published row: a spec names its stack and no more of its software."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.published.mapping import Planned
from benchmarks.published.repeated import repeated_by
from benchmarks.published.rows import PublishedRow, SkipError
from planner.cost.correction import interval
from planner.cost.estimate import rank_memory
from planner.cost.learning import memory_interval
from planner.cost.timing import Timer
from planner.facts.spec import JobSpec, ModelSpec
from planner.hardware.stacks import HOST_WITHIN


class Said(NamedTuple):
    """Seconds or bytes as predicted for the row's spec, how far off they are told to be, and of a step the share that
    the device waits for its host."""

    predicted: float
    share: float
    host_share: float = 0.0

    @property
    def waits(self) -> str:
        """Which of `HOST_WITHIN` the step falls under."""
        least = next((least for least, _ in HOST_WITHIN if self.host_share >= least), None)
        return "waits for no host" if least is None else f"waits {least:.1%} or more of it for its host"


class Speaker:
    """Keeps one timer for each cluster."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def of_step(self, row: PublishedRow, planned: Planned) -> Said:
        """Of a row that measures time.

        Raises:
            SkipError: no spec says it.
        """
        spec, cluster = _spec_of(row, planned), planned.cluster
        timer = self._timers.setdefault(cluster.model_dump_json(), Timer(cluster))
        timing = timer.step(spec)
        told = interval(cluster, spec, None, timing.host_share)
        return Said(timing.step_s * planned.scale, told["share"], timing.host_share)

    def of_peak(self, row: PublishedRow, planned: Planned) -> Said:
        """Of a row that measures memory, by the meter that it was read from.

        Raises:
            SkipError: no spec says it.
        """
        spec, cluster = _spec_of(row, planned), planned.cluster
        stages = range(spec.layout.pp) if planned.stage is None else [planned.stage]
        parts = max((rank_memory(spec, stage, cluster) for stage in stages), key=lambda parts: sum(parts.values()))
        whole = sum(parts.values())
        tensors = whole - parts["allowance"]
        held = tensors * (1 + cluster.accelerator.fragmentation)
        predicted = {"device": whole, "reserved": round(held), "allocated": tensors}[planned.meter]
        return Said(predicted, memory_interval(cluster, spec, None, predicted)["share"])


def _spec_of(row: PublishedRow, planned: Planned) -> JobSpec:
    """A model's heads add up to its hidden size, and layers are repeated all or none."""
    if row.adapts:
        raise SkipError("no spec says adapters beside frozen weights")
    if "fp4" in row.text("precision").lower():
        raise SkipError("no spec says fp4")
    spec = planned.spec
    model = ModelSpec(**{name: getattr(spec.model, name) for name in ModelSpec.model_fields})
    layout = spec.layout
    if planned.makes_again:
        layout = layout.model_copy(update={"recompute": "selective"})
    elif (repeated := repeated_by(row)) and 0 < repeated.layers < 0.5:
        layout = layout.model_copy(update={"recompute": "none"})
    resources = spec.resources.model_copy(update={"device": planned.cluster.device, "stack": planned.stack})
    return spec.model_copy(update={"model": model, "layout": layout, "resources": resources})
