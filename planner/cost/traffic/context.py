"""Context parallelism: each rank's queries need every key and value before them.

Ring attention (2310.01889) passes keys and values on cp - 1 times; the all-gather variant (2407.21783 section 3.3.2)
collects them at once. Backward moves them again, and their gradients home: three times the forward's bytes in all.
"""

from __future__ import annotations

from planner.cost.resolved_plan import ResolvedPlan
from planner.cost.traffic.tally import Tally
from planner.facts.placements import count_local_kv_heads
from planner.facts.stages import StageLayers


def key_value_bytes(plan: ResolvedPlan) -> int:
    """Return the bytes of keys and values of a rank's part of one micro-batch, in one layer."""
    model, tp = plan.model, plan.layout.tp
    if model.mla:
        width = model.num_heads // tp * (model.mla.nope_head_dim + model.mla.rope_head_dim + model.mla.value_head_dim)
    else:
        width = 2 * count_local_kv_heads(model.num_kv_heads, tp) * model.head_size
    return plan.micro_batch.tokens * width * plan.mix.compute_bytes


def context_forward(tally: Tally, plan: ResolvedPlan, held: StageLayers, *, times: int = 1) -> None:
    """Add the collectives that bring keys and values to every rank, in each layer."""
    cp, count = plan.layout.cp, times * plan.train.micro_batches * held.num_layers
    size, group = key_value_bytes(plan), plan.get_group("cp")
    if plan.layout.cp_method == "all_gather":
        tally.add("all_gather", "cp", group, cp * size, count)
        return
    tally.add("send", "cp", group, size, count * (cp - 1))
    tally.add("recv", "cp", group, size, count * (cp - 1))


def context_backward(tally: Tally, plan: ResolvedPlan, held: StageLayers) -> None:
    """Add the collectives of keys and values, and of their gradients back to their ranks."""
    cp, count = plan.layout.cp, plan.train.micro_batches * held.num_layers
    size, group = key_value_bytes(plan), plan.get_group("cp")
    context_forward(tally, plan, held, times=2 if plan.layout.recompute == "full" else 1)
    if plan.layout.cp_method == "all_gather":
        tally.add("reduce_scatter", "cp", group, cp * size, count)
        return
    tally.add("send", "cp", group, size, count * (cp - 1))
    tally.add("recv", "cp", group, size, count * (cp - 1))
