"""Compare training speed with the plan: fp32 masters, all bf16, and fp8, eager and compiled.

The kernels of a step are profiled in the same process, in which the model is compiled and warm.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import product

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import (
    GIB,
    MAX_MEMORY_SHARE,
    NO_GPU,
    BenchmarkModel,
    RejectedSpecError,
    Tree,
    build_spec,
    build_training_part,
    explain_unknown_device,
    predict_reserved_bytes,
    predict_tensor_bytes,
)
from benchmarks.gpu.running import BenchmarkPart
from contracts.telemetry.items import WARMUP_STEPS
from planner.cost.estimate import estimate
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec
from planner.hardware.stacks import STACKS

SPEED = (
    BenchmarkModel("gpt2-xl", {"preset": "gpt2-xl"}, 1024, 8),
    BenchmarkModel("llama3-8b", {"preset": "llama3-8b"}, 4096, 4),
)
SMALL_SPEED = (BenchmarkModel("llama-tiny", {"preset": "llama-tiny"}, 128, 2),)
STATES = {  # the most telling first
    "bf16": "fp32 gradients and masters",
    "bf16_state": "everything in bf16",
    "fp8": "fp8 products, fp32 gradients and masters",
}
MICRO_BATCHES = 4
STEPS = WARMUP_STEPS + 5  # the result is their median
UNKNOWN_STEP_S = 2.0  # where the planner does not know the accelerator


def list_speed_parts(machine: Machine, sizes: tuple[BenchmarkModel, ...]) -> Iterator[BenchmarkPart]:
    for (precision, state), size, compiles in product(STATES.items(), sizes, (False, True)):
        how = "compiled" if compiles else "eager"
        part, title = f"speed-{size.name}-{precision}-{how}", f"MFU: {size.name}, {state}, {how}"
        if compiles and machine.device == "cpu":
            yield BenchmarkPart(part, title, skip=NO_GPU)
            continue
        if precision == "fp8" and (why := _explain_missing_fp8(machine)):
            yield BenchmarkPart(part, title, skip=why)
            continue
        try:
            fitted = _fit_spec(machine, size, {"precision": precision, "compile": compiles})
        except RejectedSpecError as error:
            yield BenchmarkPart(part, title, skip=str(error))
            continue
        if fitted is None:
            yield BenchmarkPart(part, title, skip="one layer of it does not fit")
            continue
        spec, notes = fitted
        predicted = _predict_speed(spec, machine)
        step_s = predicted["step, ms"] / 1e3 if "step, ms" in predicted else UNKNOWN_STEP_S
        more = {"predicted": predicted, "notes": (*notes, *_describe_basis(spec, machine))}
        yield build_training_part(machine, part, title, spec, "speed", step_s, more)


def _explain_missing_fp8(machine: Machine) -> str:
    """Return the reason why matmuls do not run in fp8. A CPU tries fp8."""
    if machine.device == "cpu" or (machine.cluster and machine.cluster.accelerator.fp8_flops):
        return ""
    return f"no product in fp8 is known of {machine.name}"


def _fit_spec(machine: Machine, size: BenchmarkModel, train: Tree) -> tuple[JobSpec, tuple[str, ...]] | None:
    """Return the largest micro-batch of the whole model that fits, or as many layers as fit."""
    layout = {} if machine.ranks == 1 else {"dp": machine.ranks, "zero": 3}

    def spec(layers: int | None, micro_batch: int) -> JobSpec:
        model = {**size.model, **({"num_layers": layers} if layers else {})}
        batch = {"global_batch": micro_batch * MICRO_BATCHES * machine.ranks, "micro_batches": MICRO_BATCHES}
        own = {**train, **batch, "seq_len": size.seq_len, "steps": STEPS, "verify": "off"}
        return build_spec(machine, model, layout, own)

    def fits(candidate: JobSpec) -> bool:
        return (
            machine.device == "cpu"
            or predict_reserved_bytes(candidate, machine) <= machine.memory_bytes * MAX_MEMORY_SHARE
        )

    micro_batch = size.micro_batch
    while micro_batch:
        if fits(whole := spec(None, micro_batch)):
            return whole, _format_title(whole, micro_batch)
        micro_batch //= 2
    total = spec(None, 1).model.num_layers
    layers = bisect_left(range(1, total), True, key=lambda layers: not fits(spec(layers, 1)))
    if not layers:
        return None
    cut = spec(layers, 1)
    return cut, (f"cut to {layers} of {total} layers, which fit", *_format_title(cut, 1))


def _format_title(spec: JobSpec, micro_batch: int) -> tuple[str, ...]:
    layout, train = spec.layout, spec.train
    ranks = f"dp {layout.dp} ZeRO-{layout.zero}" if layout.zero else "one rank"
    return (f"{ranks}, {train.micro_batches} micro-batches of {micro_batch} x {train.seq_len} tokens",)


def _predict_speed(spec: JobSpec, machine: Machine) -> dict[str, float]:
    tensors = {"most allocated, GiB": predict_tensor_bytes(spec, machine) / GIB} if machine.device == "cuda" else {}
    if machine.cluster is None:
        return tensors
    result = estimate(spec, machine.cluster)["time"]
    return {
        "step, ms": result["step_s"] * 1e3,
        "tokens/s": result["tokens_per_s"],
        "TFLOP/s a rank": result["model_flops"] / result["step_s"] / machine.ranks / 1e12,
        "MFU, %": result["mfu"] * 100,
        **tensors,
    }


def _describe_basis(spec: JobSpec, machine: Machine) -> tuple[str, ...]:
    if machine.cluster is None:
        return (explain_unknown_device(machine),)
    title = STACKS[spec.resources.stack].title
    peak = machine.cluster.accelerator.get_peak_flops(kind := get_mixed_precision(spec.train.precision).gemm)
    sheet = machine.cluster.accelerator.name if machine.ranks == 1 else machine.cluster.name  # its links too
    by = f"predicted for {sheet} by data sheet, software: {title}"
    return (by, f"MFU of {kind}'s dense peak, {peak / 1e12:,.4g} TFLOP/s")
