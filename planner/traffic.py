"""The exact collectives one rank issues, from the layout and the parameter shapes alone.

This mirrors `workers/trainer`, module by module; `make parity` holds the two against each other and against
what the meter counts, to the byte. Sources of the theory: Megatron (2104.04473 section 3) for tp, ZeRO
(1910.02054 section 7) for dp, both as costs a rank pays; here as payload bytes handed to the library.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from contracts.telemetry import Axis, Op
from planner.layout import Coordinates, coordinates, stage_layers
from planner.models import Parameter, Unit, stage_units
from planner.spec import JobSpec

FP32_BYTES = 4
STATISTIC_BYTES = 8  # loss and gradient norm travel as float64
BUCKET_BYTES = 25 * 2**20  # a gradient bucket is closed once it holds this much


class Collective(NamedTuple):
    """All calls of one op on one axis. `payload_bytes` is the total of all `count` calls."""

    op: Op
    axis: Axis
    group_size: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody wants of a collective
    payload_bytes: int


class _Tally:
    """Sums calls by (op, axis, group size)."""

    def __init__(self) -> None:
        self._count: Counter[tuple[Op, Axis, int]] = Counter()
        self._bytes: Counter[tuple[Op, Axis, int]] = Counter()

    def add(self, op: Op, axis: Axis, group_size: int, each_bytes: int, count: int = 1) -> None:
        if count == 0:
            return
        self._count[op, axis, group_size] += count
        self._bytes[op, axis, group_size] += count * each_bytes

    def rows(self) -> list[Collective]:
        return [Collective(*key, self._count[key], self._bytes[key]) for key in sorted(self._count)]


def setup_traffic(spec: JobSpec, rank: int) -> list[Collective]:
    """Before the first step: one barrier. Parameters start equal by seed, so nothing is broadcast."""
    tally = _Tally()
    coordinates(rank, spec.layout)
    if spec.layout.world_size > 1:
        tally.add("barrier", "world", spec.layout.world_size, 0)
    return tally.rows()


def step_traffic(spec: JobSpec, rank: int) -> list[Collective]:
    """One optimiser step: forward and backward of every micro-batch, gradients, clipping, the reported loss."""
    tally = _Tally()
    place = coordinates(rank, spec.layout)
    _tensor_forward(tally, spec, place)
    _tensor_backward(tally, spec, place)
    _pipeline(tally, spec, place, backward=False)
    _pipeline(tally, spec, place, backward=True)
    _data_step(tally, spec, place)
    _replicated_gradients(tally, spec, place)
    _tied_gradients(tally, spec, place)
    if spec.layout.world_size > 1:
        tally.add("all_reduce", "world", spec.layout.world_size, 2 * STATISTIC_BYTES)
    return tally.rows()


def eval_traffic(spec: JobSpec, rank: int) -> list[Collective]:
    """One validation: a forward of as many micro-batches as a step has, and the loss."""
    tally = _Tally()
    place = coordinates(rank, spec.layout)
    _tensor_forward(tally, spec, place)
    _pipeline(tally, spec, place, backward=False)
    if spec.layout.zero:
        gathers = spec.train.micro_batches if spec.layout.zero == 3 else 1
        for unit in local_units(spec, place):
            tally.add("all_gather", "dp", spec.layout.dp, _gathered_bytes(spec, unit, _compute_bytes(spec)), gathers)
    if spec.layout.world_size > 1:
        tally.add("all_reduce", "world", spec.layout.world_size, STATISTIC_BYTES)
    return tally.rows()


def num_evals(spec: JobSpec) -> int:
    """How many validations a whole run makes: every `eval_every` steps, and after the last."""
    train = spec.train
    if not train.eval_every:
        return 0
    return -(-train.steps // train.eval_every)


def local_units(spec: JobSpec, place: Coordinates) -> list[Unit]:
    """The units of this rank's stage with tensors divided by tp, as data parallelism meets them."""
    layers = stage_layers(spec.model.num_layers, spec.layout.pp)[place.pp]
    whole = stage_units(spec.model, layers, first=place.pp == 0, last=place.pp == spec.layout.pp - 1)
    return [Unit(unit.name, tuple(_tp_shard(p, spec.layout.tp) for p in unit.parameters)) for unit in whole]


