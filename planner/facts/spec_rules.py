"""Check the rules of a spec that involve several fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from planner.facts.kinds import KINDS, find_engine_problems, find_kind_problems, format_world_size, get_num_slots
from planner.facts.layout import MAX_RANKS, MESH_AXES, SCHEDULE_NAMES, V_SCHEDULES, get_num_chunks
from planner.facts.memory_options import find_memory_problems
from planner.facts.model_parts import list_block_changes
from planner.facts.placements import count_local_kv_heads
from planner.facts.precision import get_mixed_precision
from planner.facts.resources import STACK_OPTIONS, SoftwareKernel, get_changed_options
from planner.facts.schedules import splits_backward
from planner.facts.single_process_reference import explain_oversized_reference
from planner.facts.spec import DEFAULT_ROPE_BASE, JobSpec, Layout, ModelSpec
from planner.facts.stages import get_micro_batch_tokens
from planner.facts.validation import (
    Problem,
    find_file_problems,
    find_path_problems,
    format_alternatives,
    format_count,
    format_nearest,
    format_nearest_multiples,
    get_divisors,
)


def find_problems(spec: JobSpec, *, slots: int | None = None) -> list[Problem]:
    """Return all rules across fields that the spec breaks.

    A spec without problems can be planned. `find_unsupported_fields` checks whether it can also run.

    Args:
        slots: Slots of the largest host, if known.
    """
    if not KINDS[spec.kind].trains:  # the batch has no effect
        return [
            *find_kind_problems(spec),
            *find_engine_problems(spec),
            *_find_model_problems(spec),
            *_find_world_problems(spec, slots),
        ]
    return [
        *find_kind_problems(spec),
        *find_engine_problems(spec),
        *find_software_problems(spec),
        *_find_model_problems(spec),
        *_find_tensor_problems(spec),
        *find_pipeline_problems(spec),
        *_find_context_problems(spec),
        *_find_expert_problems(spec),
        *_find_data_problems(spec),
        *_find_training_problems(spec),
        *_find_world_problems(spec, slots),
    ]


def _check_divisible(
    field: str, value: object, what: str, size: int, by: str, degree: int, use: Callable[[], str]
) -> list[Problem]:
    """Return a problem if `size` is not a multiple of `degree`.

    Args:
        use: Returns the valid values.
    """
    if size % degree == 0:
        return []
    return [Problem(field, f"`{field}` is {value}, but {what} {size} is not divisible by {by}{degree}. Use {use()}.")]


def _find_model_problems(spec: JobSpec) -> list[Problem]:
    model = spec.model
    heads, kv_heads = model.num_heads, model.num_kv_heads
    found = []
    if not model.head_dim:
        hidden = model.hidden_size
        fitting = (n for n in get_divisors(hidden) if not model.has_rope or hidden // n % 2 == 0)
        found += _check_divisible(
            "model.num_heads",
            heads,
            "hidden_size",
            hidden,
            "",
            heads,
            lambda: format_nearest(fitting, heads) or "an even hidden_size",
        )
    found += _check_divisible(
        "model.num_kv_heads",
        kv_heads,
        "num_heads",
        heads,
        "",
        kv_heads,
        lambda: format_nearest(get_divisors(heads), kv_heads),
    )
    if model.head_dim and model.mla:
        text = f"`model.head_dim` is {model.head_dim}, but latent attention sets its own head sizes. Omit it."
        found.append(Problem("model.head_dim", text))
    if model.arch == "gpt" and kv_heads != heads and model.block is None:
        text = f"`model.num_kv_heads` is {kv_heads}, but gpt has one key/value head per query head. Use {heads}."
        found.append(Problem("model.num_kv_heads", text))
    if not model.has_rope and (model.rope_scaling or model.rope_base != DEFAULT_ROPE_BASE):
        field = "model.rope_scaling" if model.rope_scaling else "model.rope_base"
        value = "set" if model.rope_scaling else f"{model.rope_base:g}"
        reason = "model.block.positions is not rope. Omit it, or use rope."
        if model.block is None:
            reason = "gpt has learned positions instead of RoPE. Omit it, or set arch to llama."
        text = f"`{field}` is {value}, but {reason}"
        found.append(Problem(field, text))
    found += _find_block_problems(model)
    scaling = model.rope_scaling
    if scaling and scaling.high_freq_factor <= scaling.low_freq_factor:
        text = f"`model.rope_scaling` has high_freq_factor {scaling.high_freq_factor:g}. "
        text += f"Use more than low_freq_factor {scaling.low_freq_factor:g}."
        found.append(Problem("model.rope_scaling", text))
    if model.has_rope and not model.mla and not found and model.head_size % 2:
        field = "model.head_dim" if model.head_dim else "model.hidden_size"
        value = f"{model.head_dim}" if model.head_dim else f"{model.hidden_size} for {heads} heads"
        size, even = model.head_size, (model.head_size - 1, model.head_size + 1)
        use = format_alternatives(n if model.head_dim else n * heads for n in even if n)
        text = f"`{field}` is {value}, but RoPE needs an even head size, and {size} is odd. Use {use}."
        found.append(Problem(field, text))
    return found


def _find_block_problems(model: ModelSpec) -> list[Problem]:
    """Return the problems of the fields in which a layer differs from the usual layer of `arch`."""
    block, found = model.block, []
    if block is None:
        return []
    if block.parallel != (block.num_norms == 1) and block.num_norms != 2:
        use = "4 norms without parallel" if block.parallel else "1 norm with parallel"
        text = f"`model.block.num_norms` is {block.num_norms}, but parallel is {block.parallel}. Use 2 norms, or {use}."
        found.append(Problem("model.block.num_norms", text))
    windowed = block.windowed_layers
    if windowed is not None and (windowed > model.num_layers or not model.sliding_window):
        use = f"at most {model.num_layers}" if model.sliding_window else "it with model.sliding_window, or omit it"
        text = f"`model.block.windowed_layers` is {windowed}. Use {use}."
        found.append(Problem("model.block.windowed_layers", text))
    if model.mla:
        for name in ("query_norm", "qkv_bias", "out_bias", "attention_sinks"):
            value = getattr(block, name)
            if value and value != "none":
                text = f"`model.block.{name}` is {value}, but latent attention does not have it. Omit it."
                found.append(Problem(f"model.block.{name}", text))
    return found


def _find_tensor_problems(spec: JobSpec) -> list[Problem]:
    model, layout = spec.model, spec.layout
    if layout.sequence_parallel and layout.tp == 1:
        text = "`layout.sequence_parallel` needs tp of 2 or more, but tp is 1. Set tp to 2 or more, or leave it off."
        return [Problem("layout.sequence_parallel", text)]
    found = []
    if layout.regather and not layout.sequence_parallel:
        text = "`layout.regather` needs sequence_parallel, which is off. "
        text += "Turn sequence_parallel on, or turn regather off."
        found.append(Problem("layout.regather", text))
    if layout.scatter_gather and (layout.sequence_parallel or layout.pp == 1 or layout.tp == 1):
        sizes = f"pp is {layout.pp} and tp is {layout.tp}" + (
            " with sequence_parallel" if layout.sequence_parallel else ""
        )
        text = "`layout.scatter_gather` needs pp and tp of 2 or more without sequence_parallel"
        text += f", but {sizes}. Change the layout, or turn scatter_gather off."
        found.append(Problem("layout.scatter_gather", text))
    inner = model.moe.expert_ffn_hidden_size if model.moe else 0
    if model.moe and model.moe.shared_size % layout.tp:
        inner = model.moe.shared_size
    message = _explain_tp_problem(layout.tp, model.num_heads, model.num_kv_heads, model.ffn_hidden_size, inner)
    found += [Problem("layout.tp", message)] if message else []
    if layout.sequence_parallel:
        parts, seq_len = layout.tp * layout.cp, spec.train.seq_len
        by = f"tp {layout.tp} x cp {layout.cp} = {parts}" if layout.cp > 1 else f"tp {layout.tp}"
        if seq_len % parts:
            text = f"`layout.sequence_parallel` needs a seq_len divisible by {by}, but seq_len is {seq_len}. "
            text += f"Use seq_len {format_nearest_multiples(parts, seq_len)}."
            found.append(Problem("layout.sequence_parallel", text))
    return found


@lru_cache(maxsize=1024)  # A search checks thousands of layouts of one model.
def _explain_tp_problem(tp: int, heads: int, kv_heads: int, ffn: int, expert_ffn: int) -> str:
    """Return why `tp` ranks cannot split the model, or an empty text."""
    reason = next(_find_indivisible_sizes(tp, heads, kv_heads, ffn, expert_ffn), "")
    if not reason:
        return ""
    valid = (n for n in get_divisors(heads) if not any(_find_indivisible_sizes(n, heads, kv_heads, ffn, expert_ffn)))
    return f"`layout.tp` is {tp}, but {reason}. Use {format_nearest(valid, tp)}."


def _find_indivisible_sizes(tp: int, heads: int, kv_heads: int, ffn: int, expert_ffn: int) -> Iterator[str]:
    """Yield each size that `tp` ranks cannot split. `expert_ffn` is 0 without experts."""
    if heads % tp:
        yield f"{format_count(heads, 'head')} {'is' if heads == 1 else 'are'} not divisible by {tp}"
    if tp < kv_heads and kv_heads % tp:
        yield f"num_kv_heads {kv_heads} is not divisible by {tp}"
    if tp >= kv_heads and tp % kv_heads:  # Several ranks have a replica of each key/value head.
        yield f"tp {tp} is not divisible by num_kv_heads {kv_heads}"
    if ffn % tp:
        yield f"ffn_hidden_size {ffn} is not divisible by {tp}"
    if expert_ffn % tp:
        yield f"expert_ffn_hidden_size {expert_ffn} is not divisible by {tp}"


CHUNKED_SCHEDULES = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", *V_SCHEDULES)


def find_pipeline_problems(spec: JobSpec) -> list[Problem]:
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
    if get_num_chunks(layout) > layers:
        field = "layout.pp" if v == 1 or pp > layers else "layout.virtual_stages"
        value = f"{pp}" if v == 1 else f"{v if field != 'layout.pp' else pp}, so pp {pp} x {v} = {pp * v} chunks"
        most = layers if field == "layout.pp" else layers // pp
        text = f"`{field}` is {value}, but the model has {format_count(layers, 'layer')}. Use at most {most}."
        found.append(Problem(field, text))
    chunks = f"`layout.virtual_stages` is {v}, but {name}"
    if v > 1 and layout.schedule not in CHUNKED_SCHEDULES:
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
        use = format_nearest_multiples(pp, m)
        text = f"`train.micro_batches` is {m}, but {name} needs a multiple of pp {pp}. Use {use}."
        found.append(Problem("train.micro_batches", text))
    return found


def _find_context_problems(spec: JobSpec) -> list[Problem]:
    layout = spec.layout
    if layout.cp == 1:
        return []
    found = []
    if spec.train.attention == "unfused" and spec.resources.stack == "ours":
        text = f"`train.attention` is unfused, but cp {layout.cp} needs fused attention. Use fused, or set cp to 1."
        found.append(Problem("train.attention", text))
    # One part from each end of the sequence balances causal attention.
    parts, seq_len = 2 * layout.cp, spec.train.seq_len

    def use() -> str:
        return format_nearest(get_divisors(seq_len // 2) if seq_len % 2 == 0 else [1], layout.cp)

    return found + _check_divisible("layout.cp", layout.cp, "seq_len", seq_len, f"2 x cp {layout.cp} = ", parts, use)


def _find_expert_problems(spec: JobSpec) -> list[Problem]:
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
        return format_nearest((n for n in get_divisors(moe.num_experts) if ranks % n == 0), layout.ep)

    found += _check_divisible("layout.ep", layout.ep, "num_experts", moe.num_experts, "", layout.ep, use)
    if layout.ep > 1:
        product = f"dp {layout.dp} x cp {layout.cp} ="
        found += _check_divisible("layout.ep", layout.ep, product, ranks, "", layout.ep, use)
        if layout.dp_replicas > 1:
            text = f"`layout.dp_replicas` is {layout.dp_replicas}, but HSDP does not support ep {layout.ep}. "
            found.append(Problem("layout.dp_replicas", text + "Use 1, or ep 1."))
    return found


def _find_data_problems(spec: JobSpec) -> list[Problem]:
    layout, train = spec.layout, spec.train
    found = []
    if layout.zero and layout.replica_ranks == 1:
        text = f"`layout.zero` is {layout.zero}, but dp is 1. Use 0, or set dp to 2 or more."
        found.append(Problem("layout.zero", text))
    found += find_keep_gathered_problems(layout)
    if layout.dp_replicas > 1:
        if not layout.zero:
            text = f"`layout.dp_replicas` is {layout.dp_replicas}, but ZeRO is 0. Use 1 replica, or ZeRO 1 or more."
            found.append(Problem("layout.dp_replicas", text))
        replicas, dp = layout.dp_replicas, layout.dp
        fitting = [n for n in get_divisors(dp) if n == 1 or n < dp or layout.cp > 1]
        found += _check_divisible(
            "layout.dp_replicas", replicas, "dp", dp, "", replicas, lambda: format_nearest(fitting, replicas)
        )
        if replicas == dp and layout.cp == 1:
            text = f"`layout.dp_replicas` is {replicas}, which leaves one rank per replica for ZeRO. "
            found.append(Problem("layout.dp_replicas", text + f"Use {format_nearest(fitting, replicas)}."))
    parts, batch = layout.dp * train.micro_batches, train.global_batch
    by = f"dp {layout.dp} x micro_batches {train.micro_batches} = {parts}"
    if batch % parts:
        use = format_nearest_multiples(parts, batch)
        text = f"`train.global_batch` is {batch}, which is not divisible by {by}. Use {use}."
        found.append(Problem("train.global_batch", text))
    return found


def find_keep_gathered_problems(layout: Layout) -> list[Problem]:
    """Return the problems of `keep_gathered`."""
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


def _find_training_problems(spec: JobSpec) -> list[Problem]:
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
    found += find_path_problems(
        "train.resume", train.resume, "checkpoint root", "job, job/attempt, or job/attempt/step"
    )
    found += find_file_problems("train.tokenizer", train.tokenizer, "data root")
    found += find_path_problems("train.data", train.data, "data root")
    if spec.memory is not None:
        found += find_memory_problems(spec.memory, spec.model.hidden_size, train.micro_batches, train.precision)
    if text := explain_oversized_reference(spec):
        found.append(Problem("train.verify", f"`train.verify` is on, but {text} Use auto or off."))
    return found


def _find_world_problems(spec: JobSpec, slots: int | None) -> list[Problem]:
    layout, product = spec.layout, format_world_size(spec.layout)
    if layout.world_size > MAX_RANKS:
        largest = max(MESH_AXES, key=lambda axis: int(getattr(layout, axis)))
        text = f"`layout.{largest}` is {getattr(layout, largest)}, so {product}. Use at most {MAX_RANKS} ranks."
        return [Problem(f"layout.{largest}", text)]
    if slots is None or spec.resources.engine != "hosts" or get_num_slots(spec) <= slots:
        return []
    has = f"the largest {spec.resources.device.upper()} host has {format_count(slots, 'slot')}"
    return [Problem("layout", f"`layout` has {product}, but {has}. Use at most {format_count(slots, 'rank')}.")]


EXPERT_OPTIONS = ("dispatcher", "overlap_experts")
UNFUSED_KERNELS: tuple[SoftwareKernel, ...] = ("eager",)


def find_software_problems(spec: JobSpec) -> list[Problem]:
    """Return the software options that the stack, the model, or the attention excludes."""
    found = ((f"resources.software.{name}", text) for name, text in _find_refused_options(spec))
    return [Problem(field, f"`{field}` is {text}.") for field, text in found]


def _find_refused_options(spec: JobSpec) -> Iterator[tuple[str, str]]:
    stack = spec.resources.stack
    for name, value in get_changed_options(spec.resources.software).items():
        values = STACK_OPTIONS.get(stack, {}).get(name)
        if values is None:
            yield name, f"set, but `resources.stack` is {stack}. Omit it, or use {_format_owners(name)}"
        elif values and value not in values:
            yield name, f"{value}. For {stack}, use {format_alternatives(['own', *values])}"
        elif name in EXPERT_OPTIONS and spec.model.moe is None:
            yield name, "set, but the model has no experts. Omit it"
        elif name == "nvfp4" and get_mixed_precision(spec.train.precision).gemm != "fp8":
            yield name, f"on, but `train.precision` is {spec.train.precision}. Use an fp8 precision, or turn it off"
        elif name == "attention_kernel" and (value in UNFUSED_KERNELS) != (spec.train.attention == "unfused"):
            kind = "unfused" if value in UNFUSED_KERNELS else "fused"
            yield name, f"{value}, but `train.attention` is {spec.train.attention}. Set `train.attention` to {kind}"


def _format_owners(name: str) -> str:
    return " or ".join(stack for stack, fields in STACK_OPTIONS.items() if name in fields)


FP8_ALIGNMENT = 16  # Multiple that torch's scaled matmul needs on a GPU.


def can_trainer_run(spec: JobSpec) -> bool:
    """Return whether the trainer supports the model, layout, and training of a planned spec.

    The software stack of a plan is left out, because a job with the layout runs Meshboard's trainer.
    """
    return all(problem.field == "resources.stack" for problem in find_unsupported_fields(spec))


def find_unsupported_fields(spec: JobSpec) -> list[Problem]:
    """Return the fields whose values the trainer does not support.

    A valid spec without unsupported fields can be submitted.
    """
    model, layout, train = spec.model, spec.layout, spec.train
    found = []

    def refuse(field: str, what: str) -> None:
        text = f"`{field}`: the trainer does not support {what}. Change this field, or only plan the layout."
        found.append(Problem(field, text))

    if model.mla:
        refuse("model.mla", "latent attention")
    if model.block is not None and (changed := list_block_changes(model.block)):
        refuse("model.block", f"layers with {', '.join(changed)}")
    if model.moe and model.moe.router_bias:
        refuse("model.moe.router_bias", "router biases")
    if model.moe and model.moe.expert_bias:
        refuse("model.moe.expert_bias", "biases in experts")
    if model.moe and model.moe.swiglu_limit is not None:
        refuse("model.moe.swiglu_limit", "clamped experts")
    if model.moe and model.moe.shared_ffn_hidden_size is not None:
        refuse("model.moe.shared_ffn_hidden_size", "shared experts of another size")
    if model.moe and model.moe.shared_gate:
        refuse("model.moe.shared_gate", "a gate of the shared experts")
    if model.head_dim is not None and model.num_heads * model.head_dim != model.hidden_size:
        sizes = f"{model.num_heads} heads of size {model.head_dim} with hidden size {model.hidden_size}"
        refuse("model.head_dim", sizes)
    if model.sliding_window is not None:
        refuse("model.sliding_window", "sliding-window attention")
    if get_mixed_precision(train.precision).gemm == "fp8":
        if model.moe:
            refuse("train.precision", f"precision {train.precision} with experts")
        for side in _find_unaligned_sizes(spec):
            refuse("train.precision", f"precision {train.precision} with {side}")
    if layout.zero and not train.overlap:
        refuse("train.overlap", "gradient reduction after backward with ZeRO")
    if train.compile and (unfit := _find_uncompiled_parts(spec)):
        refuse("train.compile", f"torch.compile with {' and '.join(unfit)}")
    if spec.resources.stack != "ours":
        refuse("resources.stack", f"the {spec.resources.stack} stack")
    if spec.memory is not None:
        refuse("memory", "memory options")
    if train.dropout:
        refuse("train.dropout", "dropout")
    return found


def _find_unaligned_sizes(spec: JobSpec) -> Iterator[str]:
    """Yield the sides of a layer's matmuls that fp8 kernels do not support."""
    model, tp = spec.model, spec.layout.tp
    heads, keys = model.num_heads // tp, count_local_kv_heads(model.num_kv_heads, tp)
    sides = {
        "model.hidden_size": ("", model.hidden_size),
        "queries": (f"{heads} heads of {model.head_size} = ", heads * model.head_size),
        "keys": (f"{keys} heads of {model.head_size} = ", keys * model.head_size),
        "an MLP": (f"{model.ffn_hidden_size} / tp {tp} = ", model.ffn_hidden_size // tp),
        "a micro-batch": ("", get_micro_batch_tokens(spec)),
    }
    for name, (sum_, size) in sides.items():
        if size % FP8_ALIGNMENT:
            unit = "tokens" if name == "a micro-batch" else "columns"
            yield f"{sum_}{size} {unit} per rank in {name}, which is not a multiple of {FP8_ALIGNMENT}"


def _find_uncompiled_parts(spec: JobSpec) -> list[str]:
    """Return the parts of a block that torch.compile does not support here.

    Compiled blocks exclude delayed weight gradients and recomputed operations.
    """
    layout = spec.layout
    parts = {
        "a schedule that splits backward": splits_backward(layout),
        "selective recompute": layout.recompute == "selective",
        "regathered inputs": layout.regather,
        "experts": spec.model.moe is not None,
        "attention within documents": spec.train.document_end is not None,
    }
    return [name for name, is_used in parts.items() if is_used]
