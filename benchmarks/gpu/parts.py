"""The list of parts for a machine, each with what is predicted of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from benchmarks.gpu.layouts import spec_of
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rates import LAUNCH, predictions
from benchmarks.gpu.running import Part, torchrun
from planner.cost.estimate import estimate
from planner.facts.precision import mix_of
from planner.facts.reading.parse import parse_spec
from planner.facts.reading.runnable import not_runnable
from planner.facts.resources import StackName
from planner.facts.spec import JobSpec, SpecError
from planner.hardware.cluster import Cluster
from planner.hardware.clusters import CLUSTERS
from planner.hardware.stacks import STACKS
from tests.parity.cases import CORE_ONCE, LAYOUTS

NO_GPU = "no GPU"
SHARING = 4  # ranks that are hosts of their own to NCCL
MEMORY_WITHIN = 0.05  # the goal of `make memory`
ROOM = 0.92  # of a device's memory, that a plan may fill
GIB = 2**30

Tree = dict[str, Any]


class RefusedError(ValueError):
    """So many ranks make no such layout, or the trainer does not do what it asks for."""


class Size(NamedTuple):
    """A model and its batch: one to be measured, and a tiny one that any machine runs."""

    name: str
    model: Tree
    seq_len: int
    micro_batch: int


LLAMA = {"preset": "llama-mini"}
MIXTURE = {**LLAMA, "moe": {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 256}}
SPEED = (Size("gpt2-xl", {"preset": "gpt2-xl"}, 1024, 8), Size("llama3-8b", {"preset": "llama3-8b"}, 4096, 4))
SMALL_SPEED = (Size("llama-tiny", {"preset": "llama-tiny"}, 128, 2),)
MEMORY = (Size("gpt2", {"preset": "gpt2"}, 1024, 4), Size("llama3-1b", {"preset": "llama3-1b"}, 2048, 2))
STATES = {  # the most telling first
    "bf16": "fp32 gradients and masters",
    "fp8": "fp8 products, fp32 gradients and masters",
    "bf16_state": "everything in bf16",
    "bf16_gradients": "bf16 gradients, fp32 masters",
}
MICRO_BATCHES = 4
NOT_SMALL = ("zero1", "zero2", "tp")  # each a part of what another layout does
LAYOUTS_A_PART = 16  # a part that is cut begins anew


def all_parts(machine: Machine, *, small: bool) -> list[Part]:
    """In the order they run: what tells most of a machine first, and what takes as long as there is time last."""
    return [
        _metering(machine),
        *_wire(machine),
        _rates(machine, small=small),
        *_memory(machine, SMALL_SPEED if small else MEMORY),
        *_speed(machine, SMALL_SPEED if small else SPEED),
        *_kernels(machine, SMALL_SPEED if small else SPEED),
        *_parity(machine, small=small),
        *_layouts(machine, small=small),
    ]


def layouts(world: int) -> dict[str, tuple[Tree, Tree]]:
    """Name to (layout, model) of what so many ranks can be: each axis alone, and what they make together."""
    if world == 1:
        return {"one": ({}, LLAMA), "mixture": ({}, MIXTURE)}
    found: dict[str, tuple[Tree, Tree]] = {
        "dp": ({"dp": world}, LLAMA),
        "zero1": ({"dp": world, "zero": 1}, LLAMA),
        "zero2": ({"dp": world, "zero": 2}, LLAMA),
        "zero3": ({"dp": world, "zero": 3}, LLAMA),
        "tp": ({"tp": world}, LLAMA),
        "tp-sp": ({"tp": world, "sequence_parallel": True}, LLAMA),
        "pp": ({"pp": world}, LLAMA),
        "cp": ({"cp": world}, LLAMA),
        "ep": ({"dp": world, "ep": world}, MIXTURE),
    }
    if world % 4 == 0:
        found["dp-tp"] = ({"dp": world // 2, "tp": 2}, LLAMA)
        found["zero3-tp-pp"] = ({"dp": world // 4, "tp": 2, "pp": 2}, LLAMA)
        if world > 4:
            found["zero3-tp-pp"][0]["zero"] = 3
    return found


def _spec(machine: Machine, model: Tree, layout: Tree, train: Tree) -> JobSpec:
    """Raises RefusedError where so many ranks cannot be laid out so, and where the trainer does not do it."""
    resources, train = {"device": machine.device}, {"eval_every": 0, "warmup_steps": 2, **train}
    try:
        spec = parse_spec({"model": model, "layout": layout, "train": train, "resources": resources})
    except SpecError as error:
        if all(problem.field.startswith("layout") for problem in error.problems):
            raise RefusedError(f"not possible on {machine.ranks} ranks: {error}") from None
        raise
    if refused := not_runnable(spec):
        raise RefusedError(str(SpecError(refused)))
    return spec


def _training(
    machine: Machine, name: str, title: str, spec: JobSpec, purpose: str, limit_s: float, more: Mapping[str, Any]
) -> Part:
    own = ("--device", machine.device, "--limit", str(limit_s), "--purpose", purpose, "--spec", spec.model_dump_json())
    peak = machine.cluster.accelerator.peak(mix_of(spec.train.precision).gemm) if machine.cluster else None
    rates = ("--peak-flops", str(peak)) if peak and purpose == "speed" else ()
    argv = torchrun(machine.ranks, "benchmarks.gpu.training", *own, *rates)
    return Part(name, title, argv, limit_s, **more)


def _metering(machine: Machine) -> Part:
    """On several ranks, so that there is something to send."""
    limit_s, ranks = 180.0, max(machine.ranks, SHARING) if machine.device == "cuda" else machine.ranks
    argv = torchrun(ranks, "benchmarks.gpu.metering", "--device", machine.device, "--limit", str(limit_s))
    title = f"The meter beside the profiler, {'NCCL' if machine.device == 'cuda' else 'gloo'}, {ranks} ranks"
    return Part("metering", title, argv, limit_s, notes=_shared(machine, ranks))


def _shared(machine: Machine, ranks: int) -> tuple[str, ...]:
    return (f"{ranks} ranks on {machine.ranks} GPUs: NCCL sends by sockets",) if ranks > machine.ranks else ()


def _wire(machine: Machine) -> Iterator[Part]:
    limit_s = 120.0
    for name, words, own in (("wire-simple", "NCCL without flags", ("--simple",)), ("wire", "as NCCL chose", ())):
        title = f"The loopback interface beside the meter, {words}, {SHARING} ranks"
        if machine.device == "cpu":
            yield Part(name, title, skip=NO_GPU)
            continue
        argv = torchrun(SHARING, "benchmarks.gpu.wire", "--device", "cuda", "--limit", str(limit_s), *own)
        yield Part(name, title, argv, limit_s)


def _parity(machine: Machine, *, small: bool) -> Iterator[Part]:
    for name, (layout, model) in layouts(machine.ranks).items():
        if small and name in NOT_SMALL:
            continue
        batch = 4 * machine.ranks
        micro_batches = machine.ranks * (2 if layout.get("pp", 1) > 1 else 1) // layout.get("dp", 1) or 1
        train = {"precision": "bf16", "global_batch": batch, "micro_batches": micro_batches, "seq_len": 128, "steps": 5}
        title = f"Parity in bf16: {name}, {machine.ranks} ranks"
        try:
            spec = _spec(machine, model, layout, {**train, "verify": "on"})
        except RefusedError as error:
            yield Part(f"parity-{name}", title, skip=str(error))
            continue
        yield _training(machine, f"parity-{name}", title, spec, "parity", 120, {})


def _layouts(machine: Machine, *, small: bool) -> Iterator[Part]:
    """Those of the suite's parity; more ranks than GPUs share them."""
    if machine.device == "cpu":
        yield Part("layouts", "Every layout beside one process", skip=f"{NO_GPU}; `make parity` tries them on CPUs")
        return
    for ranks in sorted({spec_of(name, "fp32").layout.world_size for name in LAYOUTS}):
        names = [name for name in (CORE_ONCE if small else LAYOUTS) if spec_of(name, "fp32").layout.world_size == ranks]
        limit_s = 300.0
        for index, first in enumerate(range(0, len(names), LAYOUTS_A_PART), start=1):
            own = ("--device", "cuda", "--limit", str(limit_s), "--ranks", str(ranks))
            argv = (sys.executable, "-m", "benchmarks.gpu.layouts", *own, *names[first : first + LAYOUTS_A_PART])
            title = f"Layouts of {ranks} ranks beside one process, in fp32, {index}"
            yield Part(f"layouts-{ranks}-{index}", title, argv, limit_s, notes=_shared(machine, ranks))


