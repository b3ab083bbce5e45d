"""Explain each predicted figure with its formula, numbers, and source.

The value of each term comes from the function that computes the figure. A test sums the terms.
"""

from __future__ import annotations

from typing_extensions import TypedDict

from planner.cost.estimate import get_default_cluster, get_rank_memory, get_traffic_kind, use_cluster_device
from planner.cost.learning import compute_time_interval
from planner.cost.memory import count_computed_parameters, count_held_parameters, find_peak, get_layer_bytes, is_taped
from planner.cost.stage_time import Timing
from planner.cost.timing import Timer
from planner.cost.traffic import get_step_traffic
from planner.facts.collectives import get_bus_factor
from planner.facts.layout import SCHEDULE_NAMES
from planner.facts.model_shapes import (
    compute_model_flops,
    count_parameters,
    get_embedding_parameters,
    get_head_parameters,
    get_layer_parameters,
)
from planner.facts.placements import get_vocab_rows
from planner.facts.precision import FP8_BYTES, GemmType, get_mixed_precision
from planner.facts.spec import JobSpec
from planner.facts.stages import count_tensors, get_micro_batch_tokens, get_stage_layers
from planner.facts.validation import format_count
from planner.hardware.cluster import Cluster
from planner.hardware.stacks import compute_hardware_flops


class Term(TypedDict):
    """Term of a figure. `value` is in `unit`."""

    name: str
    formula: str
    numbers: str
    value: float
    unit: str
    source: str


class Explanation(TypedDict):
    """Figure with its terms. `stage`: pipeline stage of the rank; None without a pipeline."""

    figure: str
    stage: int | None
    value: float
    unit: str
    kind: str
    terms: list[Term]


def explain(spec: JobSpec, cluster: Cluster | None = None, *, stage: int = 0) -> list[Explanation]:
    """Return every figure of the estimate for one rank of pipeline stage `stage`.

    `kind` is the confidence: counted from shapes, exact for Meshboard's trainer, or estimated.
    """
    cluster = cluster or get_default_cluster(spec)
    return [
        _parameters(spec),
        _memory(spec, cluster, stage),
        _traffic(spec, stage),
        *_time(spec, cluster),
    ]


def _term(name: str, formula: str, numbers: str, value: float, unit: str, source: str) -> Term:
    return Term(name=name, formula=formula, numbers=numbers, value=value, unit=unit, source=source)


def _of_a_pipe(spec: JobSpec, stage: int) -> int | None:
    return stage if spec.layout.pp > 1 else None


def _parameters(spec: JobSpec) -> Explanation:
    model = spec.model
    source = "shapes of planner.facts.model_shapes; Megatron 2104.04473 equation 2 leaves out the final norm"
    ends = [*get_embedding_parameters(model), *get_head_parameters(model, own_head=not model.tied_embeddings)]
    terms = [_term(p.name, " x ".join(map(str, p.shape)), "", p.numel, "parameters", source) for p in ends]
    moe_layers = model.num_layers - model.moe.dense_layers if model.moe else 0
    for name, moe, count in (("layers", False, model.num_layers - moe_layers), ("layers of experts", True, moe_layers)):
        each = sum(p.numel for p in get_layer_parameters(model, moe=moe)) if count else 0
        if count:
            numbers = f"{count:,} x {each:,}"
            terms.append(_term(name, "layers x parameters per layer", numbers, count * each, "parameters", source))
    return Explanation(
        figure="parameters", stage=None, value=count_parameters(model), unit="parameters", kind="counted", terms=terms
    )


