"""Ranks and coordinates, which layers a stage holds, and every rule a spec must keep across its fields."""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.facts.engines import engine_problems
from planner.facts.kinds import KINDS, kind_problems, num_slots, product_words
from planner.facts.proof import why_not_asked
from planner.facts.reading.paths import file_problems, path_problems
from planner.facts.software import software_problems
from planner.facts.spec import ROPE_BASE, JobSpec, Layout, Problem
from planner.facts.words import counted

MeshAxis = Literal["pp", "dp", "cp", "tp"]
MESH_AXES: tuple[MeshAxis, ...] = ("pp", "dp", "cp", "tp")  # outermost first: tp ranks are neighbours
MAX_RANKS = 65536  # an estimate may have a row for each
V_SCHEDULES = ("zbv", "dualpipev")


class Coordinates(NamedTuple):
    """Place of a rank on the mesh."""

    pp: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0


def coordinates(rank: int, layout: Layout) -> Coordinates:
    """rank = ((pp * DP + dp) * CP + cp) * TP + tp, turned round.

    Raises:
        ValueError: when the layout has no such rank.
    """
    if not 0 <= rank < layout.world_size:
        raise ValueError(f"rank {rank} is outside 0..{layout.world_size - 1}")
    rest, tp = divmod(rank, layout.tp)
    rest, cp = divmod(rest, layout.cp)
    pp, dp = divmod(rest, layout.dp)
    return Coordinates(pp, dp, cp, tp)


def rank_of(place: Coordinates, layout: Layout) -> int:
    """The rank at a place; the inverse of `coordinates`."""
    return ((place.pp * layout.dp + place.dp) * layout.cp + place.cp) * layout.tp + place.tp


def axis_ranks(rank: int, axis: MeshAxis, layout: Layout) -> tuple[int, ...]:
    """The ranks that share every coordinate with `rank` but that of `axis`, in order."""
    place = coordinates(rank, layout)
    return tuple(rank_of(place._replace(**{axis: i}), layout) for i in range(getattr(layout, axis)))


class Group(NamedTuple):
    """Ranks that meet in a collective: `size` of them, each `stride` after the one before."""

    size: int
    stride: int


def members(rank: int, group: Group) -> tuple[int, ...]:
    """The ranks of the group that `rank` belongs to, in order."""
    first = rank - rank // group.stride % group.size * group.stride
    return tuple(first + i * group.stride for i in range(group.size))


def axis_group(layout: Layout, axis: Literal["pp", "dp", "cp", "ep", "tp", "world"]) -> Group:
    """The group of an axis. dp joins the cp ranks too: they hold the same parameters."""
    stage = layout.tp * layout.cp * layout.dp
    return {
        "tp": Group(layout.tp, 1),
        "cp": Group(layout.cp, layout.tp),
        "ep": Group(layout.ep, layout.tp),
        "dp": Group(layout.replica_ranks, layout.tp),
        "pp": Group(layout.pp, stage),
        "world": Group(layout.world_size, 1),
    }[axis]


def num_chunks(layout: Layout) -> int:
    """Parts the layers are cut into: virtual stages of all ranks of a pipe."""
    return layout.pp * layout.virtual_stages


def is_turn(layout: Layout, stage: int) -> bool:
    """Whether a rank holds both chunks at the bottom of a V, between which nothing travels."""
    return layout.schedule in V_SCHEDULES and layout.virtual_stages == 2 and stage == layout.pp - 1


def chunk_indices(layout: Layout, stage: int) -> tuple[int, ...]:
    """The virtual stages a pipeline rank holds: in a loop, stage + i * pp; in a V, one going down and one coming up."""
    if layout.schedule in V_SCHEDULES and layout.virtual_stages == 2:
        return (stage, 2 * layout.pp - 1 - stage)
    return tuple(stage + i * layout.pp for i in range(layout.virtual_stages))