def _rates(machine: Machine, *, small: bool) -> Part:
    title = f"Rates of one {machine.name}"
    limit_s, sizes = 180.0, ["--small"] if small else []
    own = ("--device", machine.device, "--limit", str(limit_s), *sizes)
    argv = (sys.executable, "-m", "benchmarks.gpu.rates", *own)
    if machine.device == "cpu":
        return Part("rates", title, argv, limit_s, notes=("nothing is predicted: a CPU has no data sheet here",))
    if machine.cluster is None:
        return Part("rates", title, argv, limit_s, notes=(_unknown(machine),))
    accelerator = machine.cluster.accelerator
    told = {**predictions(accelerator, small=small), LAUNCH: accelerator.launch_s * 1e6}
    return Part("rates", title, (*argv, "--peak-flops", str(accelerator.bf16_flops)), limit_s, told)


def _memory(machine: Machine, sizes: tuple[Size, ...]) -> Iterator[Part]:
    shared: dict[str, Tree] = (
        {"one": {}}
        if machine.ranks == 1
        else {
            "dp": {"dp": machine.ranks},
            "zero3": {"dp": machine.ranks, "zero": 3},
            "tp": {"tp": machine.ranks},
        }
    )
    shared["full-recompute"] = {"dp": machine.ranks, "recompute": "full"}
    for size in sizes:
        for name, layout in shared.items():
            part, title = f"memory-{size.name}-{name}", f"Memory: {size.name}, {name}"
            if machine.device == "cpu":
                yield Part(part, title, skip=NO_GPU)
                continue
            batch = size.micro_batch * layout.get("dp", 1) * 2
            train = {
                "precision": "bf16",
                "seq_len": size.seq_len,
                "global_batch": batch,
                "micro_batches": 2,
                "steps": 4,
            }
            try:
                spec = _spec(machine, size.model, layout, {**train, "verify": "off"})
            except RefusedError as error:
                yield Part(part, title, skip=str(error))
                continue
            if _held(spec, machine) > machine.memory_bytes * ROOM:
                yield Part(part, title, skip=f"needs {_held(spec, machine) / GIB:.1f} GiB a rank")
                continue
            told = {
                "allocated, GiB": _tensors(spec, machine) / GIB,
                "held by the allocator, GiB": _grown(spec, machine),
            }
            more = {"predicted": told, "within": {"allocated, GiB": MEMORY_WITHIN}}
            yield _training(machine, part, title, spec, "memory", 120, more)