def _tp_shard(parameter: Parameter, tp: int) -> Parameter:
    if parameter.tp_dim is None or tp == 1:
        return parameter
    shape = list(parameter.shape)
    shape[parameter.tp_dim] //= tp
    return parameter._replace(shape=tuple(shape))


def _compute_bytes(spec: JobSpec) -> int:
    return 2 if spec.train.precision == "bf16" else FP32_BYTES


def _hidden_bytes(spec: JobSpec) -> int:
    """One micro-batch's hidden states, (batch, seq, hidden) in the compute type, the whole sequence."""
    return spec.micro_batch_size * spec.train.seq_len * spec.model.hidden_size * _compute_bytes(spec)


def _stage_shape(spec: JobSpec, place: Coordinates) -> tuple[int, bool, bool]:
    """(layers of the stage, is it the first, is it the last)"""
    layers = stage_layers(spec.model.num_layers, spec.layout.pp)[place.pp]
    return len(layers), place.pp == 0, place.pp == spec.layout.pp - 1


def _tensor_forward(tally: _Tally, spec: JobSpec, place: Coordinates) -> None:
    """Two sums a layer (attention out, MLP down) and one for the vocabulary-parallel embedding.

    With sequence parallelism each sum is a reduce-scatter, and an all-gather stands before each column-parallel
    product: two a layer and one for the head. The loss needs three sums of (batch, seq) in fp32.
    """
    layout, m, hidden = spec.layout, spec.train.micro_batches, _hidden_bytes(spec)
    if layout.tp == 1:
        return
    layers, first, last = _stage_shape(spec, place)
    sums = 2 * layers + first
    if layout.sequence_parallel:
        tally.add("reduce_scatter", "tp", layout.tp, hidden, m * sums)
        tally.add("all_gather", "tp", layout.tp, hidden, m * (2 * layers + last))
    else:
        tally.add("all_reduce", "tp", layout.tp, hidden, m * sums)
    if last:
        tokens_bytes = spec.micro_batch_size * spec.train.seq_len * FP32_BYTES
        tally.add("all_reduce", "tp", layout.tp, tokens_bytes, 3 * m)


def _tensor_backward(tally: _Tally, spec: JobSpec, place: Coordinates) -> None:
    """The conjugate of the forward: an input gradient is summed before each column-parallel product."""
    layout, m, hidden = spec.layout, spec.train.micro_batches, _hidden_bytes(spec)
    if layout.tp == 1:
        return
    layers, first, last = _stage_shape(spec, place)
    inputs = 2 * layers + last
    if layout.sequence_parallel:
        tally.add("reduce_scatter", "tp", layout.tp, hidden, m * inputs)
        tally.add("all_gather", "tp", layout.tp, hidden, m * (2 * layers + first))
    else:
        tally.add("all_reduce", "tp", layout.tp, hidden, m * inputs)


def _boundary_bytes(spec: JobSpec) -> int:
    """Hidden states across a stage boundary; each tp rank sends its part of the sequence under SP."""
    return _hidden_bytes(spec) // (spec.layout.tp if spec.layout.sequence_parallel else 1)


def _pipeline(tally: _Tally, spec: JobSpec, place: Coordinates, *, backward: bool) -> None:
    """Hidden states go on to the next stage, gradients back to the one before: one each a micro-batch."""
    _, first, last = _stage_shape(spec, place)
    sends, receives = (not first, not last) if backward else (not last, not first)
    m = spec.train.micro_batches
    tally.add("send", "pp", spec.layout.pp, _boundary_bytes(spec), m * sends)
    tally.add("recv", "pp", spec.layout.pp, _boundary_bytes(spec), m * receives)


