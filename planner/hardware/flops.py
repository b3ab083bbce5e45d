"""Floating point operations that a step carries out: with what its stack computes twice (2205.05198 equations 7 and 8),
and with all rows of experts' buffers. HFU is these over the peak.
"""

from __future__ import annotations

from planner.facts.models.flops import layer_flops, score_flops, single_flops
from planner.facts.models.shapes import is_moe_layer
from planner.facts.spec import JobSpec, Layout
from planner.hardware.kernels import Gemm, layer_work
from planner.hardware.stacks import STACKS, Stack


def hardware_flops(spec: JobSpec) -> int:
    """Of one step of the whole model."""
    model, train, stack = spec.model, spec.train, STACKS[spec.resources.stack]
    once = single_flops(spec)
    if spec.layout.recompute == "full":
        again = layer_flops(model, train.seq_len, empty_rows=True)
        if stack.repeats_needed:  # not a dense layer's last product
            dense = sum(not is_moe_layer(model, i) for i in range(model.num_layers))
            again -= 2 * train.seq_len * dense * model.ffn_hidden_size * model.hidden_size
        return once + train.global_batch * again
    if spec.layout.recompute == "selective" and stack.repeats_operations:
        return once + _operations(spec, stack)
    if spec.layout.recompute == "selective" and train.attention == "unfused":
        return once + train.global_batch * train.seq_len * score_flops(model, train.seq_len)
    return once


def _operations(spec: JobSpec, stack: Stack) -> int:
    """Of the products that are repeated where every second one's output is kept."""
    train = spec.train.model_copy(update={"micro_batches": 1})
    whole = spec.model_copy(update={"layout": Layout(), "train": train})  # undivided, all of a step at once
    moe_layers = sum(is_moe_layer(spec.model, i) for i in range(spec.model.num_layers))
    total = 0
    for moe, number in ((False, spec.model.num_layers - moe_layers), (True, moe_layers)):
        if number:
            work = layer_work(whole, moe=moe, joined=stack.joins_products, apart=stack.experts_apart)
            total += number * sum(kernel.flops for kernel in work.operations if isinstance(kernel, Gemm))
    return total
