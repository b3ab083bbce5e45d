"""Measure matmuls, memory-bound kernels, layers, the optimizer, and collectives, on one rank or several at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from contracts.telemetry.items import Op
from planner.facts.model_shapes import Parameter, get_layer_parameters
from planner.facts.placements import TensorPlacement
from planner.facts.precision import GemmType
from planner.facts.presets import PRESETS
from planner.facts.spec import ModelSpec, TrainSpec
from planner.hardware.profile import (
    CollectivePoint,
    EndsPoint,
    GemmPoint,
    LayerPoint,
    MeasuredPrecision,
    OptimizerPoint,
    StreamPoint,
)
from workers.rank_environment import get_group_timeout
from workers.trainer.model import Decoder, Strategy
from workers.trainer.optimizer import build_optimizer, clip_gradients, compute_gradient_square_sum, update_weights
from workers.trainer.parallel.data_parallel import DataParallel
from workers.trainer.parallel.matmul import UNQUANTIZED, Fp8Matmuls
from workers.trainer.parallel.parallelize import ModelShard, ShardedParameter
from workers.trainer.parallel.tensor_parallel import TensorParallel

MIN_RUNS = 3
WINDOW_S = 0.15  # long enough that ranks which start together overlap
SEQ_LEN = 128
DEPTH = 4  # consecutive layers, so that no cache contains more than in a step
OPTIMIZER_ROUNDS = 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
PAYLOAD_BYTES = {"cpu": [2**10, 2**16, 2**20, 2**22], "cuda": [2**14, 2**20, 2**24, 2**27]}
COLLECTIVE_ROUNDS = 10
Call = Callable[[], object]


@dataclass(frozen=True)
class ActiveRanks:
    """The first `ranks` ranks, which are active while the others wait."""

    ranks: int
    device: torch.device
    window_s: float
    group: dist.ProcessGroup
    subgroups: dict[int, dist.ProcessGroup]  # of this rank and its neighbors, by size

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of the subgroups."""
        return get_group_sizes(self.ranks)


def get_group_sizes(ranks: int) -> list[int]:
    return [size for size in (2, 4, 8, 16) if ranks % size == 0]