def _memory(spec: JobSpec, cluster: Cluster, stage: int) -> Explanation:
    spec, layout, mix, a = (
        use_cluster_device(cluster, spec),
        spec.layout,
        get_mixed_precision(spec.train.precision),
        cluster.accelerator,
    )
    parts = get_rank_memory(spec, stage, cluster)
    tensors = sum(parts.values()) - parts["allowance"]
    numel, own, when = count_held_parameters(spec, stage), get_stage_layers(spec, stage), find_peak(spec, stage).when
    each = get_layer_bytes(spec, moe=own.num_moe_layers == own.num_layers)
    zero = "ZeRO 1910.02054 section 5, table 1"
    fsdp = "FSDP2 of torch 2.13, compared with dry runs (make memory)" if is_taped(spec) else "2205.05198 section 4"
    shards = layout.shard_ranks if layout.zero else 1
    columns, update = get_vocab_rows(spec), parts["optimizer"] / numel
    apart = "" if update == mix.optimizer_bytes else " of unsharded parameters"
    masters = f", fp32 weights{apart}" if mix.has_master_weights and update > mix.moment_bytes else ""
    formulas = {
        "parameters": ("elements x bytes per element", _weights(spec, stage, parts["parameters"]), zero),
        "gradients": (
            f"gradients present {when}",
            f"{numel:,} per rank of {shards}, summed in {mix.gradient_bytes} B",
            zero,
        ),
        "optimizer": (
            f"elements / shards x (Adam's moments{masters})",
            f"{numel:,} per rank of {shards} x {update:.4g}",
            zero,
        ),
        "gathered": (
            "gathered weights x compute bytes",
            f"{parts['gathered'] // mix.compute_bytes:,} x {mix.compute_bytes}",
            zero,
        ),
        "activations": (
            f"micro-batch activations per layer x their number + remainder, {when}",
            f"{parts['activations'] // each:,} x {each:,} + {parts['activations'] % each:,}",
            "Korthikanti 2205.05198 equations 1 to 4; in flight by schedule",
        ),
        "logits": (
            "tokens x vocabulary / tp x bytes (logits, fp32 copy, softmax, gradients)",
            f"{get_micro_batch_tokens(spec):,} x {columns:,} x "
            f"{parts['logits'] / max(1, get_micro_batch_tokens(spec) * columns):.4g}",
            "tensors of the loss and its backward",
        ),
        "working": ("activation gradients and temporary tensors", when, "order of autograd"),
        "buffers": ("messages, gradient buckets, and running gathers and reduce-scatters", when, fsdp),
        "copies": (
            "weights and moments copied for a checkpoint",
            f"{numel:,} x {parts['copies'] // numel}",
            "workers.checkpoint.manager",
        ),
        "allowance": (
            "fixed overhead + a fraction of tensor memory",
            f"{parts['allowance'] - round(a.fragmentation * tensors):,} + {a.fragmentation:.6g} x {tensors:,}",
            "assumed for GPUs, measured for CPU ranks (make bench-calibration)",
        ),
    }
    terms = [_term(name, *formulas[name][:2], value, "B", formulas[name][2]) for name, value in parts.items()]
    return Explanation(
        figure="memory",
        stage=_of_a_pipe(spec, stage),
        value=sum(parts.values()),
        unit="B",
        kind="estimated",
        terms=terms,
    )


def _weights(spec: JobSpec, stage: int, num_bytes: int) -> str:
    """Format the weights by type.

    With ZeRO these are fp32 shards and the unsharded weights of FSDP2. In fp8 these are both types of Megatron's
    weights.
    """
    mix, sharded = get_mixed_precision(spec.train.precision), bool(spec.layout.zero) and is_taped(spec)
    first, second = (mix.sharded_bytes, mix.compute_bytes) if sharded else (mix.compute_bytes, FP8_BYTES)
    elements = count_held_parameters(spec, stage) if sharded else count_computed_parameters(spec, stage)
    rest = (num_bytes - elements * first) // second
    if rest < 0:  # Some elements have only the second type.
        rest = (elements * first - num_bytes) // (first - second)
        elements -= rest
    return f"{elements:,} x {first}" + (f" + {rest:,} x {second}" if rest else "")