def _data_step(tally: _Tally, spec: JobSpec, place: Coordinates) -> None:
    """Gradients over dp. ZeRO-1 and 2 gather once a step, 3 twice a micro-batch; 1 reduces once, 2 and 3 each time."""
    layout, m = spec.layout, spec.train.micro_batches
    if layout.dp == 1:
        return
    units = local_units(spec, place)
    if layout.zero == 0:
        sizes = [p.numel * FP32_BYTES for _, p in gradient_order(units)]
        for bucket_bytes in gradient_buckets(sizes):
            tally.add("all_reduce", "dp", layout.dp, bucket_bytes)
        return
    gathers = 2 * m if layout.zero == 3 else 1
    reduces = 1 if layout.zero == 1 else m
    for unit in units:
        tally.add("all_gather", "dp", layout.dp, _gathered_bytes(spec, unit, _compute_bytes(spec)), gathers)
        tally.add("reduce_scatter", "dp", layout.dp, _gathered_bytes(spec, unit, FP32_BYTES), reduces)


def gradient_order(units: list[Unit]) -> list[tuple[Unit, Parameter]]:
    """Parameters about in the order in which backward finishes them: head, layers from the last, embedding."""
    root = [(u, p) for u in units if u.name == "root" for p in u.parameters]
    head = [(u, p) for u, p in root if p.name.startswith(("final_norm", "head"))]
    layers = [(u, p) for u in reversed(units) if u.name != "root" for p in reversed(u.parameters)]
    return [*head, *layers, *(pair for pair in root if pair not in head)]


def gradient_buckets(sizes: list[int]) -> list[int]:
    """Bytes of each all-reduce of plain data parallelism: consecutive gradients, closed at BUCKET_BYTES."""
    buckets: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= BUCKET_BYTES:
            buckets.append(filled)
            filled = 0
    return [*buckets, filled] if filled else buckets


def shard_rows(rows: int, degree: int, index: int) -> int:
    """Rows of dim 0 that shard `index` of `degree` holds: FSDP2 cuts like torch.chunk, so the last may be short."""
    chunk = -(-rows // degree)
    return max(0, min(chunk, rows - index * chunk))


def _gathered_bytes(spec: JobSpec, unit: Unit, element_bytes: int) -> int:
    """A unit's all-gather or reduce-scatter buffer: FSDP2 pads dim 0 of each tensor to a multiple of dp."""
    dp = spec.layout.dp
    rows = sum(-(-p.shape[0] // dp) * (p.numel // p.shape[0]) for p in unit.parameters)
    return dp * rows * element_bytes


def _held_numel(spec: JobSpec, parameter: Parameter, place: Coordinates) -> int:
    """Elements of one parameter's gradient on this rank once dp has reduced it."""
    if spec.layout.zero == 0:
        return parameter.numel
    rows = shard_rows(parameter.shape[0], spec.layout.dp, place.dp)
    return rows * (parameter.numel // parameter.shape[0])


def _replicated_gradients(tally: _Tally, spec: JobSpec, place: Coordinates) -> None:
    """Under SP the tensors that tp replicates saw only their part of the sequence: one all-reduce sums them."""
    if not spec.layout.sequence_parallel:
        return
    replicated = [p for u in local_units(spec, place) for p in u.parameters if p.tp_dim is None]
    held = sum(_held_numel(spec, p, place) for p in replicated)
    tally.add("all_reduce", "tp", spec.layout.tp, held * FP32_BYTES)


def _tied_gradients(tally: _Tally, spec: JobSpec, place: Coordinates) -> None:
    """A tied table on two stages: first and last sum its gradient (Megatron's embedding group)."""
    _, first, last = _stage_shape(spec, place)
    if not spec.model.tied_embeddings or spec.layout.pp == 1 or not (first or last):
        return
    table = next(p for u in local_units(spec, place) for p in u.parameters if p.name in _TIED)
    tally.add("all_reduce", "pp", 2, _held_numel(spec, table, place) * FP32_BYTES)


_TIED = ("embedding.weight", "head.weight")