def problems(spec: JobSpec, *, slots: int | None = None) -> list[Problem]:
    """Every rule across fields that the spec breaks, each with its arithmetic. Empty means it can be planned.

    `slots`: slots of the largest host, when known. What can be planned but not run yet:
    `planner.facts.reading.runnable`.
    """
    if not KINDS[spec.kind].trains:  # what the batch says does not matter
        return [*kind_problems(spec), *engine_problems(spec), *_model(spec), *_world(spec, slots)]
    return [
        *kind_problems(spec),
        *engine_problems(spec),
        *software_problems(spec),
        *_model(spec),
        *_tensor(spec),
        *pipeline_problems(spec),
        *_context(spec),
        *_experts(spec),
        *_data(spec),
        *_training(spec),
        *_world(spec, slots),
    ]


def _indivisible(field: str, what: str, size: int, by: str, degree: int) -> list[Problem]:
    rest = size % degree
    if not rest:
        return []
    text = f"{what} {size} is not divisible by {by} {degree}: {size} = {size // degree} x {degree} + {rest}"
    return [Problem(field, text)]


def _model(spec: JobSpec) -> list[Problem]:
    model = spec.model
    divided = model.hidden_size, "num_heads", model.num_heads
    found = [] if model.head_dim else _indivisible("model.num_heads", "hidden_size", *divided)
    found += _indivisible("model.num_kv_heads", "num_heads", model.num_heads, "num_kv_heads", model.num_kv_heads)
    if model.head_dim and model.mla:
        text = "latent attention gives its heads sizes of its own: nope_head_dim, rope_head_dim, value_head_dim"
        found.append(Problem("model.head_dim", text))
    if model.arch == "gpt" and model.num_kv_heads != model.num_heads:
        text = f"gpt has one key/value head a query head: {model.num_kv_heads} is not {model.num_heads}"
        found.append(Problem("model.num_kv_heads", text))
    if model.arch == "gpt" and (model.rope_scaling or model.rope_base != ROPE_BASE):
        field = "model.rope_scaling" if model.rope_scaling else "model.rope_base"
        found.append(Problem(field, "gpt learns its positions and turns none; rotary positions are llama's"))
    scaling = model.rope_scaling
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        text = f"high_freq_factor {scaling.high_freq_factor:g} <= low_freq_factor {scaling.low_freq_factor:g}"
        found.append(Problem("model.rope_scaling", text))
    if model.arch == "llama" and not found and model.head_size % 2:
        field = "model.head_dim" if model.head_dim else "model.hidden_size"
        given = "" if model.head_dim else f"{model.hidden_size} / {model.num_heads} = "
        found.append(Problem(field, f"RoPE needs an even head size: {given}{model.head_size}"))
    return found


def _tensor(spec: JobSpec) -> list[Problem]:
    model, layout = spec.model, spec.layout
    if layout.sequence_parallel and layout.tp == 1:
        return [Problem("layout.sequence_parallel", "divides the sequence over tp, which is 1; choose tp of 2 or more")]
    found = []
    if layout.regather and not layout.sequence_parallel:
        found.append(Problem("layout.regather", "regather gathers again what sequence_parallel divides, which is off"))
    if layout.scatter_gather and (layout.sequence_parallel or layout.pp == 1 or layout.tp == 1):
        text = "scatter_gather needs pp and tp of 2 or more, and no sequence_parallel, which sends parts anyway"
        found.append(Problem("layout.scatter_gather", text))
    found += _indivisible("layout.tp", "num_heads", model.num_heads, "tp", layout.tp)
    if layout.tp < model.num_kv_heads:
        found += _indivisible("layout.tp", "num_kv_heads", model.num_kv_heads, "tp", layout.tp)
    else:  # each key/value head is held by several ranks
        found += _indivisible("layout.tp", "tp", layout.tp, "num_kv_heads", model.num_kv_heads)
    found += _indivisible("layout.tp", "ffn_hidden_size", model.ffn_hidden_size, "tp", layout.tp)
    if model.moe:
        inner = model.moe.expert_ffn_hidden_size
        found += _indivisible("layout.tp", "expert_ffn_hidden_size", inner, "tp", layout.tp)
    if layout.sequence_parallel:
        by = f"tp {layout.tp} x cp {layout.cp} =" if layout.cp > 1 else "tp"
        parts = layout.tp * layout.cp
        found += _indivisible("layout.sequence_parallel", "seq_len", spec.train.seq_len, by, parts)
    return found


