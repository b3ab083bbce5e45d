"""Expert parallelism: tokens to their experts and back (GShard 2006.16668 section 3.2)."""

from __future__ import annotations

from planner.cost.resolved_plan import ResolvedPlan, resolve
from planner.cost.traffic.tally import Tally
from planner.facts.model_shapes import count_expert_rows
from planner.facts.precision import FP32_BYTES
from planner.facts.spec import JobSpec
from planner.facts.stages import StageLayers

COUNT_BYTES = 8  # how many tokens go to an expert travels as int64


def row_bytes(plan: ResolvedPlan) -> int:
    """One token's hidden state as it travels to an expert."""
    return plan.model.hidden_size * plan.mix.compute_bytes


def depends_on_router(plan: JobSpec | ResolvedPlan) -> bool:
    """Whether the bytes of ep are known only when tokens have been routed: nothing is dropped to fit buffers."""
    return plan.layout.ep > 1 and plan.model.moe is not None and plan.model.moe.capacity_factor is None


def dispatched_rows(plan: ResolvedPlan) -> int:
    """Rows that one rank hands to an all-to-all, in one layer and micro-batch.

    Without a capacity each token goes once to each of its experts; what a rank gets, and hands to the way back, depends
    on the router then and equals this only when tokens spread evenly. With one, buffers are full whatever is routed.
    """
    moe = plan.model.moe
    assert moe is not None
    return count_expert_rows(moe, plan.micro_batch.tokens, plan.train.seq_len)


def forwards(plan: ResolvedPlan, *, backward: bool) -> int:
    """How often backward computes a layer's forward again."""
    return int(backward and plan.layout.recompute == "full")


def experts(tally: Tally, plan: ResolvedPlan, own: StageLayers, *, backward: bool) -> None:
    """Dispatch and combine in each layer with experts; full recompute repeats both in backward.

    Without a capacity the ranks first tell each other how many tokens come.
    """
    if plan.layout.ep == 1 or not own.num_moe_layers or plan.model.moe is None:
        return
    again = forwards(plan, backward=backward)
    layers, group = plan.train.micro_batches * own.num_moe_layers, plan.get_group("ep")
    tally.add("all_to_all", "ep", group, dispatched_rows(plan) * row_bytes(plan), layers * 2 * (1 + again))
    if plan.model.moe.capacity_factor is None:
        counted = again if backward else 1
        tally.add("all_to_all", "ep", group, plan.model.moe.num_experts * COUNT_BYTES, layers * counted)


def routed_bytes(
    spec: JobSpec | ResolvedPlan, stage: int, received_rows: int, micro_batches: int, *, backward: bool
) -> int:
    """What a rank's all-to-alls carry beyond `experts`, which spreads tokens evenly, once the router has spoken.

    `received_rows`: tokens that came to the rank's experts, in all forwards of `micro_batches` micro-batches, those
    that recompute repeated too. It hands them back, and the gradients of what came.
    """
    plan = resolve(spec)
    own = plan.partition.stages[stage]
    if plan.layout.ep == 1 or not own.num_moe_layers:
        return 0
    again = forwards(plan, backward=backward)
    even = micro_batches * own.num_moe_layers * dispatched_rows(plan)
    # Each forward hands its rows back once, each backward hands their gradients back once.
    return (received_rows * (1 + again + backward) // (1 + again) - even * (1 + again + backward)) * row_bytes(plan)


def balance(tally: Tally, plan: ResolvedPlan, own: StageLayers) -> None:
    """The load-balancing loss counts the tokens of whole sequences, whose parts cp ranks hold."""
    if plan.model.moe is None or not plan.model.moe.balance_loss:
        return
    size = plan.micro_batch_size * plan.model.moe.num_experts * FP32_BYTES
    times = plan.train.micro_batches * own.num_moe_layers * (1 + forwards(plan, backward=True))
    tally.add("all_reduce", "cp", plan.get_group("cp"), size, times)
