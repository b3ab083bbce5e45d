"""Tensor-parallel collectives of other frameworks that Meshboard's trainer does not send, or the other way round.

Each function returns the collectives of one layer and one micro-batch.
"""

from __future__ import annotations

from contracts.telemetry.vocabulary import Op
from planner.cost.resolved_plan import ResolvedPlan
from planner.cost.traffic.expert import dispatched_rows, row_bytes
from planner.cost.traffic.tally import Collective
from planner.facts.placements import get_vocab_rows

SEPARATE_INPUTS = 3  # beyond two: queries, keys, and values, and gate and up, without the first matmul of each input


def get_separate_inputs(plan: ResolvedPlan) -> list[Collective]:
    """Return the gathers and reductions of matmuls that each gather their shared input."""
    n, again = SEPARATE_INPUTS, plan.layout.recompute == "full"
    counts: dict[Op, int] = {"all_reduce": n}
    if plan.layout.sequence_parallel:
        counts = {"all_gather": n * (1 + again), "reduce_scatter": n}
    return _over_tensor_ranks(plan, counts, plan.micro_batch.hidden_bytes)


def get_mlp_collectives(plan: ResolvedPlan) -> list[Collective]:
    """Return the collectives of a dense MLP, which experts with sharded tokens do not need."""
    layout = plan.layout
    gathers = 2 + (layout.regather or layout.recompute == "full")
    return _over_tensor_ranks(plan, {"all_gather": gathers, "reduce_scatter": 2}, plan.micro_batch.hidden_bytes)


def get_expert_collectives(plan: ResolvedPlan) -> list[Collective]:
    """Return the collectives of experts that tensor ranks share: gathers of their tokens and reductions of results."""
    if plan.model.moe is None:
        return []
    size = dispatched_rows(plan) * row_bytes(plan)
    return _over_tensor_ranks(plan, {"all_gather": 2, "reduce_scatter": 2}, size)


def get_logits_gather(plan: ResolvedPlan) -> list[Collective]:
    """Return the gather of the other tensor ranks' logits."""
    logits = plan.micro_batch.tokens * get_vocab_rows(plan.spec) * plan.layout.tp
    return _over_tensor_ranks(plan, {"all_gather": 1}, logits * plan.mix.compute_bytes)


def _over_tensor_ranks(plan: ResolvedPlan, counts: dict[Op, int], size: int) -> list[Collective]:
    group = plan.get_group("tp")
    return [Collective(op, "tp", group.size, group.stride, n, n * size) for op, n in counts.items()]