CHUNKED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", *V_SCHEDULES)


def pipeline_problems(spec: JobSpec) -> list[Problem]:
    """What the schedule asks of stages and micro-batches."""
    layout, m = spec.layout, spec.train.micro_batches
    v, pp = layout.virtual_stages, layout.pp
    if pp == 1:
        if v == 1:
            return []
        return [Problem("layout.virtual_stages", f"cuts each stage into {v}, and pp is 1; choose pp of 2 or more")]
    found = []
    if num_chunks(layout) > spec.model.num_layers:
        field, product = ("layout.pp", f"pp {pp}") if v == 1 else ("layout.virtual_stages", f"pp {pp} x {v} = {pp * v}")
        text = f"{product} stages need a layer each, and num_layers is {spec.model.num_layers}"
        found.append(Problem(field, text))
    if v > 1 and layout.schedule not in CHUNKED:
        found.append(Problem("layout.virtual_stages", f"{layout.schedule} has one chunk a stage, not {v}"))
    if v != 2 and layout.schedule in V_SCHEDULES:
        found.append(Problem("layout.virtual_stages", f"{layout.schedule} has two chunks a stage, not {v}"))
    if v == 1 and layout.schedule == "interleaved_1f1b":
        found.append(Problem("layout.virtual_stages", "interleaved 1F1B needs 2 chunks a stage or more, not 1"))
    least = {"1f1b": pp, "interleaved_1f1b": pp, "interleaved_zero_bubble": pp, "dualpipev": 2 * pp}
    needed = least.get(layout.schedule, 1)
    if m < needed:
        label, given = SCHEDULE_NAMES[layout.schedule], counted(m, "micro-batch", "micro-batches")
        text = f"{label} needs {needed} micro-batches or more on pp {pp}: {given} < {needed}"
        found.append(Problem("train.micro_batches", text))
    elif layout.schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and v > 1:
        found += _indivisible("train.micro_batches", "micro_batches", m, "pp", pp)
    return found


SCHEDULE_NAMES = {
    "naive": "Naive",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved 1F1B",
    "looped_bfs": "Looped BFS",
    "interleaved_zero_bubble": "Zero bubble",
    "zbv": "ZBV",
    "dualpipev": "DualPipeV",
}


def _context(spec: JobSpec) -> list[Problem]:
    layout = spec.layout
    if layout.cp == 1:
        return []
    found = []
    if spec.train.attention == "unfused" and spec.resources.stack == "ours":
        text = f"unfused keeps every score, and cp {layout.cp} attends in blocks that keep none; choose fused, or cp 1"
        found.append(Problem("train.attention", text))
    parts = 2 * layout.cp  # a rank takes one part from each end, so that causal work is even
    return found + _indivisible("layout.cp", "seq_len", spec.train.seq_len, f"2 x cp {layout.cp} =", parts)


def _experts(spec: JobSpec) -> list[Problem]:
    layout, model, moe = spec.layout, spec.model, spec.model.moe
    if moe is None:
        if layout.ep == 1:
            return []
        return [Problem("layout.ep", f"divides experts over {layout.ep} ranks, and the model has none")]
    found = []
    if moe.experts_per_token > moe.num_experts:
        text = f"experts_per_token {moe.experts_per_token} > num_experts {moe.num_experts}"
        found.append(Problem("model.moe.experts_per_token", text))
    if model.arch != "llama":
        found.append(Problem("model.moe", f"experts are SwiGLU without biases: arch llama, not {model.arch}"))
    if moe.capacity_factor is not None and layout.cp > 1:
        text = f"drops by order of a whole sequence, and cp {layout.cp} divides it; leave it out, or cp 1"
        found.append(Problem("model.moe.capacity_factor", text))
    if moe.dense_layers >= model.num_layers:
        text = f"dense_layers {moe.dense_layers} leaves none of num_layers {model.num_layers} with experts"
        found.append(Problem("model.moe.dense_layers", text))
    found += _indivisible("layout.ep", "num_experts", moe.num_experts, "ep", layout.ep)
    if layout.ep > 1:
        product = f"dp {layout.dp} x cp {layout.cp} ="
        found += _indivisible("layout.ep", product, layout.replica_ranks, "ep", layout.ep)
        if layout.dp_replicas > 1:
            text = f"HSDP with {layout.dp_replicas} replicas and ep {layout.ep} together have no defined shards"
            found.append(Problem("layout.dp_replicas", text))
    return found


