"""How fast models train here, beside the plan: with fp32 masters, all in bf16 and in fp8, eager and compiled.

Where the time of a step goes on the device is told by the same process, which has the model built, compiled and warm.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import product

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import (
    GIB,
    NO_GPU,
    ROOM,
    RefusedError,
    Size,
    Tree,
    held_bytes,
    spec_for,
    tensor_bytes,
    training_part,
    unknown,
)
from benchmarks.gpu.running import Part
from contracts.telemetry.items import WARMUP_STEPS
from planner.cost.estimate import estimate
from planner.facts.precision import get_mixed_precision
from planner.facts.spec import JobSpec
from planner.hardware.stacks import STACKS

SPEED = (Size("gpt2-xl", {"preset": "gpt2-xl"}, 1024, 8), Size("llama3-8b", {"preset": "llama3-8b"}, 4096, 4))
SMALL_SPEED = (Size("llama-tiny", {"preset": "llama-tiny"}, 128, 2),)
STATES = {  # the most telling first
    "bf16": "fp32 gradients and masters",
    "bf16_state": "everything in bf16",
    "fp8": "fp8 products, fp32 gradients and masters",
}
MICRO_BATCHES = 4
STEPS = WARMUP_STEPS + 5  # whose median is told
UNKNOWN_STEP_S = 2.0  # where the planner does not know the accelerator


def speed_parts(machine: Machine, sizes: tuple[Size, ...]) -> Iterator[Part]:
    for (precision, state), size, compiles in product(STATES.items(), sizes, (False, True)):
        how = "compiled" if compiles else "eager"
        part, title = f"speed-{size.name}-{precision}-{how}", f"MFU: {size.name}, {state}, {how}"
        if compiles and machine.device == "cpu":
            yield Part(part, title, skip=NO_GPU)
            continue
        if precision == "fp8" and (why := _without_fp8(machine)):
            yield Part(part, title, skip=why)
            continue
        try:
            fitted = _fitted(machine, size, {"precision": precision, "compile": compiles})
        except RefusedError as error:
            yield Part(part, title, skip=str(error))
            continue
        if fitted is None:
            yield Part(part, title, skip="one layer of it does not fit")
            continue
        spec, notes = fitted
        predicted = _predicted(spec, machine)
        step_s = predicted["step, ms"] / 1e3 if "step, ms" in predicted else UNKNOWN_STEP_S
        more = {"predicted": predicted, "notes": (*notes, *_basis(spec, machine))}
        yield training_part(machine, part, title, spec, "speed", step_s, more)


def _without_fp8(machine: Machine) -> str:
    """Why no product runs in fp8; on a CPU it is tried."""
    if machine.device == "cpu" or (machine.cluster and machine.cluster.accelerator.fp8_flops):
        return ""
    return f"no product in fp8 is known of {machine.name}"


def _fitted(machine: Machine, size: Size, train: Tree) -> tuple[JobSpec, tuple[str, ...]] | None:
    """The largest micro-batch of the whole model that fits; of a model too large, as many layers as do."""
    layout = {} if machine.ranks == 1 else {"dp": machine.ranks, "zero": 3}

    def spec(layers: int | None, micro_batch: int) -> JobSpec:
        model = {**size.model, **({"num_layers": layers} if layers else {})}
        batch = {"global_batch": micro_batch * MICRO_BATCHES * machine.ranks, "micro_batches": MICRO_BATCHES}
        own = {**train, **batch, "seq_len": size.seq_len, "steps": STEPS, "verify": "off"}
        return spec_for(machine, model, layout, own)

    def fits(candidate: JobSpec) -> bool:
        return machine.device == "cpu" or held_bytes(candidate, machine) <= machine.memory_bytes * ROOM

    micro_batch = size.micro_batch
    while micro_batch:
        if fits(whole := spec(None, micro_batch)):
            return whole, _words(whole, micro_batch)
        micro_batch //= 2
    total = spec(None, 1).model.num_layers
    layers = bisect_left(range(1, total), True, key=lambda layers: not fits(spec(layers, 1)))
    if not layers:
        return None
    cut = spec(layers, 1)
    return cut, (f"cut to {layers} of {total} layers, which fit", *_words(cut, 1))


def _words(spec: JobSpec, micro_batch: int) -> tuple[str, ...]:
    layout, train = spec.layout, spec.train
    ranks = f"dp {layout.dp} ZeRO-{layout.zero}" if layout.zero else "one rank"
    return (f"{ranks}, {train.micro_batches} micro-batches of {micro_batch} x {train.seq_len} tokens",)


def _predicted(spec: JobSpec, machine: Machine) -> dict[str, float]:
    tensors = {"most allocated, GiB": tensor_bytes(spec, machine) / GIB} if machine.device == "cuda" else {}
    if machine.cluster is None:
        return tensors
    told = estimate(spec, machine.cluster)["time"]
    return {
        "step, ms": told["step_s"] * 1e3,
        "tokens/s": told["tokens_per_s"],
        "TFLOP/s a rank": told["model_flops"] / told["step_s"] / machine.ranks / 1e12,
        "MFU, %": told["mfu"] * 100,
        **tensors,
    }


def _basis(spec: JobSpec, machine: Machine) -> tuple[str, ...]:
    if machine.cluster is None:
        return (unknown(machine),)
    title = STACKS[spec.resources.stack].title
    peak = machine.cluster.accelerator.get_peak_flops(kind := get_mixed_precision(spec.train.precision).gemm)
    sheet = machine.cluster.accelerator.name if machine.ranks == 1 else machine.cluster.name  # its links too
    by = f"predicted for {sheet} by data sheet, software: {title}"
    return (by, f"MFU of {kind}'s dense peak, {peak / 1e12:,.4g} TFLOP/s")
