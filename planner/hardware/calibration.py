"""Plan with the measurements of a calibrated host.

Points are interpolated. Ranks of a host share its cores, so each figure depends on the number of active ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from contracts.telemetry.items import Op
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.stages import get_micro_batch_tokens
from planner.hardware.catalog import ACCELERATORS
from planner.hardware.cluster import Accelerator, Cluster, Link
from planner.hardware.profile import EndsPoint, HostProfile, LayerPoint


class MeasuredSeconds(NamedTuple):
    """Measured time of a module, with the sequence length of its points."""

    forward_s: float
    backward_s: float
    seq_len: int


def build_cluster(name: str, profile: HostProfile) -> Cluster:
    """Return a cluster of one node from a profile.

    Peaks are the best measured rates, so their efficiency is 1.
    Links between such hosts were not measured: a plan for several hosts replaces the network.
    """
    best = {
        precision: max((2 * p.m * p.n * p.k / p.seconds for p in profile.gemm if p.precision == precision), default=0.0)
        for precision in ("fp32", "bf16", "fp8")
    }
    bandwidth = max(p.num_bytes / p.seconds for p in profile.stream)
    sheet = ACCELERATORS["CPU core" if profile.device == "cpu" else "H100 SXM"]  # memory overhead per process
    accelerator = Accelerator(
        name=profile.device_name,
        memory_bytes=profile.memory_bytes,
        fp32_flops=best["fp32"],
        bf16_flops=best["bf16"] or best["fp32"],
        fp8_flops=best["fp8"] or None,
        bytes_per_s=bandwidth,
        num_sms=1,
        gemm_efficiency=1.0,
        fp8_efficiency=1.0,
        attention_efficiency=1.0,
        memory_efficiency=1.0,
        kernel_s=min(p.seconds for p in profile.stream),
        launch_s=min(p.seconds for p in profile.stream),
        reserved_bytes=sheet.reserved_bytes,
        fragmentation=sheet.fragmentation,
    )
    link = _build_link(profile, bandwidth)
    return Cluster(
        name=name,
        device=profile.device,
        accelerator=accelerator,
        per_node=profile.slots,
        node=link,
        network=link,
        base_s=link.latency_s,
        basis="calibrated",
        profile=profile,
    )


def _build_link(profile: HostProfile, bandwidth: float) -> Link:
    sends = [p for p in profile.collectives if p.op == "send"]
    if not sends:
        return Link(bytes_per_s=bandwidth, efficiency=1.0, latency_s=1e-6)
    fastest = max(p.payload_bytes / p.seconds for p in sends)
    return Link(bytes_per_s=fastest, efficiency=1.0, latency_s=min(p.seconds for p in sends))


class Calibration:
    """Lookup of measurements. None means that no such point was measured."""

    def __init__(self, profile: HostProfile) -> None:
        self.profile = profile
        self._collectives: dict[tuple[Op, int, int], list[tuple[float, float]]] = defaultdict(list)
        for p in profile.collectives:
            self._collectives[p.op, p.group_size, p.ranks].append((p.payload_bytes, p.seconds))

        self.counts = sorted({p.ranks for p in profile.gemm})

    def get_measured_ranks(self, wanted: int) -> int:
        """Return the smallest measured number of ranks that is enough, or the largest."""
        return next((n for n in self.counts if n >= wanted), self.counts[-1])

    def get_layer_seconds(self, spec: JobSpec, ranks: int) -> MeasuredSeconds | None:
        """Return the time of one layer of one micro-batch, including tp collectives."""
        model = spec.model
        if model.mla or model.block or model.sliding_window or model.num_heads * model.head_size != model.hidden_size:
            return None  # The calibration does not measure these models.
        shape = (model.arch, model.hidden_size, model.num_heads, model.num_kv_heads, model.ffn_hidden_size)
        return _at(
            spec,
            [
                p
                for p in self.profile.layers
                if (p.arch, p.hidden_size, p.num_heads, p.num_kv_heads, p.ffn_hidden_size) == shape
                and _same(p, spec, self.get_measured_ranks(ranks))
            ],
        )

    def get_end_seconds(self, spec: JobSpec, ranks: int) -> MeasuredSeconds | None:
        """Return the time of embedding, final norm, head, and loss of one micro-batch."""
        model = spec.model
        shape = (model.arch, model.hidden_size, model.vocab_size)
        return _at(
            spec,
            [
                p
                for p in self.profile.ends
                if (p.arch, p.hidden_size, p.vocab_size) == shape and _same(p, spec, self.get_measured_ranks(ranks))
            ],
        )

    def get_optimizer_s(self, num_parameters: int, ranks: int) -> float | None:
        """Return the time after backward for this number of parameters."""
        n = self.get_measured_ranks(ranks)
        points = [(float(p.num_parameters), p.seconds) for p in self.profile.optimizer if p.ranks == n]
        return interpolate(num_parameters, points)

    def get_collective_s(self, op: Op, group_size: int, payload_bytes: float, ranks: int) -> float | None:
        """Return the time of one call of a collective."""
        key = "send" if op == "recv" else op, group_size, self.get_measured_ranks(ranks)
        if op == "send" and key not in self._collectives:
            key = op, 2, key[2]  # A message has two ranks.
        return interpolate(payload_bytes, self._collectives.get(key, []))


def _same(point: LayerPoint | EndsPoint, spec: JobSpec, ranks: int) -> bool:
    layout = spec.layout
    wanted = layout.tp, layout.sequence_parallel, get_mixed_precision(spec.train.precision).gemm, ranks
    return (point.tp, point.sequence_parallel, point.precision, point.ranks) == wanted


def _at(spec: JobSpec, points: Sequence[LayerPoint | EndsPoint]) -> MeasuredSeconds | None:
    """Interpolate by tokens of the micro-batch, as short sequences scale linearly."""
    tokens = get_micro_batch_tokens(spec)
    forward = interpolate(tokens, [(p.micro_batch * p.seq_len, p.forward_s) for p in points])
    backward = interpolate(tokens, [(p.micro_batch * p.seq_len, p.backward_s) for p in points])
    return None if forward is None or backward is None else MeasuredSeconds(forward, backward, points[0].seq_len)


def interpolate(x: float, points: Iterable[tuple[float, float]]) -> float | None:
    """Interpolate linearly at x.

    Above the last point, extrapolate the last two points. Below the first point, return the first value.
    """
    known = sorted(points)
    if not known:
        return None
    if x <= known[0][0] or len(known) == 1:
        return known[0][1] * max(1.0, x / known[0][0])
    (x0, y0), (x1, y1) = next((pair for pair in pairwise(known) if x <= pair[1][0]), (known[-2], known[-1]))
    slope = (y1 - y0) / (x1 - x0)
    return y0 + slope * (x - x0) if x <= x1 else y1 + max(0.0, slope) * (x - x1)