def _data(spec: JobSpec) -> list[Problem]:
    layout, train = spec.layout, spec.train
    found = []
    if layout.zero and layout.replica_ranks == 1:
        text = f"ZeRO-{layout.zero} divides model state over dp, which is 1; choose dp of 2 or more, or ZeRO 0"
        found.append(Problem("layout.zero", text))
    found += kept_problems(layout)
    if layout.dp_replicas > 1:
        if not layout.zero:
            text = f"{layout.dp_replicas} replicas of what ZeRO shards, and ZeRO is 0; choose ZeRO 1 or more"
            found.append(Problem("layout.dp_replicas", text))
        found += _indivisible("layout.dp_replicas", "dp", layout.dp, "dp_replicas", layout.dp_replicas)
        if layout.dp_replicas == layout.dp and layout.cp == 1:
            found.append(
                Problem("layout.dp_replicas", f"dp {layout.dp} / {layout.dp_replicas} leaves shards of 1 rank")
            )
    parts = layout.dp * train.micro_batches
    by = f"dp {layout.dp} x micro_batches {train.micro_batches} ="
    return found + _indivisible("train.global_batch", "global_batch", train.global_batch, by, parts)


def kept_problems(layout: Layout) -> list[Problem]:
    """What a gather that outlasts a micro-batch asks for."""
    if not layout.keep_gathered:
        return []
    text = ""
    if layout.zero != 3:
        text = f"keeps what ZeRO-3 would gather again, and ZeRO is {layout.zero}; choose ZeRO 3"
    elif layout.pp == 1:
        text = "without a pipe it would keep all parameters all step, as ZeRO-2 does; choose ZeRO 2, or pp of 2 or more"
    elif layout.virtual_stages > 1 and layout.schedule != "looped_bfs":
        label, v = SCHEDULE_NAMES[layout.schedule], layout.virtual_stages
        text = f"{label} turns between {v} chunks a stage with each micro-batch; choose 1 chunk, or Looped BFS"
    return [Problem("layout.keep_gathered", text)] if text else []


def _training(spec: JobSpec) -> list[Problem]:
    train = spec.train
    found = []
    if train.seq_len > spec.model.max_seq_len:
        text = f"seq_len {train.seq_len} is longer than the model's max_seq_len {spec.model.max_seq_len}"
        found.append(Problem("train.seq_len", text))
    if train.document_end is not None and train.document_end >= spec.model.vocab_size:
        text = f"token {train.document_end} is outside the model's vocab_size {spec.model.vocab_size}"
        found.append(Problem("train.document_end", text))
    if train.warmup_steps > train.steps:
        text = f"warmup_steps {train.warmup_steps} > steps {train.steps}: the warm-up would never end"
        found.append(Problem("train.warmup_steps", text))
    found += path_problems("train.resume", train.resume, "checkpoint root", "job, job/attempt or job/attempt/step")
    found += file_problems("train.tokenizer", train.tokenizer, "data root")
    found += path_problems("train.data", train.data, "data root")
    if text := why_not_asked(spec):
        found.append(Problem("train.verify", text))
    return found


def _world(spec: JobSpec, slots: int | None) -> list[Problem]:
    layout, product = spec.layout, product_words(spec.layout)
    if layout.world_size > MAX_RANKS:
        largest = max(MESH_AXES, key=lambda axis: int(getattr(layout, axis)))
        return [Problem(f"layout.{largest}", f"{product}, more than the {MAX_RANKS} that can be planned")]
    if slots is None or spec.resources.engine != "hosts" or num_slots(spec) <= slots:
        return []
    return [Problem("layout", f"{product}, but the largest {spec.resources.device} host has {counted(slots, 'slot')}")]
