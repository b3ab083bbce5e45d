"""The list of parts for a machine, each with what is predicted of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from benchmarks.gpu.layouts import ranks_of
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import (
    GIB,
    NO_GPU,
    ROOM,
    START_S,
    RefusedError,
    Size,
    Tree,
    grown_gib,
    held_bytes,
    spec_for,
    tensor_bytes,
    training_part,
    unknown,
)
from benchmarks.gpu.rates import LAUNCH, predictions
from benchmarks.gpu.running import Part, torchrun
from benchmarks.gpu.speed import SMALL_SPEED, SPEED, speed_parts
from tests.parity.cases import CORE_ONCE, LAYOUTS

SHARING = 4  # ranks that are hosts of their own to NCCL
MEMORY_WITHIN = 0.05  # the goal of `make memory`
# Beside START_S; guesses, on the long side.
METERING_S, WIRE_S, RATES_S, LAYOUTS_S = 20.0, 15.0, 10.0, 60.0
STEP_S = 1.0  # of a model that is small

LLAMA = {"preset": "llama-mini"}
MIXTURE = {**LLAMA, "moe": {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 256}}
MEMORY = (Size("gpt2", {"preset": "gpt2"}, 1024, 4), Size("llama3-1b", {"preset": "llama3-1b"}, 2048, 2))
NOT_SMALL = ("zero1", "zero2", "tp")  # each a part of what another layout does


def all_parts(machine: Machine, *, small: bool) -> list[Part]:
    """In the order they run: what tells most of a machine first, and what takes as long as there is time last."""
    return [
        _metering(machine),
        *_wire(machine),
        _rates(machine, small=small),
        *_memory(machine, SMALL_SPEED if small else MEMORY),
        *speed_parts(machine, SMALL_SPEED if small else SPEED),
        *_parity(machine, small=small),
        _layouts(machine, small=small),
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


def _metering(machine: Machine) -> Part:
    """On several ranks, so that there is something to send."""
    ranks = max(machine.ranks, SHARING) if machine.device == "cuda" else machine.ranks
    argv = torchrun(ranks, "benchmarks.gpu.metering", "--device", machine.device)
    title = f"Meter compared with the profiler, {'NCCL' if machine.device == 'cuda' else 'gloo'}, {ranks} ranks"
    return Part("metering", title, argv, START_S + METERING_S, notes=_shared(machine, ranks))


def _shared(machine: Machine, ranks: int) -> tuple[str, ...]:
    return (f"{ranks} ranks share {machine.ranks} GPUs, so NCCL uses sockets",) if ranks > machine.ranks else ()


def _wire(machine: Machine) -> Iterator[Part]:
    for name, words, own in (
        ("wire-simple", "NCCL protocol Simple", ("--simple",)),
        ("wire", "default NCCL protocol", ()),
    ):
        title = f"Loopback bytes compared with the meter, {words}, {SHARING} ranks"
        if machine.device == "cpu":
            yield Part(name, title, skip=NO_GPU)
            continue
        argv = torchrun(SHARING, "benchmarks.gpu.wire", "--device", "cuda", *own)
        yield Part(name, title, argv, START_S + WIRE_S)


def _parity(machine: Machine, *, small: bool) -> Iterator[Part]:
    for name, (layout, model) in layouts(machine.ranks).items():
        if small and name in NOT_SMALL:
            continue
        batch = 4 * machine.ranks
        micro_batches = machine.ranks * (2 if layout.get("pp", 1) > 1 else 1) // layout.get("dp", 1) or 1
        train = {"precision": "bf16", "global_batch": batch, "micro_batches": micro_batches, "seq_len": 128, "steps": 5}
        title = f"Parity in bf16: {name}, {machine.ranks} ranks"
        try:
            spec = spec_for(machine, model, layout, {**train, "verify": "on"})
        except RefusedError as error:
            yield Part(f"parity-{name}", title, skip=str(error))
            continue
        yield training_part(machine, f"parity-{name}", title, spec, "parity", STEP_S, {})


def _layouts(machine: Machine, *, small: bool) -> Part:
    """Those of the suite's parity; more ranks than GPUs share them."""
    if machine.device == "cpu":
        return Part("layouts", "Layouts compared with the reference", skip=f"{NO_GPU}; `make parity` runs them on CPUs")
    names = CORE_ONCE if small else LAYOUTS
    argv = (sys.executable, "-m", "benchmarks.gpu.layouts", "--device", "cuda", *names)
    title = f"{len(names)} layouts compared with the single-process reference, fp32"
    notes = _shared(machine, max(ranks_of(name) for name in names))
    return Part("layouts", title, argv, START_S + LAYOUTS_S, math.inf, notes=notes, of_pieces=True)


def _rates(machine: Machine, *, small: bool) -> Part:
    title = f"Rates of one {machine.name}"
    expected_s, sizes = START_S + RATES_S, ["--small"] if small else []
    argv = (sys.executable, "-m", "benchmarks.gpu.rates", "--device", machine.device, *sizes)
    if machine.device == "cpu":
        return Part("rates", title, argv, expected_s, notes=("No predictions, because the CPU has no data sheet",))
    if machine.cluster is None:
        return Part("rates", title, argv, expected_s, notes=(unknown(machine),))
    accelerator = machine.cluster.accelerator
    told = {**predictions(accelerator, small=small), LAUNCH: accelerator.launch_s * 1e6}
    peaks = ["--peak-flops", str(accelerator.bf16_flops)]
    if accelerator.fp8_flops:
        peaks += ["--peak-fp8", str(accelerator.fp8_flops)]
    return Part("rates", title, (*argv, *peaks), expected_s, predicted=told)


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
                spec = spec_for(machine, size.model, layout, {**train, "verify": "off"})
            except RefusedError as error:
                yield Part(part, title, skip=str(error))
                continue
            if held_bytes(spec, machine) > machine.memory_bytes * ROOM:
                yield Part(part, title, skip=f"needs {held_bytes(spec, machine) / GIB:.1f} GiB a rank")
                continue
            told = {
                "allocated, GiB": tensor_bytes(spec, machine) / GIB,
                "reserved, GiB": grown_gib(spec, machine),
            }
            more = {"predicted": told, "within": {"allocated, GiB": MEMORY_WITHIN}}
            yield training_part(machine, part, title, spec, "memory", STEP_S, more)
