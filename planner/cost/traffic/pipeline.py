"""Pipeline parallelism: hidden states over stage boundaries, gradients back (2104.04473 section 3.2)."""

from __future__ import annotations

from planner.cost.resolved_plan import ResolvedPlan
from planner.cost.traffic.tally import Tally
from planner.facts.layout import get_chunk_indices, get_num_chunks


def boundary_bytes(plan: ResolvedPlan) -> int:
    """Hidden states across a stage boundary; each tp rank sends its part under SP or scatter-gather."""
    layout = plan.layout
    return plan.micro_batch.hidden_bytes // (layout.tp if layout.sequence_parallel or layout.scatter_gather else 1)


def pipeline(tally: Tally, plan: ResolvedPlan, pp: int, *, backward: bool) -> None:
    """One message a micro-batch over each boundary between two ranks; at the turn of a V nothing is sent."""
    sends, receives = _crossings(plan, pp)
    if backward:
        sends, receives = receives, sends
    m, group = plan.train.micro_batches, plan.get_group("pp")
    tally.add("send", "pp", group, boundary_bytes(plan), m * sends)
    tally.add("recv", "pp", group, boundary_bytes(plan), m * receives)
    if plan.layout.scatter_gather:  # 2104.04473 section 4.1
        tally.add("all_gather", "tp", plan.get_group("tp"), plan.micro_batch.hidden_bytes, m * receives)


def _crossings(plan: ResolvedPlan, pp: int) -> tuple[int, int]:
    """(chunks whose output goes to another rank, chunks whose input comes from one)"""
    own, last = get_chunk_indices(plan.layout, pp), get_num_chunks(plan.layout) - 1
    sends = sum(c < last and c + 1 not in own for c in own)
    receives = sum(c > 0 and c - 1 not in own for c in own)
    return sends, receives