MEASURED = "calibration of the host; its best rates where no point exists"
_SOURCES = {
    "tp": "Megatron 2104.04473 section 3.2; 2205.05198 section 4.2 with sequence parallelism",
    "pp": "Megatron 2104.04473 section 3.2: hidden states forward, gradients back",
    "cp": "Ring attention 2310.01889; Llama 3 2407.21783 section 3.3.2 for all-gather",
    "ep": "GShard 2006.16668 section 3.2: dispatch and combine",
    "dp": "ZeRO 1910.02054 section 7; HSDP 2304.11277",
    "world": "the loss and the gradient norm, two fp64 values",
}


def _traffic(spec: JobSpec, stage: int) -> Explanation:
    rank = stage * spec.layout.world_size // spec.layout.pp
    terms = []
    for c in get_step_traffic(spec, rank):
        each = c.payload_bytes // c.count if c.count else 0
        size = f"1 call, {each:,} B" if c.count == 1 else f"{c.count:,} calls, {each:,} B each on average"
        numbers = f"{size}; sends {get_bus_factor(c.op, c.group_size):.3g} of each byte"
        name = f"{c.axis} {c.op.replace('_', '-')} over {c.group_size} ranks"
        terms.append(_term(name, "calls x payload", numbers, c.payload_bytes, "B", _SOURCES[c.axis]))
    total = sum(term["value"] for term in terms)
    return Explanation(
        figure="traffic", stage=_of_a_pipe(spec, stage), value=total, unit="B", kind=get_traffic_kind(spec), terms=terms
    )


def _time(spec: JobSpec, cluster: Cluster) -> list[Explanation]:
    timer = Timer(cluster)
    timing, found = timer.get_step(spec), timer.get_correction(spec)
    kind = f"estimated: {compute_time_interval(cluster, spec, found, timing.host_share)['words']}"
    if found is not None:
        cause = "measured steps" if found.is_from_user else "comparable runs"
        kind += f", all parts scaled by {found.ratio:.3g} because of {cause}"
    return [_step(spec, timer, timer.get_rank_mean(spec), kind), _utilisation(spec, timer, timing, kind)]


def _gemm(spec: JobSpec) -> GemmType:
    return get_mixed_precision(spec.train.precision).gemm


def _step(spec: JobSpec, timer: Timer, timing: Timing, kind: str) -> Explanation:
    cluster, m, a, gemm = timer.cluster, spec.train.micro_batches, timer.get_accelerator(spec), _gemm(spec)
    piped = spec.layout.pp > 1
    repeated = timing.recompute_s / m
    backward = timing.backward_input_s + timing.backward_weight_s - repeated
    measured = cluster.profile is not None
    reached = a.fp8_efficiency if gemm == "fp8" and a.fp8_flops else a.gemm_efficiency
    at = "" if measured else f" at {_tera(a.get_peak_flops(gemm))} x {reached:.3g}"
    terms = [
        _term(
            "compute",
            "micro-batches x (forward + backward)" + ", mean over stages" * piped,
            f"{m} x ({timing.forward_s:.3g} + {backward:.3g}) s{at}",
            timing.compute_s,
            "s",
            MEASURED if measured else "matmuls, attention and memory-bound kernels at the rates of the device",
        )
    ]
    if timing.recompute_s:
        words = "micro-batches x recomputed forward"
        terms.append(
            _term("recompute", words, f"{m} x {repeated:.3g} s", timing.recompute_s, "s", "2205.05198 section 5")
        )
    is_gpu = cluster.device == "cuda"
    for axis, seconds in timing.exposed_s.items():
        crossing = f"node {cluster.node.bytes_per_s / 1e9:g} GB/s, network {cluster.network.bytes_per_s / 1e9:g} GB/s"
        formula = "base + hops x latency + bytes / bandwidth - overlap with compute"
        source = "alpha-beta model" + ("; constants from NCCL src/graph/tuning.cc" if is_gpu else "")
        if measured:
            formula, crossing, source = "calls x seconds per call - overlap with compute", "", MEASURED
        if axis == "pp":
            formula += " + wait for the slowest stage"
        terms.append(_term(f"{axis} exposed", formula, crossing, seconds, "s", source))
    layout, batches = spec.layout, format_count(m, "micro-batch", "micro-batches")
    chunks = format_count(layout.virtual_stages, "chunk")
    pipe = f"{SCHEDULE_NAMES[layout.schedule]}, pp {layout.pp}, {chunks} per stage, {batches}"
    if timing.launch_s:
        words = "micro-batches x (kernels x launch time - device time), if the host is slower"
        numbers = f"{batches}, {a.launch_s * 1e6:g} us per launch"
        terms.append(_term("launch", words, numbers, timing.launch_s, "s", "the device waits for its host"))
    bubble_source = "2104.04473 section 2.2: (p - 1) / (v m); zero bubble 2401.10241"
    terms.append(
        _term("bubble", "fill and drain of a pipeline with even stages", pipe, timing.bubble_s, "s", bubble_source)
    )
    adam = _adam(spec, timer)
    if measured:
        adam = "time after backward, by number of parameters", ""
    by = MEASURED if measured else "bytes that Adam reads and writes; host time per tensor"
    terms.append(_term("optimizer", *adam, timing.optimizer_s, "s", by))
    return Explanation(figure="step time", stage=None, value=timing.step_s, unit="s", kind=kind, terms=terms)