def _speed(machine: Machine, sizes: tuple[Size, ...]) -> Iterator[Part]:
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
        more = {"predicted": _speed_predicted(spec, machine), "notes": (*notes, *_basis(spec, machine))}
        yield _training(machine, part, title, spec, "speed", 240, more)


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
        return _spec(machine, model, layout, {**train, **batch, "seq_len": size.seq_len, "steps": 12, "verify": "off"})

    def fits(candidate: JobSpec) -> bool:
        return machine.device == "cpu" or _held(candidate, machine) <= machine.memory_bytes * ROOM

    micro_batch = size.micro_batch
    while micro_batch:
        if fits(whole := spec(None, micro_batch)):
            return whole, _words(whole, micro_batch)
        micro_batch //= 2
    total = spec(None, 1).model.num_layers
    for layers in range(total - 1, 0, -1):
        if fits(cut := spec(layers, 1)):
            return cut, (f"cut to {layers} of {total} layers, which fit", *_words(cut, 1))
    return None


def _words(spec: JobSpec, micro_batch: int) -> tuple[str, ...]:
    layout, train = spec.layout, spec.train
    ranks = f"dp {layout.dp} ZeRO-{layout.zero}" if layout.zero else "one rank"
    return (f"{ranks}, {train.micro_batches} micro-batches of {micro_batch} x {train.seq_len} tokens",)


