"""What other software sends over tensor ranks that `ours` does not, or the other way: of one micro-batch and layer."""

from __future__ import annotations

from contracts.telemetry.vocabulary import Op
from planner.cost.traffic.expert import dispatched_rows, row_bytes
from planner.cost.traffic.tally import Collective
from planner.facts.layout import get_axis_group
from planner.facts.placements import get_vocab_rows
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.stages import compute_hidden_bytes, get_micro_batch_tokens

PRODUCTS_APART = 3  # beyond two: of queries, keys and values, and of gate and up, each but the first of its input


def inputs_apart(spec: JobSpec) -> list[Collective]:
    """Where products that share an input each gather it, and sum its gradient."""
    n, again = PRODUCTS_APART, spec.layout.recompute == "full"
    counts: dict[Op, int] = {"all_reduce": n}
    if spec.layout.sequence_parallel:
        counts = {"all_gather": n * (1 + again), "reduce_scatter": n}
    return _over_tensor_ranks(spec, counts, compute_hidden_bytes(spec))


def mlp_sums(spec: JobSpec) -> list[Collective]:
    """What an MLP gathers and sums, and experts do not whose tokens are divided until they are sent."""
    layout = spec.layout
    gathers = 2 + (layout.regather or layout.recompute == "full")
    return _over_tensor_ranks(spec, {"all_gather": gathers, "reduce_scatter": 2}, compute_hidden_bytes(spec))


def gathered_experts(spec: JobSpec) -> list[Collective]:
    """Where tensor ranks divide experts: each gathers what came to the others, and their results are summed; in
    backward the other way."""
    if spec.model.moe is None:
        return []
    size = dispatched_rows(spec) * row_bytes(spec)
    return _over_tensor_ranks(spec, {"all_gather": 2, "reduce_scatter": 2}, size)


def gathered_logits(spec: JobSpec) -> list[Collective]:
    """Where each tensor rank takes the other ranks' logits."""
    logits = get_micro_batch_tokens(spec) * get_vocab_rows(spec) * spec.layout.tp
    return _over_tensor_ranks(spec, {"all_gather": 1}, logits * get_mixed_precision(spec.train.precision).compute_bytes)


def _over_tensor_ranks(spec: JobSpec, counts: dict[Op, int], size: int) -> list[Collective]:
    group = get_axis_group(spec.layout, "tp")
    return [Collective(op, "tp", group.size, group.stride, n, n * size) for op, n in counts.items()]
