"""Pipeline parallelism: hidden states over stage boundaries, gradients back (2104.04473 section 3.2)."""

from __future__ import annotations

from planner.cost.resolved_plan import ResolvedPlan
from planner.cost.traffic.tally import Tally
from planner.facts.layout import get_chunk_indices, get_num_chunks


def boundary_bytes(plan: ResolvedPlan) -> int:
    """Return the bytes of one message. With SP or scatter-gather each tp rank sends its shard."""
    layout = plan.layout
    return plan.micro_batch.hidden_bytes // (layout.tp if layout.sequence_parallel or layout.scatter_gather else 1)


def pipeline(tally: Tally, plan: ResolvedPlan, pp: int, *, backward: bool) -> None:
    """Add one message per micro-batch for each boundary between two ranks. The turn of a V needs none."""
    sends, receives = _crossings(plan, pp)
    if backward:
        sends, receives = receives, sends
    m, group = plan.train.micro_batches, plan.get_group("pp")
    tally.add("send", "pp", group, boundary_bytes(plan), m * sends)
    tally.add("recv", "pp", group, boundary_bytes(plan), m * receives)
    if plan.layout.scatter_gather:  # 2104.04473 section 4.1
        tally.add("all_gather", "tp", plan.get_group("tp"), plan.micro_batch.hidden_bytes, m * receives)


def _crossings(plan: ResolvedPlan, pp: int) -> tuple[int, int]:
    """Return the number of chunks that send their output, and that receive their input."""
    own, last = get_chunk_indices(plan.layout, pp), get_num_chunks(plan.layout) - 1
    sends = sum(c < last and c + 1 not in own for c in own)
    receives = sum(c > 0 and c - 1 not in own for c in own)
    return sends, receives