def _adam(spec: JobSpec, timer: Timer) -> tuple[str, str]:
    """Return formula and numbers of the optimizer step of the mean stage."""
    moved, a, host_s = (
        get_mixed_precision(spec.train.precision).update_bytes,
        timer.cluster.accelerator,
        timer.stacks.get_stack(spec).tensor_s,
    )
    pp = spec.layout.pp
    parameters = sum(count_held_parameters(spec, i) for i in range(pp)) / pp
    tensors = sum(count_tensors(spec, i) for i in range(pp)) / pp
    numbers = f"{moved} x {parameters:,.0f} B at {a.bytes_per_s / 1e9:,.4g} GB/s x {a.memory_efficiency}"
    numbers += f" + {tensors:,.4g} x {host_s * 1e6:.4g} us" if host_s else ""
    return f"{moved} B per parameter + tensors x host time{', mean over stages' if pp > 1 else ''}", numbers


def _tera(rate: float) -> str:
    tera = rate / 1e12
    return f"{tera:,.0f} TFLOP/s" if tera >= 1000 else f"{tera:.4g} TFLOP/s"


def _utilisation(spec: JobSpec, timer: Timer, timing: Timing, kind: str) -> Explanation:
    peak = timer.get_peak_flops(spec)
    ranks = spec.layout.world_size
    below = f"{ranks:,} x {_tera(peak)} x {timing.step_s:.4g} s"
    windowed = spec.model.num_windowed_layers
    seen = f"windowed attention in {windowed} of {spec.model.num_layers} layers" if windowed else "full attention"
    palm = f"PaLM 2204.02311 appendix B: {seen}, no recompute"
    buffers = spec.model.moe is not None and spec.model.moe.capacity_factor is not None
    carried = "model FLOPs + recompute" + (" + padding of expert buffers" if buffers else "")
    terms = [
        _term("model FLOPs", "3 x forward", "", compute_model_flops(spec), "FLOP", palm),
        _term("hardware FLOPs", carried, "", compute_hardware_flops(spec), "FLOP", "2205.05198 equation 8"),
        _term("MFU", "model FLOPs / (ranks x peak x step)", below, timing.mfu, "", palm),
        _term("HFU", "hardware FLOPs / (ranks x peak x step)", below, timing.hfu, "", "2205.05198 section 6.3"),
    ]
    return Explanation(figure="MFU", stage=None, value=timing.mfu, unit="", kind=kind, terms=terms)
