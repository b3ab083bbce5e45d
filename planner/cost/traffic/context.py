"""Context parallelism: each rank's queries need every key and value before them.

Ring attention (2310.01889) passes keys and values on cp - 1 times; the all-gather variant (2407.21783 section 3.3.2)
collects them at once. Backward moves them again, and their gradients home: three times the forward's bytes in all.
"""

from __future__ import annotations

from planner.cost.traffic.tally import Tally
from planner.facts.layout import get_axis_group
from planner.facts.placements import count_local_kv_heads
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.stages import StageLayers, get_micro_batch_tokens


def key_value_bytes(spec: JobSpec) -> int:
    """Keys and values of this rank's part of one micro-batch, in one layer."""
    model, tp = spec.model, spec.layout.tp
    if model.mla:
        width = model.num_heads // tp * (model.mla.nope_head_dim + model.mla.rope_head_dim + model.mla.value_head_dim)
    else:
        width = 2 * count_local_kv_heads(model.num_kv_heads, tp) * model.head_size
    return get_micro_batch_tokens(spec) * width * get_mixed_precision(spec.train.precision).compute_bytes


def context_forward(tally: Tally, spec: JobSpec, held: StageLayers, *, times: int = 1) -> None:
    """Keys and values to every rank of the group, in each layer."""
    cp, count = spec.layout.cp, times * spec.train.micro_batches * held.num_layers
    size, group = key_value_bytes(spec), get_axis_group(spec.layout, "cp")
    if spec.layout.cp_method == "all_gather":
        tally.add("all_gather", "cp", group, cp * size, count)
        return
    tally.add("send", "cp", group, size, count * (cp - 1))
    tally.add("recv", "cp", group, size, count * (cp - 1))


def context_backward(tally: Tally, spec: JobSpec, held: StageLayers) -> None:
    """Keys and values again, and their gradients back to whom they belong."""
    cp, count = spec.layout.cp, spec.train.micro_batches * held.num_layers
    size, group = key_value_bytes(spec), get_axis_group(spec.layout, "cp")
    context_forward(tally, spec, held, times=2 if spec.layout.recompute == "full" else 1)
    if spec.layout.cp_method == "all_gather":
        tally.add("reduce_scatter", "cp", group, cp * size, count)
        return
    tally.add("send", "cp", group, size, count * (cp - 1))
    tally.add("recv", "cp", group, size, count * (cp - 1))
