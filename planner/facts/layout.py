"""Ranks and coordinates, which layers a stage holds, and every rule a spec must keep across its fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from planner.facts.engines import engine_problems
from planner.facts.kinds import KINDS, kind_problems, num_slots, product_words
from planner.facts.proof import why_not_asked
from planner.facts.reading.paths import file_problems, path_problems
from planner.facts.software import software_problems
from planner.facts.spec import ROPE_BASE, JobSpec, Layout, Problem
from planner.facts.words import alternatives, counted, divisors, nearest, nearest_multiples

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
    """Return all rules across fields that the spec breaks. A spec without problems can be planned.

    `planner.facts.reading.runnable` checks if a valid spec can also run.

    Args:
        slots: Slots of the largest host, if known.
    """
    if not KINDS[spec.kind].trains:  # the batch has no effect
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


def _indivisible(
    field: str, value: object, what: str, size: int, by: str, degree: int, use: Callable[[], str]
) -> list[Problem]:
    """Return a problem if `size` is not a multiple of `degree`. `use` returns the valid values."""
    if size % degree == 0:
        return []
    return [Problem(field, f"`{field}` is {value}, but {what} {size} is not divisible by {by}{degree}. Use {use()}.")]


def _model(spec: JobSpec) -> list[Problem]:
    model = spec.model
    heads, kv_heads = model.num_heads, model.num_kv_heads
    found = []
    if not model.head_dim:
        hidden = model.hidden_size
        fitting = (n for n in divisors(hidden) if model.arch != "llama" or hidden // n % 2 == 0)
        found += _indivisible(
            "model.num_heads",
            heads,
            "hidden_size",
            hidden,
            "",
            heads,
            lambda: nearest(fitting, heads) or "an even hidden_size",
        )
    found += _indivisible(
        "model.num_kv_heads",
        kv_heads,
        "num_heads",
        heads,
        "",
        kv_heads,
        lambda: nearest(divisors(heads), kv_heads),
    )
    if model.head_dim and model.mla:
        text = f"`model.head_dim` is {model.head_dim}, but latent attention sets its own head sizes. Omit it."
        found.append(Problem("model.head_dim", text))
    if model.arch == "gpt" and kv_heads != heads:
        text = f"`model.num_kv_heads` is {kv_heads}, but gpt has one key/value head per query head. Use {heads}."
        found.append(Problem("model.num_kv_heads", text))
    if model.arch == "gpt" and (model.rope_scaling or model.rope_base != ROPE_BASE):
        field = "model.rope_scaling" if model.rope_scaling else "model.rope_base"
        given = "set" if model.rope_scaling else f"{model.rope_base:g}"
        text = f"`{field}` is {given}, but gpt has learned positions instead of RoPE. Omit it, or set arch to llama."
        found.append(Problem(field, text))
    scaling = model.rope_scaling
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        text = f"`model.rope_scaling` has high_freq_factor {scaling.high_freq_factor:g}. "
        text += f"Use more than low_freq_factor {scaling.low_freq_factor:g}."
        found.append(Problem("model.rope_scaling", text))
    if model.arch == "llama" and not found and model.head_size % 2:
        field = "model.head_dim" if model.head_dim else "model.hidden_size"
        given = f"{model.head_dim}" if model.head_dim else f"{model.hidden_size} for {heads} heads"
        size, even = model.head_size, (model.head_size - 1, model.head_size + 1)
        use = alternatives(n if model.head_dim else n * heads for n in even if n)
        text = f"`{field}` is {given}, but RoPE needs an even head size, and {size} is odd. Use {use}."
        found.append(Problem(field, text))
    return found


def _tensor(spec: JobSpec) -> list[Problem]:
    model, layout = spec.model, spec.layout
    if layout.sequence_parallel and layout.tp == 1:
        text = "`layout.sequence_parallel` needs tp of 2 or more, but tp is 1. Set tp to 2 or more, or turn it off."
        return [Problem("layout.sequence_parallel", text)]
    found = []
    if layout.regather and not layout.sequence_parallel:
        text = "`layout.regather` needs sequence_parallel, which is off. "
        text += "Turn sequence_parallel on, or turn regather off."
        found.append(Problem("layout.regather", text))
    if layout.scatter_gather and (layout.sequence_parallel or layout.pp == 1 or layout.tp == 1):
        given = f"pp is {layout.pp} and tp is {layout.tp}" + (
            " with sequence_parallel" if layout.sequence_parallel else ""
        )
        text = "`layout.scatter_gather` needs pp and tp of 2 or more without sequence_parallel"
        text += f", but {given}. Change the layout, or turn scatter_gather off."
        found.append(Problem("layout.scatter_gather", text))
    inner = model.moe.expert_ffn_hidden_size if model.moe else 0
    message = _tp_message(layout.tp, model.num_heads, model.num_kv_heads, model.ffn_hidden_size, inner)
    found += [Problem("layout.tp", message)] if message else []
    if layout.sequence_parallel:
        parts, seq_len = layout.tp * layout.cp, spec.train.seq_len
        by = f"tp {layout.tp} x cp {layout.cp} = {parts}" if layout.cp > 1 else f"tp {layout.tp}"
        if seq_len % parts:
            text = f"`layout.sequence_parallel` needs a seq_len divisible by {by}, but seq_len is {seq_len}. "
            text += f"Use seq_len {nearest_multiples(parts, seq_len)}."
            found.append(Problem("layout.sequence_parallel", text))
    return found


@lru_cache(maxsize=1024)  # a search checks thousands of layouts of one model
def _tp_message(tp: int, heads: int, kv_heads: int, ffn: int, expert_ffn: int) -> str:
    """Return the first size that `tp` ranks cannot split, with the degrees that split all sizes, or an empty text."""
    reason = next(_sizes_not_split(tp, heads, kv_heads, ffn, expert_ffn), "")
    if not reason:
        return ""
    valid = (n for n in divisors(heads) if not any(_sizes_not_split(n, heads, kv_heads, ffn, expert_ffn)))
    return f"`layout.tp` is {tp}, but {reason}. Use {nearest(valid, tp)}."


def _sizes_not_split(tp: int, heads: int, kv_heads: int, ffn: int, expert_ffn: int) -> Iterator[str]:
    """Yield each size that `tp` ranks cannot split evenly. `expert_ffn` is 0 without experts."""
    if heads % tp:
        yield f"{counted(heads, 'head')} {'is' if heads == 1 else 'are'} not divisible by {tp}"
    if tp < kv_heads and kv_heads % tp:
        yield f"num_kv_heads {kv_heads} is not divisible by {tp}"
    if tp >= kv_heads and tp % kv_heads:  # several ranks hold each key/value head
        yield f"tp {tp} is not divisible by num_kv_heads {kv_heads}"
    if ffn % tp:
        yield f"ffn_hidden_size {ffn} is not divisible by {tp}"
    if expert_ffn % tp:
        yield f"expert_ffn_hidden_size {expert_ffn} is not divisible by {tp}"


CHUNKED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", *V_SCHEDULES)


def pipeline_problems(spec: JobSpec) -> list[Problem]:
    """Return the problems of stages and micro-batches with the pipeline schedule."""
    layout, m = spec.layout, spec.train.micro_batches
    v, pp = layout.virtual_stages, layout.pp
    if pp == 1:
        if v == 1:
            return []
        text = f"`layout.virtual_stages` is {v}, but pp is 1. Use 1, or set pp to 2 or more."
        return [Problem("layout.virtual_stages", text)]
    found = []
    layers, name = spec.model.num_layers, SCHEDULE_NAMES[layout.schedule]
    if num_chunks(layout) > layers:
        field = "layout.pp" if v == 1 or pp > layers else "layout.virtual_stages"
        given = f"{pp}" if v == 1 else f"{v if field != 'layout.pp' else pp}, so pp {pp} x {v} = {pp * v} chunks"
        most = layers if field == "layout.pp" else layers // pp
        text = f"`{field}` is {given}, but the model has {counted(layers, 'layer')}. Use at most {most}."
        found.append(Problem(field, text))
    chunks = f"`layout.virtual_stages` is {v}, but {name}"
    if v > 1 and layout.schedule not in CHUNKED:
        found.append(Problem("layout.virtual_stages", f"{chunks} has one chunk per stage. Use 1."))
    if v != 2 and layout.schedule in V_SCHEDULES:
        found.append(Problem("layout.virtual_stages", f"{chunks} has two chunks per stage. Use 2."))
    if v == 1 and layout.schedule == "interleaved_1f1b":
        found.append(Problem("layout.virtual_stages", f"{chunks} needs several chunks per stage. Use 2 or more."))
    least = {"1f1b": pp, "interleaved_1f1b": pp, "interleaved_zero_bubble": pp, "dualpipev": 2 * pp}
    needed = least.get(layout.schedule, 1)
    if m < needed:
        text = f"`train.micro_batches` is {m}, but {name} on pp {pp} needs {needed}. Use {needed} or more."
        found.append(Problem("train.micro_batches", text))
    elif layout.schedule in ("interleaved_1f1b", "interleaved_zero_bubble") and v > 1 and m % pp:
        use = nearest_multiples(pp, m)
        text = f"`train.micro_batches` is {m}, but {name} needs a multiple of pp {pp}. Use {use}."
        found.append(Problem("train.micro_batches", text))
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
        text = f"`train.attention` is unfused, but cp {layout.cp} needs fused attention. Use fused, or set cp to 1."
        found.append(Problem("train.attention", text))
    parts, seq_len = 2 * layout.cp, spec.train.seq_len  # one part from each end balances causal work

    def use() -> str:
        return nearest(divisors(seq_len // 2) if seq_len % 2 == 0 else [1], layout.cp)

    return found + _indivisible("layout.cp", layout.cp, "seq_len", seq_len, f"2 x cp {layout.cp} = ", parts, use)


def _experts(spec: JobSpec) -> list[Problem]:
    layout, model, moe = spec.layout, spec.model, spec.model.moe
    if moe is None:
        if layout.ep == 1:
            return []
        return [Problem("layout.ep", f"`layout.ep` is {layout.ep}, but the model has no experts. Use 1.")]
    found = []
    if moe.experts_per_token > moe.num_experts:
        text = f"`model.moe.experts_per_token` is {moe.experts_per_token}. Use at most num_experts {moe.num_experts}."
        found.append(Problem("model.moe.experts_per_token", text))
    if model.arch != "llama":
        text = f"`model.moe` is set, but arch is {model.arch}. Use arch llama, or omit `model.moe`."
        found.append(Problem("model.moe", text))
    if moe.capacity_factor is not None and layout.cp > 1:
        text = f"`model.moe.capacity_factor` is {moe.capacity_factor:g}, but cp {layout.cp} splits the sequence. "
        found.append(Problem("model.moe.capacity_factor", text + "Omit the capacity factor, or set cp to 1."))
    if moe.dense_layers >= model.num_layers:
        text = f"`model.moe.dense_layers` is {moe.dense_layers}, so no layer has experts. "
        found.append(Problem("model.moe.dense_layers", text + f"Use at most {model.num_layers - 1}."))
    ranks = layout.replica_ranks

    def use() -> str:
        return nearest((n for n in divisors(moe.num_experts) if ranks % n == 0), layout.ep)

    found += _indivisible("layout.ep", layout.ep, "num_experts", moe.num_experts, "", layout.ep, use)
    if layout.ep > 1:
        product = f"dp {layout.dp} x cp {layout.cp} ="
        found += _indivisible("layout.ep", layout.ep, product, ranks, "", layout.ep, use)
        if layout.dp_replicas > 1:
            text = f"`layout.dp_replicas` is {layout.dp_replicas}, but HSDP does not support ep {layout.ep}. "
            found.append(Problem("layout.dp_replicas", text + "Use 1, or ep 1."))
    return found


def _data(spec: JobSpec) -> list[Problem]:
    layout, train = spec.layout, spec.train
    found = []
    if layout.zero and layout.replica_ranks == 1:
        text = f"`layout.zero` is {layout.zero}, but dp is 1. Use 0, or set dp to 2 or more."
        found.append(Problem("layout.zero", text))
    found += kept_problems(layout)
    if layout.dp_replicas > 1:
        if not layout.zero:
            text = f"`layout.dp_replicas` is {layout.dp_replicas}, but ZeRO is 0. Use 1 replica, or ZeRO 1 or more."
            found.append(Problem("layout.dp_replicas", text))
        replicas, dp = layout.dp_replicas, layout.dp
        fitting = [n for n in divisors(dp) if n == 1 or n < dp or layout.cp > 1]
        found += _indivisible(
            "layout.dp_replicas", replicas, "dp", dp, "", replicas, lambda: nearest(fitting, replicas)
        )
        if replicas == dp and layout.cp == 1:
            text = f"`layout.dp_replicas` is {replicas}, which leaves one rank per replica for ZeRO. "
            found.append(Problem("layout.dp_replicas", text + f"Use {nearest(fitting, replicas)}."))
    parts, batch = layout.dp * train.micro_batches, train.global_batch
    by = f"dp {layout.dp} x micro_batches {train.micro_batches} = {parts}"
    if batch % parts:
        text = (
            f"`train.global_batch` is {batch}, which is not divisible by {by}. Use {nearest_multiples(parts, batch)}."
        )
        found.append(Problem("train.global_batch", text))
    return found


def kept_problems(layout: Layout) -> list[Problem]:
    """Return the problems of `keep_gathered`, which keeps gathered weights across micro-batches."""
    if not layout.keep_gathered:
        return []
    text = ""
    if layout.zero != 3:
        text = f"ZeRO is {layout.zero}. Use ZeRO 3, or turn keep_gathered off."
    elif layout.pp == 1:
        text = "with pp 1 keep_gathered has the same effect as ZeRO 2. Use ZeRO 2, or set pp to 2 or more."
    elif layout.virtual_stages > 1 and layout.schedule != "looped_bfs":
        label, v = SCHEDULE_NAMES[layout.schedule], layout.virtual_stages
        text = f"{label} alternates between {v} chunks per stage. Use 1 chunk per stage, or the Looped BFS schedule."
    return [Problem("layout.keep_gathered", f"`layout.keep_gathered` is on, but {text}")] if text else []


def _training(spec: JobSpec) -> list[Problem]:
    train = spec.train
    found = []
    if train.seq_len > spec.model.max_seq_len:
        text = f"`train.seq_len` is {train.seq_len}. Use at most the model's max_seq_len {spec.model.max_seq_len}."
        found.append(Problem("train.seq_len", text))
    if train.document_end is not None and train.document_end >= spec.model.vocab_size:
        size = spec.model.vocab_size
        text = f"`train.document_end` is {train.document_end}, but vocab_size is {size}. Use at most {size - 1}."
        found.append(Problem("train.document_end", text))
    if train.warmup_steps > train.steps:
        steps = f"`train.steps` is {train.steps}. Use at most {train.steps}."
        text = f"`train.warmup_steps` is {train.warmup_steps}, but {steps}"
        found.append(Problem("train.warmup_steps", text))
    found += path_problems("train.resume", train.resume, "checkpoint root", "job, job/attempt, or job/attempt/step")
    found += file_problems("train.tokenizer", train.tokenizer, "data root")
    found += path_problems("train.data", train.data, "data root")
    if text := why_not_asked(spec):
        found.append(Problem("train.verify", f"`train.verify` is on, but {text} Use auto or off."))
    return found


def _world(spec: JobSpec, slots: int | None) -> list[Problem]:
    layout, product = spec.layout, product_words(spec.layout)
    if layout.world_size > MAX_RANKS:
        largest = max(MESH_AXES, key=lambda axis: int(getattr(layout, axis)))
        text = f"`layout.{largest}` is {getattr(layout, largest)}, so {product}. Use at most {MAX_RANKS} ranks."
        return [Problem(f"layout.{largest}", text)]
    if slots is None or spec.resources.engine != "hosts" or num_slots(spec) <= slots:
        return []
    has = f"the largest {spec.resources.device.upper()} host has {counted(slots, 'slot')}"
    return [Problem("layout", f"`layout` has {product}, but {has}. Use at most {counted(slots, 'rank')}.")]
