"""List the parts of a benchmark of this machine with their predictions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

from benchmarks.gpu.layouts import get_num_ranks
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.plan import (
    GIB,
    MAX_MEMORY_SHARE,
    NO_GPU,
    START_S,
    BenchmarkModel,
    RejectedSpecError,
    Tree,
    build_spec,
    build_training_part,
    explain_unknown_device,
    predict_reserved_bytes,
    predict_reserved_gib,
    predict_tensor_bytes,
)
from benchmarks.gpu.rates import LAUNCH, predict_rates
from benchmarks.gpu.running import BenchmarkPart, build_torchrun_command
from benchmarks.gpu.speed import SMALL_SPEED, SPEED, list_speed_parts
from tests.parity.cases import CORE_ONCE, LAYOUTS

SHARING = 4  # ranks, each a separate host for NCCL
MAX_MEMORY_ERROR = 0.05  # the goal of `make memory`
# In addition to START_S. These are generous estimates.
METERING_S, WIRE_S, RATES_S, LAYOUTS_S = 20.0, 15.0, 10.0, 60.0
STEP_S = 1.0  # of a model that is small

LLAMA = {"preset": "llama-mini"}
MIXTURE = {**LLAMA, "moe": {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 256}}
MEMORY = (
    BenchmarkModel("gpt2", {"preset": "gpt2"}, 1024, 4),
    BenchmarkModel("llama3-1b", {"preset": "llama3-1b"}, 2048, 2),
)
NOT_SMALL = ("zero1", "zero2", "tp")  # each a part of what another layout does


def list_parts(machine: Machine, *, small: bool) -> list[BenchmarkPart]:
    """Return the parts in the order in which they run: the most informative first, the open-ended one last."""
    return [
        _list_metering_parts(machine),
        *_list_wire_parts(machine),
        _list_rate_parts(machine, small=small),
        *_list_memory_parts(machine, SMALL_SPEED if small else MEMORY),
        *list_speed_parts(machine, SMALL_SPEED if small else SPEED),
        *_list_parity_parts(machine, small=small),
        _list_layout_parts(machine, small=small),
    ]


def list_layouts(world: int) -> dict[str, tuple[Tree, Tree]]:
    """Return (layout, model) by name for this number of ranks: each axis alone, and combinations."""
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


def _list_metering_parts(machine: Machine) -> BenchmarkPart:
    """Compare the meter on several ranks, because a single rank sends nothing."""
    ranks = max(machine.ranks, SHARING) if machine.device == "cuda" else machine.ranks
    argv = build_torchrun_command(ranks, "benchmarks.gpu.metering", "--device", machine.device)
    title = f"Meter compared with the profiler, {'NCCL' if machine.device == 'cuda' else 'gloo'}, {ranks} ranks"
    return BenchmarkPart("metering", title, argv, START_S + METERING_S, notes=_count_shared_ranks(machine, ranks))


def _count_shared_ranks(machine: Machine, ranks: int) -> tuple[str, ...]:
    return (f"{ranks} ranks share {machine.ranks} GPUs, so NCCL uses sockets",) if ranks > machine.ranks else ()


def _list_wire_parts(machine: Machine) -> Iterator[BenchmarkPart]:
    for name, words, own in (
        ("wire-simple", "NCCL protocol Simple", ("--simple",)),
        ("wire", "default NCCL protocol", ()),
    ):
        title = f"Loopback bytes compared with the meter, {words}, {SHARING} ranks"
        if machine.device == "cpu":
            yield BenchmarkPart(name, title, skip=NO_GPU)
            continue
        argv = build_torchrun_command(SHARING, "benchmarks.gpu.wire", "--device", "cuda", *own)
        yield BenchmarkPart(name, title, argv, START_S + WIRE_S)


def _list_parity_parts(machine: Machine, *, small: bool) -> Iterator[BenchmarkPart]:
    for name, (layout, model) in list_layouts(machine.ranks).items():
        if small and name in NOT_SMALL:
            continue
        batch = 4 * machine.ranks
        micro_batches = machine.ranks * (2 if layout.get("pp", 1) > 1 else 1) // layout.get("dp", 1) or 1
        train = {"precision": "bf16", "global_batch": batch, "micro_batches": micro_batches, "seq_len": 128, "steps": 5}
        title = f"Parity in bf16: {name}, {machine.ranks} ranks"
        try:
            spec = build_spec(machine, model, layout, {**train, "verify": "on"})
        except RejectedSpecError as error:
            yield BenchmarkPart(f"parity-{name}", title, skip=str(error))
            continue
        yield build_training_part(machine, f"parity-{name}", title, spec, "parity", STEP_S, {})


def _list_layout_parts(machine: Machine, *, small: bool) -> BenchmarkPart:
    """Run the parity layouts. If they have more ranks than the machine has GPUs, ranks share GPUs."""
    if machine.device == "cpu":
        return BenchmarkPart(
            "layouts", "Layouts compared with the reference", skip=f"{NO_GPU}; `make parity` runs them on CPUs"
        )
    names = CORE_ONCE if small else LAYOUTS
    argv = (sys.executable, "-m", "benchmarks.gpu.layouts", "--device", "cuda", *names)
    title = f"{len(names)} layouts compared with the single-process reference, fp32"
    notes = _count_shared_ranks(machine, max(get_num_ranks(name) for name in names))
    return BenchmarkPart("layouts", title, argv, START_S + LAYOUTS_S, math.inf, notes=notes, of_pieces=True)


def _list_rate_parts(machine: Machine, *, small: bool) -> BenchmarkPart:
    title = f"Rates of one {machine.name}"
    expected_s, sizes = START_S + RATES_S, ["--small"] if small else []
    argv = (sys.executable, "-m", "benchmarks.gpu.rates", "--device", machine.device, *sizes)
    if machine.device == "cpu":
        return BenchmarkPart(
            "rates", title, argv, expected_s, notes=("No predictions, because the CPU has no data sheet",)
        )
    if machine.cluster is None:
        return BenchmarkPart("rates", title, argv, expected_s, notes=(explain_unknown_device(machine),))
    accelerator = machine.cluster.accelerator
    result = {**predict_rates(accelerator, small=small), LAUNCH: accelerator.launch_s * 1e6}
    peaks = ["--peak-flops", str(accelerator.bf16_flops)]
    if accelerator.fp8_flops:
        peaks += ["--peak-fp8", str(accelerator.fp8_flops)]
    return BenchmarkPart("rates", title, (*argv, *peaks), expected_s, predicted=result)


def _list_memory_parts(machine: Machine, sizes: tuple[BenchmarkModel, ...]) -> Iterator[BenchmarkPart]:
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
                yield BenchmarkPart(part, title, skip=NO_GPU)
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
                spec = build_spec(machine, size.model, layout, {**train, "verify": "off"})
            except RejectedSpecError as error:
                yield BenchmarkPart(part, title, skip=str(error))
                continue
            if predict_reserved_bytes(spec, machine) > machine.memory_bytes * MAX_MEMORY_SHARE:
                yield BenchmarkPart(
                    part, title, skip=f"needs {predict_reserved_bytes(spec, machine) / GIB:.1f} GiB a rank"
                )
                continue
            result = {
                "allocated, GiB": predict_tensor_bytes(spec, machine) / GIB,
                "reserved, GiB": predict_reserved_gib(spec, machine),
            }
            more = {"predicted": result, "within": {"allocated, GiB": MAX_MEMORY_ERROR}}
            yield build_training_part(machine, part, title, spec, "memory", STEP_S, more)
