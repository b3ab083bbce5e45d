"""Bytes one rank needs, by component: an estimate. Model state is counted from the shapes; nothing is measured yet."""

from __future__ import annotations

from planner.layout import Coordinates, stage_layers
from planner.spec import JobSpec
from planner.traffic import local_units, shard_rows

FP32_BYTES = 4
ADAM_MOMENTS = 2


def held_parameters(spec: JobSpec, stage: int) -> int:
    """Parameter elements that a rank of the stage holds, after tp and, under ZeRO, dp; the largest shard."""
    layout = spec.layout
    total = 0
    for unit in local_units(spec, Coordinates(stage, 0, 0)):
        for p in unit.parameters:
            rows = shard_rows(p.shape[0], layout.dp, 0) if layout.zero else p.shape[0]
            total += rows * (p.numel // p.shape[0])
    return total


def memory(spec: JobSpec, stage: int) -> dict[str, int]:
    """Bytes by component on a rank of `stage`.

    Parameters, gradients and Adam's moments are fp32. Under ZeRO all of them are sharded at rest (1910.02054 section
    5); stages 1 and 2 also keep the gathered parameters from the first forward to the last backward, stage 1 the
    whole gradients too, stage 3 two units at a time. Plain data parallelism keeps every bucket's flat copy of its
    gradients until the last all-reduce is done. Activations: Korthikanti et al. (2205.05198) equations 1-4 without
    dropout, times the micro-batches in flight (GPipe all, 1F1B pp - stage).
    """
    layout, train = spec.layout, spec.train
    compute = 2 if train.precision == "bf16" else FP32_BYTES
    units = [sum(p.numel for p in u.parameters) for u in local_units(spec, Coordinates(stage, 0, 0))]
    held = held_parameters(spec, stage)
    whole = sum(units)
    gathered = {0: 0, 1: whole, 2: whole, 3: sum(sorted(units)[-2:])}[layout.zero] * compute
    buckets = whole if layout.dp > 1 else 0
    passing_gradients = {0: buckets, 1: whole, 2: max(units), 3: max(units)}[layout.zero] * FP32_BYTES
    layers = len(stage_layers(spec.model.num_layers, layout.pp)[stage])
    in_flight = _in_flight(spec, stage)
    return {
        "parameters": held * FP32_BYTES,
        "gradients": held * FP32_BYTES + passing_gradients,
        "optimizer": ADAM_MOMENTS * held * FP32_BYTES,
        "gathered": gathered,
        "activations": layers * in_flight * _layer_activation_bytes(spec, compute),
        "logits": _logit_bytes(spec, compute) if stage == layout.pp - 1 else 0,
    }


def _in_flight(spec: JobSpec, stage: int) -> int:
    layout, m = spec.layout, spec.train.micro_batches
    if layout.pp == 1:
        return 1
    return m if layout.schedule == "gpipe" else min(m, layout.pp - stage)


def _layer_activation_bytes(spec: JobSpec, compute: int) -> int:
    """What backward keeps of one layer and micro-batch: inputs of norms and products; scores are not kept by SDPA.

    Outside tp: residual, two norm outputs and their fp32 copies; inside, divided by tp: q, k, v, the attention output
    and the MLP's inner tensors.
    """
    model, layout = spec.model, spec.layout
    tokens = spec.micro_batch_size * spec.train.seq_len
    kv = model.num_kv_heads * (model.hidden_size // model.num_heads)
    outside = tokens * model.hidden_size * (4 * compute + 2 * FP32_BYTES)
    inner_tensors = 3 if model.arch == "llama" else 2
    inside = tokens * (2 * model.hidden_size + 2 * kv + inner_tensors * model.ffn_hidden_size) * compute
    return outside // (layout.tp if layout.sequence_parallel else 1) + inside // layout.tp


def _logit_bytes(spec: JobSpec, compute: int) -> int:
    """Logits in the compute type, in fp32, and their gradient; the loss runs one micro-batch at a time."""
    tokens = spec.micro_batch_size * spec.train.seq_len
    return tokens * (spec.model.vocab_size // spec.layout.tp) * (compute + 2 * FP32_BYTES)
