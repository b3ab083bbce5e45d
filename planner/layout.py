"""Ranks and coordinates, which layers a stage holds, and every rule a spec must keep across its fields."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.spec import JobSpec, Layout, Problem

MeshAxis = Literal["pp", "dp", "tp"]
MESH_AXES: tuple[MeshAxis, ...] = ("pp", "dp", "tp")  # outermost first: tp ranks are neighbours
MAX_RANKS = 65536  # an estimate may have a row for each


class Coordinates(NamedTuple):
    """Place of a rank on the mesh."""

    pp: int
    dp: int
    tp: int


def coordinates(rank: int, layout: Layout) -> Coordinates:
    """rank = (pp * DP + dp) * TP + tp, turned round.

    Raises:
        ValueError: when the layout has no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is outside 0..{layout.world_size - 1}")
    rest, tp = divmod(rank, layout.tp)
    pp, dp = divmod(rest, layout.dp)
    return Coordinates(pp, dp, tp)


def rank_of(place: Coordinates, layout: Layout) -> int:
    """The rank at a place; the inverse of `coordinates`."""
    return (place.pp * layout.dp + place.dp) * layout.tp + place.tp


def axis_ranks(rank: int, axis: MeshAxis, layout: Layout) -> tuple[int, ...]:
    """The ranks that share every coordinate with `rank` but that of `axis`, in order."""
    place = coordinates(rank, layout)
    return tuple(rank_of(place._replace(**{axis: i}), layout) for i in range(getattr(layout, axis)))


def stage_layers(num_layers: int, pp: int) -> list[range]:
    """Which layers each stage holds: equal shares in order (`problems` refuses an uneven division)."""
    share = num_layers // pp
    return [range(stage * share, (stage + 1) * share) for stage in range(pp)]


def problems(spec: JobSpec, *, slots: int | None = None) -> list[Problem]:
    """Every rule across fields that the spec breaks, each with its arithmetic. Empty means it can run.

    `slots`: slots of the largest host, when known.
    """
    return [*_model(spec), *_tensor(spec), *_pipeline(spec), *_data(spec), *_training(spec), *_world(spec, slots)]


def _indivisible(field: str, what: str, size: int, by: str, degree: int) -> list[Problem]:
    rest = size % degree
    if not rest:
        return []
    text = f"{what} {size} is not divisible by {by} {degree}: {size} = {size // degree} x {degree} + {rest}"
    return [Problem(field, text)]


def _model(spec: JobSpec) -> list[Problem]:
    model = spec.model
    found = _indivisible("model.num_heads", "hidden_size", model.hidden_size, "num_heads", model.num_heads)
    found += _indivisible("model.num_kv_heads", "num_heads", model.num_heads, "num_kv_heads", model.num_kv_heads)
    if model.arch == "gpt" and model.num_kv_heads != model.num_heads:
        text = f"gpt has one key/value head a query head: {model.num_kv_heads} is not {model.num_heads}"
        found.append(Problem("model.num_kv_heads", text))
    head_dim = model.hidden_size // model.num_heads
    if model.arch == "llama" and not model.hidden_size % model.num_heads and head_dim % 2:
        text = f"RoPE needs an even head size: {model.hidden_size} / {model.num_heads} = {head_dim}"
        found.append(Problem("model.hidden_size", text))
    return found


def _tensor(spec: JobSpec) -> list[Problem]:
    model, layout = spec.model, spec.layout
    if layout.sequence_parallel and layout.tp == 1:
        return [Problem("layout.sequence_parallel", "divides the sequence over tp, which is 1; choose tp of 2 or more")]
    found = _indivisible("layout.tp", "num_heads", model.num_heads, "tp", layout.tp)
    found += _indivisible("layout.tp", "num_kv_heads", model.num_kv_heads, "tp", layout.tp)
    found += _indivisible("layout.tp", "ffn_hidden_size", model.ffn_hidden_size, "tp", layout.tp)
    for problem in _indivisible("layout.tp", "vocab_size", model.vocab_size, "tp", layout.tp):
        padded = -(-model.vocab_size // layout.tp) * layout.tp
        found.append(problem._replace(message=f"{problem.message}; a vocab_size of {padded} fits"))
    if layout.sequence_parallel:
        found += _indivisible("layout.sequence_parallel", "seq_len", spec.train.seq_len, "tp", layout.tp)
    return found


def _pipeline(spec: JobSpec) -> list[Problem]:
    layout, train = spec.layout, spec.train
    found = _indivisible("layout.pp", "num_layers", spec.model.num_layers, "pp", layout.pp)
    if layout.pp > 1 and layout.schedule == "1f1b" and train.micro_batches < layout.pp:
        text = f"1F1B needs a micro-batch a stage: {train.micro_batches} micro-batches < pp {layout.pp}"
        found.append(Problem("train.micro_batches", text))
    return found


def _data(spec: JobSpec) -> list[Problem]:
    layout, train = spec.layout, spec.train
    found = []
    if layout.zero and layout.dp == 1:
        text = f"ZeRO-{layout.zero} divides model state over dp, which is 1; choose dp of 2 or more, or ZeRO 0"
        found.append(Problem("layout.zero", text))
    parts = layout.dp * train.micro_batches
    by = f"dp {layout.dp} x micro_batches {train.micro_batches} ="
    return found + _indivisible("train.global_batch", "global_batch", train.global_batch, by, parts)


def _training(spec: JobSpec) -> list[Problem]:
    train = spec.train
    found = []
    if train.seq_len > spec.model.max_seq_len:
        text = f"seq_len {train.seq_len} is longer than the model's max_seq_len {spec.model.max_seq_len}"
        found.append(Problem("train.seq_len", text))
    if train.warmup_steps > train.steps:
        text = f"warmup_steps {train.warmup_steps} > steps {train.steps}: the warm-up would never end"
        found.append(Problem("train.warmup_steps", text))
    if "\x00" in train.data:
        found.append(Problem("train.data", "holds a NUL character"))
    elif train.data.startswith("/") or ".." in train.data.split("/"):
        text = f"{train.data!r} leaves the data root; give a path below it, without '..'"
        found.append(Problem("train.data", text))
    return found


def _world(spec: JobSpec, slots: int | None) -> list[Problem]:
    layout = spec.layout
    product = f"dp {layout.dp} x pp {layout.pp} x tp {layout.tp} = {layout.world_size} ranks"
    if layout.world_size > MAX_RANKS:
        largest = max(MESH_AXES, key=lambda axis: int(getattr(layout, axis)))
        return [Problem(f"layout.{largest}", f"{product}, more than the {MAX_RANKS} that can be planned")]
    if slots is None or layout.world_size <= slots:
        return []
    return [Problem("layout", f"{product}, but the largest {spec.resources.device} host has {slots} slots")]