def create_active_ranks(ranks: int, device: torch.device, window_s: float) -> ActiveRanks:
    """Create the groups of the first `ranks` ranks. All ranks of the world call this."""
    rank = dist.get_rank()
    group = dist.new_group(list(range(ranks)), timeout=get_group_timeout())
    subgroups = {}
    for size in get_group_sizes(ranks):
        rows = [list(range(first, first + size)) for first in range(0, ranks, size)]
        groups = [dist.new_group(members, timeout=get_group_timeout()) for members in rows]
        if rank < ranks:
            subgroups[size] = groups[rank // size]
    return ActiveRanks(ranks, device, window_s, group, subgroups)


def time_runs(work: Callable[[], object], active: ActiveRanks) -> float:
    """Return the mean seconds of consecutive runs in a window, the same number on each active rank."""
    _time_calls(work, 1, active.device)
    once = torch.tensor(_time_calls(work, 1, active.device))
    dist.all_reduce(once, dist.ReduceOp.MAX, group=active.group)
    runs = max(MIN_RUNS, math.ceil(active.window_s / float(once)))
    return _time_calls(work, runs, active.device) / runs


def measure_slowest(work: Callable[[], dict[str, float]], active: ActiveRanks) -> dict[str, float] | None:
    """Run `work` on all active ranks at once. Return the values of the slowest on rank 0, None on the others."""
    rank = dist.get_rank()
    dist.barrier()
    own = work() if rank < active.ranks else None
    gathered: list[dict[str, float] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    if rank != 0:
        return None
    measured = [values for values in gathered if values is not None]
    return {name: max(values[name] for values in measured) for name in measured[0]}


def measure_added_seconds(
    work: Callable[[], object], between: Callable[[], object], rounds: int, active: ActiveRanks
) -> float:
    """Return the seconds that `work` adds to a round of compute on the slowest rank.

    A step alternates the two, so caches contain other data, and on shared cores a rank waits for other ranks.
    Consecutive runs would hide both effects. The fastest single call is a lower bound if the difference is noisy.
    """

    def both() -> None:
        between()
        work()

    def time_rounds(call: Callable[[], object]) -> float:
        _time_calls(call, 1, active.device)
        dist.barrier(active.group)
        return _time_calls(call, rounds, active.device) / rounds

    alone, with_work = (_get_slowest(partial(time_rounds, call), active) for call in (between, both))
    fastest = _get_slowest(lambda: min(_time_calls(work, 1, active.device) for _ in range(rounds)), active)
    return max(fastest, with_work - alone)


def _get_slowest(measure: Callable[[], float], active: ActiveRanks) -> float:
    """Return the largest value of all active ranks."""
    values: list[float] = [0.0] * active.ranks
    dist.all_gather_object(values, measure(), group=active.group)
    return max(values)


def _time_calls(work: Callable[[], object], runs: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(runs):
        work()
    if device.type == "cuda":  # only once, because a synchronization takes longer than a small kernel
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


class DeviceCases(NamedTuple):
    """Cases to measure on a kind of device."""

    gemm: tuple[tuple[int, int], ...]  # (m, k)
    gemm_types: tuple[GemmType, ...]
    stream: tuple[int, ...]  # bytes read and written
    presets: tuple[str, ...]  # models whose layers are timed in `precisions`
    micro_batches: tuple[int, ...]
    precisions: tuple[MeasuredPrecision, ...]


DEVICE_CASES = {
    "cpu": DeviceCases(
        gemm=((64, 128), (256, 256), (512, 512), (1024, 1024)),
        gemm_types=("fp32", "bf16", "fp8"),
        stream=(2**10, 2**16, 2**20, 2**24),
        presets=("gpt-tiny", "gpt-mini", "llama-tiny", "llama-mini"),
        micro_batches=(1, 4),
        precisions=("fp32",),
    ),
    "cuda": DeviceCases(
        gemm=((1024, 1024), (4096, 4096), (8192, 8192), (16384, 8192)),
        gemm_types=("fp32", "bf16"),
        stream=(2**16, 2**24, 2**28, 2**30),
        presets=("gpt2", "gpt2-xl", "llama3-8b"),
        micro_batches=(1, 8, 32),
        precisions=("fp32", "bf16"),
    ),
}


def measure_gemms(active: ActiveRanks) -> Iterator[GemmPoint]:
    """Measure (m, k) x (k, k) matmuls."""
    for precision in DEVICE_CASES[active.device.type].gemm_types:
        products = Fp8Matmuls() if precision == "fp8" else UNQUANTIZED
        for m, k in DEVICE_CASES[active.device.type].gemm:
            a, b = (torch.randn(shape, device=active.device).to(DTYPES[precision]) for shape in ((m, k), (k, k)))
            seconds = measure_slowest(partial(_time_alone, partial(products.outputs, a, [b], [None]), active), active)
            if seconds is not None:
                yield GemmPoint(ranks=active.ranks, precision=precision, m=m, n=k, k=k, seconds=seconds["s"])


def measure_streams(active: ActiveRanks) -> Iterator[StreamPoint]:
    """Measure x * 2 into another buffer."""
    for size in DEVICE_CASES[active.device.type].stream:
        x = torch.ones(size // 8, device=active.device)
        out = torch.empty_like(x)
        seconds = measure_slowest(partial(_time_alone, partial(torch.mul, x, 2.0, out=out), active), active)
        if seconds is not None:
            yield StreamPoint(ranks=active.ranks, num_bytes=size, seconds=seconds["s"])


def measure_layers(active: ActiveRanks) -> Iterator[LayerPoint]:
    """Measure one layer of each preset, forward and backward, at each TP degree. Mean of several layers."""
    for case in _iterate_cases(active):
        model, batch = case.model, case.micro_batch
        block = _decoder(case, active, layers=DEPTH)
        seq_len = SEQ_LEN // (case.tp if case.sequence_parallel else 1)
        x = torch.randn((batch, seq_len, model.hidden_size), device=active.device, dtype=DTYPES[case.precision])
        gradient = torch.ones_like(x)

        def hidden(block: Decoder = block, x: torch.Tensor = x) -> torch.Tensor:
            return block(x.detach().requires_grad_())  # type: ignore[no-any-return]

        seconds = measure_slowest(partial(_time_forward_backward, hidden, block, gradient, active), active)
        if seconds is not None:
            yield LayerPoint(
                **_get_common_fields(case, active),
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                ffn_hidden_size=model.ffn_hidden_size,
                forward_s=seconds["forward"] / DEPTH,
                backward_s=seconds["backward"] / DEPTH,
            )


def measure_ends(active: ActiveRanks) -> Iterator[EndsPoint]:
    """Measure embedding, final norm, head and loss of each preset."""
    for case in _iterate_cases(active):
        ends = _decoder(case, active, layers=0)
        tokens = torch.randint(0, case.model.vocab_size, (case.micro_batch, SEQ_LEN), device=active.device)

        def loss(ends: Decoder = ends, tokens: torch.Tensor = tokens) -> torch.Tensor:
            return ends.loss_sum(ends(tokens), tokens)

        seconds = measure_slowest(partial(_time_forward_backward, loss, ends, None, active), active)
        if seconds is not None:
            yield EndsPoint(
                **_get_common_fields(case, active),
                vocab_size=case.model.vocab_size,
                forward_s=seconds["forward"],
                backward_s=seconds["backward"],
            )


def measure_optimizer(active: ActiveRanks) -> Iterator[OptimizerPoint]:
    """Measure gradient clipping and the optimizer update for the tensors of each preset."""
    for name in DEVICE_CASES[active.device.type].presets[:2]:
        model = PRESETS[name].model
        shapes = [p.shape for p in get_layer_parameters(model)] * min(model.num_layers, 8)
        tensors = [torch.nn.Parameter(torch.randn(shape, device=active.device)) for shape in shapes]
        whole = TensorPlacement(None, None, None)
        parameters = [ShardedParameter("", Parameter("", tuple(x.shape), None), whole, x, x, x, 1) for x in tensors]
        part = ModelShard({}, parameters, DataParallel(), torch.float32)
        optimizer = build_optimizer(part, TrainSpec())
        gradients = [torch.ones_like(tensor) for tensor in tensors]
        step = partial(_run_optimizer_step, part, optimizer, gradients)
        seconds = measure_slowest(partial(_time_between_layers, step, active), active)
        if seconds is not None:
            numel = sum(t.numel() for t in tensors)
            yield OptimizerPoint(
                ranks=active.ranks, num_parameters=numel, num_tensors=len(tensors), seconds=seconds["s"]
            )


class LayerCase(NamedTuple):
    """Layers of a model on one rank of a TP group."""

    precision: MeasuredPrecision
    model: ModelSpec
    tp: int
    sequence_parallel: bool
    micro_batch: int


def _iterate_cases(active: ActiveRanks) -> Iterator[LayerCase]:
    """Yield all combinations to measure."""
    sizes = DEVICE_CASES[active.device.type]
    for precision in sizes.precisions:
        for name in sizes.presets:
            model = PRESETS[name].model
            for tp in (1, *active.sizes):
                if model.num_kv_heads % tp or model.vocab_size % tp or SEQ_LEN % tp:
                    continue
                for sequence_parallel in (False, True)[: 1 + (tp > 1)]:
                    for batch in sizes.micro_batches:
                        yield LayerCase(precision, model, tp, sequence_parallel, batch)


def _decoder(case: LayerCase, active: ActiveRanks, *, layers: int) -> Decoder:
    """Build layers of the trainer. With `layers` 0, build only embedding, head and loss."""
    group = active.subgroups.get(case.tp)
    strategy = Strategy(tp=TensorParallel(group, case.tp, dist.get_rank() % case.tp, case.sequence_parallel))
    dtype, ends = DTYPES[case.precision], layers == 0
    decoder = Decoder(case.model, range(layers), strategy, dtype, first=ends, last=ends).to(active.device, dtype)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return decoder


def _get_common_fields(case: LayerCase, active: ActiveRanks) -> dict[str, Any]:
    return {
        "ranks": active.ranks,
        "precision": case.precision,
        "arch": case.model.arch,
        "hidden_size": case.model.hidden_size,
        "tp": case.tp,
        "sequence_parallel": case.sequence_parallel,
        "micro_batch": case.micro_batch,
        "seq_len": SEQ_LEN,
    }


def _run_optimizer_step(part: ModelShard, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for held, gradient in zip(part.parameters, gradients, strict=True):
        held.gradient_holder.grad = gradient
    norm = float(compute_gradient_square_sum(part)) ** 0.5
    clip_gradients(part, norm, 0.999 * norm)
    update_weights(part, optimizer)


def _time_alone(work: Callable[[], object], active: ActiveRanks) -> dict[str, float]:
    return {"s": time_runs(work, active)}


def _time_between_layers(work: Callable[[], object], active: ActiveRanks) -> dict[str, float]:
    return {"s": measure_added_seconds(work, build_layers(active), OPTIMIZER_ROUNDS, active)}


def build_layers(active: ActiveRanks) -> Callable[[], object]:
    """Return a call of forward and backward through layers of the smallest preset, to run between other work."""
    model = PRESETS[DEVICE_CASES[active.device.type].presets[0]].model
    block = _decoder(LayerCase("fp32", model, 1, False, 1), active, layers=DEPTH)
    x = torch.randn((1, SEQ_LEN, model.hidden_size), device=active.device)
    gradient = torch.ones_like(x)

    def run_forward_backward() -> None:
        torch.autograd.backward(block(x.detach().requires_grad_()), gradient)
        block.zero_grad(set_to_none=True)

    return run_forward_backward


def _time_forward_backward(
    forward: Callable[[], torch.Tensor], module: torch.nn.Module, gradient: torch.Tensor | None, active: ActiveRanks
) -> dict[str, float]:
    """Return the seconds of forward, and of backward as the difference from a full step."""

    def step() -> None:
        torch.autograd.backward(forward(), gradient)
        module.zero_grad(set_to_none=True)

    forward_s = time_runs(forward, active)
    total_s = time_runs(step, active)
    return {"forward": forward_s, "backward": max(total_s - forward_s, forward_s / 10)}


def measure_collectives(active: ActiveRanks, log: Callable[[str], None]) -> Iterator[CollectivePoint]:
    """Yield the points of all ops on rank 0, and none on the others."""
    for size in active.sizes:
        log(f"collectives over groups of {size}, {active.ranks} ranks active")
        if dist.get_rank() < active.ranks:
            yield from _measure_group(active.subgroups[size], active)
        dist.barrier()


def _measure_group(group: dist.ProcessGroup, active: ActiveRanks) -> Iterator[CollectivePoint]:
    between = build_layers(active)
    for payload in PAYLOAD_BYTES[active.device.type]:
        for op, call in _build_calls(payload, group, active.device):
            seconds = measure_added_seconds(call, between, COLLECTIVE_ROUNDS, active)
            if dist.get_rank() == 0:
                yield CollectivePoint(
                    ranks=active.ranks, op=op, group_size=group.size(), payload_bytes=payload, seconds=seconds
                )


def _build_calls(payload: int, group: dist.ProcessGroup, device: torch.device) -> Iterator[tuple[Op, Call]]:
    """Yield a call of each op whose full buffer has `payload` bytes."""
    full = torch.ones(payload // 4, device=device)
    shard = torch.ones(payload // 4 // group.size(), device=device)
    out = torch.empty_like(full)
    first, group_rank = dist.get_global_rank(group, 0), group.rank()
    neighbor = dist.get_global_rank(group, group_rank ^ 1)

    def exchange() -> None:
        if group_rank % 2 == 0:
            dist.send(full, neighbor, group=group)
        else:
            dist.recv(out, neighbor, group=group)

    yield "all_reduce", lambda: dist.all_reduce(full, group=group)
    yield "all_gather", lambda: dist.all_gather_single(full, shard, group=group)
    yield "reduce_scatter", lambda: dist.reduce_scatter_single(shard, full, group=group)
    yield "broadcast", lambda: dist.broadcast(full, first, group=group)
    yield "all_to_all", lambda: dist.all_to_all_single(out, full, group=group)
    yield "send", exchange
