"""Pipeline parallelism: hidden states over stage boundaries, gradients back (2104.04473 section 3.2)."""

from __future__ import annotations

from planner.cost.traffic.tally import Tally
from planner.facts.layout import get_axis_group, get_chunk_indices, get_num_chunks
from planner.facts.spec import JobSpec
from planner.facts.stages import compute_hidden_bytes


def boundary_bytes(spec: JobSpec) -> int:
    """Hidden states across a stage boundary; each tp rank sends its part under SP or scatter-gather."""
    layout = spec.layout
    return compute_hidden_bytes(spec) // (layout.tp if layout.sequence_parallel or layout.scatter_gather else 1)


def pipeline(tally: Tally, spec: JobSpec, pp: int, *, backward: bool) -> None:
    """One message a micro-batch over each boundary between two ranks; at the turn of a V nothing is sent."""
    sends, receives = _crossings(spec, pp)
    if backward:
        sends, receives = receives, sends
    m, group = spec.train.micro_batches, get_axis_group(spec.layout, "pp")
    tally.add("send", "pp", group, boundary_bytes(spec), m * sends)
    tally.add("recv", "pp", group, boundary_bytes(spec), m * receives)
    if spec.layout.scatter_gather:  # 2104.04473 section 4.1
        tally.add("all_gather", "tp", get_axis_group(spec.layout, "tp"), compute_hidden_bytes(spec), m * receives)


def _crossings(spec: JobSpec, pp: int) -> tuple[int, int]:
    """(chunks whose output goes to another rank, chunks whose input comes from one)"""
    own, last = get_chunk_indices(spec.layout, pp), get_num_chunks(spec.layout) - 1
    sends = sum(c < last and c + 1 not in own for c in own)
    receives = sum(c > 0 and c - 1 not in own for c in own)
    return sends, receives