def _cluster(machine: Machine) -> Cluster:
    """For memory, which no rate has a part in, of an unknown accelerator too."""
    return machine.cluster or CLUSTERS["h100"]


def _held(spec: JobSpec, machine: Machine) -> int:
    return estimate(spec, _cluster(machine))["peak_memory_bytes"]


def _tensors(spec: JobSpec, machine: Machine) -> int:
    """Of the stage that holds most."""
    stages = estimate(spec, _cluster(machine))["stages"]
    return max(stage["memory_bytes"] - stage["memory"]["allowance"] for stage in stages)


def _grown(spec: JobSpec, machine: Machine) -> float:
    """GiB of tensors and of what the allocator holds beside them; the context is not torch's."""
    reserved = _cluster(machine).accelerator.reserved_bytes
    return (_held(spec, machine) - reserved) / GIB


def _speed_predicted(spec: JobSpec, machine: Machine) -> dict[str, float]:
    tensors = {"most allocated, GiB": _tensors(spec, machine) / GIB} if machine.device == "cuda" else {}
    if machine.cluster is None:
        return tensors
    told = estimate(_as_planned(spec), machine.cluster)["time"]
    return {
        "step, ms": told["step_s"] * 1e3,
        "tokens/s": told["tokens_per_s"],
        "TFLOP/s a rank": told["model_flops"] / told["step_s"] / machine.ranks / 1e12,
        "MFU, %": told["mfu"] * 100,
        **tensors,
    }


def _kernels(machine: Machine, sizes: tuple[Size, ...]) -> Iterator[Part]:
    """Where a step's time goes on the device, of what `_speed` measures."""
    for size in sizes:
        for compiles in (False, True):
            how = "compiled" if compiles else "eager"
            part, title = f"kernels-{size.name}-{how}", f"Kernels of a step: {size.name}, {how}"
            if machine.device == "cpu":
                yield Part(part, title, skip=NO_GPU)
            elif fitted := _fitted(machine, size, {"precision": "bf16", "compile": compiles}):
                yield _training(machine, part, title, fitted[0], "kernels", 240, {"notes": fitted[1]})


def _as_planned(spec: JobSpec) -> JobSpec:
    """What runs here is planned for as eager; the constants of a compiled one are those of FSDP2, compiled."""
    stack: StackName = "fsdp2" if spec.train.compile else "ours"
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"stack": stack})})


def _basis(spec: JobSpec, machine: Machine) -> tuple[str, ...]:
    if machine.cluster is None:
        return (_unknown(machine),)
    title = STACKS[_as_planned(spec).resources.stack].title
    peak = machine.cluster.accelerator.peak(kind := mix_of(spec.train.precision).gemm)
    sheet = machine.cluster.accelerator.name if machine.ranks == 1 else machine.cluster.name  # its links too
    by = f"predicted for {sheet} by data sheet, software: {title}"
    return (by, f"MFU of {kind}'s dense peak, {peak / 1e12:,.4g} TFLOP/s")


def _unknown(machine: Machine) -> str:
    return f"no time is predicted: the planner knows no accelerator called {machine.name}"
