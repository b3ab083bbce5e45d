"""Tensor and sequence parallelism: sums around each half of a layer (Megatron 2104.04473 section 3.2)."""

from __future__ import annotations

from planner.cost.resolved_plan import ResolvedPlan
from planner.cost.traffic.tally import Tally
from planner.facts.precision import FP32_BYTES
from planner.facts.stages import StageLayers
from planner.hardware.stacks import STACKS


def tensor_forward(tally: Tally, plan: ResolvedPlan, held: StageLayers) -> None:
    """Two sums a layer (attention out, MLP down) and one for the vocabulary-parallel embedding.

    With sequence parallelism each sum is a reduce-scatter, and an all-gather stands before each column-parallel
    product: two a layer and one for the head. The loss needs three sums of (batch, seq) in fp32.
    """
    layout, m = plan.layout, plan.train.micro_batches
    if layout.tp == 1:
        return
    _sums(tally, plan, m * (2 * held.num_layers + held.stage.first), m * (2 * held.num_layers + held.stage.last))
    if held.stage.last:
        tally.add("all_reduce", "tp", plan.get_group("tp"), plan.micro_batch.tokens * FP32_BYTES, 3 * m)


def tensor_backward(tally: Tally, plan: ResolvedPlan, held: StageLayers) -> None:
    """The conjugate of the forward: an input gradient is summed before each column-parallel product.

    Full recompute repeats the layers' forward first, up to its last product: 5 sums a layer instead of 4; 6 by stacks
    that repeat it to its end, with the sum that ends the layer (2104.04473 section 3.5). Inputs kept divided are
    gathered again (2205.05198 section 4.2.2), but for layers that are computed again anyway, and mixtures that do not
    need theirs.
    """
    layout, m, layers = plan.layout, plan.train.micro_batches, held.num_layers
    if layout.tp == 1:
        return
    _sums(tally, plan, m * (2 * layers + held.stage.last), m * (2 * layers + held.stage.first))
    again = layout.recompute == "full"
    if again:
        whole = STACKS[plan.resources.stack].repeats_whole
        _sums(tally, plan, m * layers * (2 if whole else 1), m * 2 * layers)
    if layout.regather:
        gathers = held.stage.last + (0 if again else 2 * layers - _mixtures_without(plan, held))
        tally.add("all_gather", "tp", plan.get_group("tp"), plan.micro_batch.hidden_bytes, m * gathers)


def _mixtures_without(plan: ResolvedPlan, held: StageLayers) -> int:
    """Layers whose experts' input backward has no use for: experts keep the rows that came to them, our router its fp32
    copy where the input is narrower, and only shared experts the input itself."""
    moe, ours = plan.model.moe, plan.resources.stack == "ours"
    wide = plan.mix.compute_bytes == FP32_BYTES
    return held.num_moe_layers if moe and ours and not (moe.shared_experts or wide) else 0


def _sums(tally: Tally, plan: ResolvedPlan, sums: int, gathers: int) -> None:
    """`sums` of the hidden states; `gathers` are their all-gathers, which only sequence parallelism needs."""
    layout, size = plan.layout, plan.micro_batch.hidden_bytes
    if not layout.sequence_parallel:
        tally.add("all_reduce", "tp", plan.get_group("tp"), size, sums)
        return
    tally.add("reduce_scatter", "tp", plan.get_group("tp"), size, sums)
    tally.add("all_gather", "tp", plan.get_group("tp"), size, gathers)
