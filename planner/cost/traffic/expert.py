"""Expert parallelism: tokens to their experts and back (GShard 2006.16668 section 3.2)."""

from __future__ import annotations

from planner.cost.traffic.tally import Tally
from planner.facts.layout import get_axis_group
from planner.facts.model_shapes import count_expert_rows
from planner.facts.precision import FP32_BYTES, get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.stages import StageLayers, get_micro_batch_tokens, get_stage_layers

COUNT_BYTES = 8  # how many tokens go to an expert travels as int64


def row_bytes(spec: JobSpec) -> int:
    """One token's hidden state as it travels to an expert."""
    return spec.model.hidden_size * get_mixed_precision(spec.train.precision).compute_bytes


def depends_on_router(spec: JobSpec) -> bool:
    """Whether the bytes of ep are known only when tokens have been routed: nothing is dropped to fit buffers."""
    return spec.layout.ep > 1 and spec.model.moe is not None and spec.model.moe.capacity_factor is None


def dispatched_rows(spec: JobSpec) -> int:
    """Rows that one rank hands to an all-to-all, in one layer and micro-batch.

    Without a capacity each token goes once to each of its experts; what a rank gets, and hands to the way back, depends
    on the router then and equals this only when tokens spread evenly. With one, buffers are full whatever is routed.
    """
    moe = spec.model.moe
    assert moe is not None
    return count_expert_rows(moe, get_micro_batch_tokens(spec), spec.train.seq_len)


def forwards(spec: JobSpec, *, backward: bool) -> int:
    """How often backward computes a layer's forward again."""
    return int(backward and spec.layout.recompute == "full")


def experts(tally: Tally, spec: JobSpec, own: StageLayers, *, backward: bool) -> None:
    """Dispatch and combine in each layer with experts; full recompute repeats both in backward.

    Without a capacity the ranks first tell each other how many tokens come.
    """
    if spec.layout.ep == 1 or not own.num_moe_layers or spec.model.moe is None:
        return
    again = forwards(spec, backward=backward)
    layers, group = spec.train.micro_batches * own.num_moe_layers, get_axis_group(spec.layout, "ep")
    tally.add("all_to_all", "ep", group, dispatched_rows(spec) * row_bytes(spec), layers * 2 * (1 + again))
    if spec.model.moe.capacity_factor is None:
        counted = again if backward else 1
        tally.add("all_to_all", "ep", group, spec.model.moe.num_experts * COUNT_BYTES, layers * counted)


def routed_bytes(spec: JobSpec, stage: int, received_rows: int, micro_batches: int, *, backward: bool) -> int:
    """What a rank's all-to-alls carry beyond `experts`, which spreads tokens evenly, once the router has spoken.

    `received_rows`: tokens that came to the rank's experts, in all forwards of `micro_batches` micro-batches, those
    that recompute repeated too. It hands them back, and the gradients of what came.
    """
    own = get_stage_layers(spec, stage)
    if spec.layout.ep == 1 or not own.num_moe_layers:
        return 0
    again = forwards(spec, backward=backward)
    even = micro_batches * own.num_moe_layers * dispatched_rows(spec)
    # Each forward hands its rows back once, each backward hands their gradients back once.
    return (received_rows * (1 + again + backward) // (1 + again) - even * (1 + again + backward)) * row_bytes(spec)


def balance(tally: Tally, spec: JobSpec, own: StageLayers) -> None:
    """The load-balancing loss counts the tokens of whole sequences, whose parts cp ranks hold."""
    if spec.model.moe is None or not spec.model.moe.balance_loss:
        return
    size = spec.micro_batch_size * spec.model.moe.num_experts * FP32_BYTES
    times = spec.train.micro_batches * own.num_moe_layers * (1 + forwards(spec, backward=True))
    tally.add("all_reduce", "cp", get_axis_group(spec.layout, "cp"), size, times)
