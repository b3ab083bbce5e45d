"""Read the spec of a published row from its columns: the facts that a user of the planner would type.

The name of a model gives its experts and latent attention, as a preset does. The note gives only settings that a spec
has: pipeline schedule, attention kernel, compilation, and sequence parallelism. A fact that the publication does not
state is replaced by what a user would do: the lightest recompute and ZeRO stage that fit in memory.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from benchmarks.published.mixtures import convert_to_gated, fill_sizes, find_mixture, get_expert_tp, has_gated_mlp
from benchmarks.published.rows import PublishedRow, SkipError
from planner.cost.estimate import get_rank_memory
from planner.cost.resolved_plan import resolve
from planner.facts.resources import Resources, StackName
from planner.facts.spec import JobSpec, Layout, ModelSpec, Precision, Recompute, Schedule, TrainSpec
from planner.facts.spec_rules import find_problems
from planner.hardware.catalog import CLUSTERS, GB
from planner.hardware.cluster import Cluster

# (pattern in the row's gpu, cluster): first match wins.
_GPUS = (
    (r"gb300", "gb300"),
    (r"gb200", "gb200"),
    (r"b300", "b300"),
    (r"b200", "b200"),
    (r"gh200", "gh200"),
    (r"h200", "h200"),
    (r"h100.*96gb.*hbm2e", "h100-500w"),
    (r"h100|h800", "h100"),
    (r"a100.*40", "a100-40gb"),
    (r"a100|a800", "a100-80gb"),
    (r"v100.*32", "v100-32gb"),
    (r"v100", "v100-16gb"),
    (r"mi300x", "mi300x"),
)
# (pattern of a cloud instance in the note, network rate of a node in Gb/s), from the provider's list of instances.
_INSTANCES = ((r"p3\.16xlarge", 25), (r"p3\.2xlarge", 10))
_HEAD_DIMS = ((r"qwen3", 128), (r"gpt-oss", 64))
_GPT_OSS_WINDOW = 128  # config.json, `sliding_window`, of every second layer
# (pattern in the model's name, vocabulary) of rows without one.
_VOCABULARIES = ((r"llama-?3", 128256), (r"llama", 32000), (r"", 50304))
_SCHEDULES: tuple[tuple[str, Schedule], ...] = ((r"schedule zb-?v", "zbv"), (r"schedule zb", "interleaved_zero_bubble"))
# Settings of a run without FlashAttention: kernels that a row names, and code from before it (May 2022).
_UNFUSED = (
    r"attention-backend=unfused|transformer-impl=local|attention kernel (torch|fused)|no flash attention|bloom"
    r"|megatron-lm 2021|oneflow|decentralized_fm"
)
# Tensor parallelism without sequence parallelism: as a row says, or code from before it (2205.05198).
_UNSHARDED_SEQUENCE = (
    r"sequence parallel off|bloom|megatron-lm 2021|oneflow|decentralized_fm|(?<!-)-test (?!.*sequence-parallel=true)"
)
# (pattern in a row's source or note, stack): first match wins. Other rows have unknown software.
_STACKS: tuple[tuple[str, StackName], ...] = (
    (r"aleph-alpha", "scaling"),
    (r"megatron-lm 2021", "megatron_2021"),
    (r"bigscience", "deepspeed"),
    (r"fsdp1|llm-foundry", "fsdp1"),
    (r"compile off|eager, fsdp2", "fsdp2_eager"),
    (r"torchtitan|kempner|fsdp2", "fsdp2"),
    (r"nvidia/megatron-lm|nvidia/nemo|nvidia-nemo|dgxc-benchmarking|mlcommons|megatron-swift", "megatron"),
)
MAY_FIT_MARGIN = 0.25  # a run that exists did fit, so a prediction may exceed the memory by its usual error
OLD_GPUS = ("V100",)


Meter = Literal["device", "reserved", "allocated"]


class RowSpec(NamedTuple):
    """Spec of a row.

    Attributes:
        scale: Steps of the row per step of the spec, if its batch is not divisible.
    """

    spec: JobSpec
    cluster: Cluster
    scale: float


def read_columns(row: PublishedRow, stack: StackName) -> RowSpec:
    """Return the spec of a row for a software stack.

    Raises:
        SkipError: A fact is missing, or the planner does not support the row.
    """
    row = fill_sizes(row)
    text = f"{row.text('model')} {row.text('note')}".lower()
    if re.search(r"mamba|nemotron-h|nemotron_3", text):
        raise SkipError("layers without attention (Mamba)")
    if re.search(r"^t5", row.text("model").lower()):
        raise SkipError("encoder and decoder")
    cluster, model = _build_cluster(row), _build_model(row, text)
    spec, scale = _build_spec(row, text, model, cluster, stack)
    if problems := find_problems(spec):
        raise SkipError(f"{problems[0].field}: {problems[0].message}")
    return RowSpec(_choose_unstated(row, spec, cluster), cluster, scale)


def identify_stack(row: PublishedRow) -> StackName:
    """Return the software of a row, as its publication names it."""
    text = f"{row.text('source_repo_path')} {row.text('note')}".lower()
    return next((stack for pattern, stack in _STACKS if re.search(pattern, text)), "unknown")


def _build_spec(
    row: PublishedRow, text: str, model: ModelSpec, cluster: Cluster, stack: StackName
) -> tuple[JobSpec, float]:
    layout = _build_layout(row, text, model)
    global_batch, micro_batch = row.count("global_batch"), row.count("micro_batch")
    if global_batch < layout.dp:
        raise SkipError("fewer sequences than replicas")
    m = max(1, math.ceil(global_batch / (layout.dp * max(1, micro_batch))))
    whole = m * layout.dp * max(1, micro_batch)
    train = TrainSpec(
        global_batch=whole,
        micro_batches=m,
        seq_len=row.count("seq"),
        precision=_parse_precision(row.text("precision").lower()),
        attention="unfused" if re.search(_UNFUSED, text) else "fused",
        compile=re.search(r"torch\.compile|compile on|inductor|packed, compile", text) is not None,
    )
    resources = Resources(device="cuda", stack=stack)
    return JobSpec(model=model, layout=layout, train=train, resources=resources), global_batch / whole


def _choose_unstated(row: PublishedRow, spec: JobSpec, cluster: Cluster) -> JobSpec:
    policies: tuple[Recompute, ...] = (spec.layout.recompute,)
    if row.text("recompute").lower() in ("unknown", "see recipe", ""):
        policies = ("none", "selective", "full")
    stages = (spec.layout.zero,)
    if row.text("zero") in ("unknown", "") and spec.layout.replica_ranks > 1:
        stages = (1, 3)
    tried = [
        spec.model_copy(update={"layout": spec.layout.model_copy(update={"recompute": policy, "zero": zero})})
        for zero in stages
        for policy in policies
    ]
    return next((one for one in tried[:-1] if _fits(one, cluster)), tried[-1])


def _fits(spec: JobSpec, cluster: Cluster) -> bool:
    return compute_peak_bytes(spec, cluster) <= cluster.accelerator.memory_bytes * (1 + MAY_FIT_MARGIN)


def compute_peak_bytes(spec: JobSpec, cluster: Cluster, meter: Meter = "device") -> int:
    """Return the predicted peak memory of the fullest rank, as a meter shows it."""
    stages = [group[0] for group in resolve(spec).partition.equal_stages]
    parts = max((get_rank_memory(spec, stage, cluster) for stage in stages), key=lambda parts: sum(parts.values()))
    tensors = sum(parts.values()) - parts["allowance"]
    if meter == "allocated":
        return tensors
    return round(tensors * (1 + cluster.accelerator.fragmentation)) if meter == "reserved" else sum(parts.values())


def identify_meter(row: PublishedRow) -> Meter:
    """Return the meter of a row: of the device, or of torch's allocator, whose figures are in bytes."""
    if row.text("measure_name").endswith("_bytes"):
        return "allocated"
    return "reserved" if "reserved" in row.text("note") else "device"


def _build_cluster(row: PublishedRow) -> Cluster:
    """Return the cluster of a row, with the nodes and network that it states.

    Raises:
        SkipError: The planner has no such accelerator.
    """
    gpu = row.text("gpu").lower()
    name = next((name for pattern, name in _GPUS if re.search(pattern, gpu)), None)
    if name is None:
        raise SkipError(f"no such accelerator: {row.text('gpu') or 'none given'}")
    cluster = CLUSTERS[name]
    changed: dict[str, object] = {}
    per_node = cluster.per_node
    if found := re.search(r"x ?(\d+) a node", gpu):
        changed["per_node"] = per_node = int(found[1])
    if rate := _read_network_gbit(row.text("note").lower()):
        changed["network"] = cluster.network.model_copy(update={"bytes_per_s": rate / 8 / per_node * GB})
    return cluster.model_copy(update=changed) if changed else cluster


def _read_network_gbit(note: str) -> int | None:
    """Return the network rate of a node in Gb/s that a note states."""
    for pattern, rate in _INSTANCES:
        if re.search(pattern, note):
            return rate
    if found := re.search(r"(\d+)x omni-path (\d+)", note):
        return int(found[1]) * int(found[2])
    found = re.search(r"one (\d+) gb/s infiniband port a node|network \d+ ms, (\d+) gb/s", note)
    return int(found[1] or found[2]) if found else None


def _build_model(row: PublishedRow, text: str) -> ModelSpec:
    hidden, heads, tp = row.count("hidden"), row.count("heads"), max(1, row.count("tp", 1))
    name = row.text("model").lower()
    if hidden % heads and not any(re.search(pattern, text) for pattern, _ in _HEAD_DIMS):
        raise SkipError("hidden is not a multiple of heads")
    kv_heads = row.count("kv_heads", heads) or heads
    moe, mla, dense_ffn = find_mixture(row, text)
    if heads % kv_heads or (kv_heads > tp and kv_heads % tp) or heads % tp:
        raise SkipError("heads cannot be divided so")
    gated = moe is not None or has_gated_mlp(row, text)
    like_gpt = not gated and mla is None and kv_heads == heads
    ffn = dense_ffn or row.count("ffn", 4 * hidden)
    if not gated and not like_gpt:
        ffn = convert_to_gated(ffn, tp)
    vocab = row.count("vocab", next(size for pattern, size in _VOCABULARIES if re.search(pattern, name)))
    return ModelSpec(
        head_dim=next((size for pattern, size in _HEAD_DIMS if re.search(pattern, text)), None),
        sliding_window=_GPT_OSS_WINDOW if "gpt-oss" in text else None,
        arch="gpt" if like_gpt else "llama",
        num_layers=row.count("layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=-(-max(256, vocab) // tp) * tp,
        max_seq_len=row.count("seq"),
        tied_embeddings=like_gpt and "untie" not in text,
        moe=moe,
        mla=mla,
    )


def _build_layout(row: PublishedRow, text: str, model: ModelSpec) -> Layout:
    tp, pp, cp = (max(1, row.count(axis, 1)) for axis in ("tp", "pp", "cp"))
    dp, rest = divmod(row.count("gpus"), tp * pp * cp)
    if rest or dp < 1:
        raise SkipError("degrees do not divide the GPUs")
    chunks = max(1, row.count("vpp", 1)) if pp > 1 else 1
    schedule: Schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
    if pp > 1:
        schedule = next((name for pattern, name in _SCHEDULES if re.search(pattern, text)), schedule)
    if pp * chunks > model.num_layers:
        schedule, chunks = "1f1b", 1  # stages that hold one layer fewer
    if pp > model.num_layers:
        raise SkipError("more stages than layers")
    # A rank that does not shard its experts over tp holds as many as with fewer expert ranks.
    held = max(1, row.count("ep", 1) * get_expert_tp(row, text, tp) // tp)
    sequence = tp > 1 and not re.search(_UNSHARDED_SEQUENCE, text)
    return Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        cp=cp,
        ep=math.gcd(held, dp * cp, model.moe.num_experts) if model.moe else 1,
        zero=min(3, row.count("zero", 1 if row.text("zero") in ("unknown", "") else 0)) if dp * cp > 1 else 0,
        sequence_parallel=sequence,
        regather=sequence,
        scatter_gather=pp > 1 and tp > 1 and not sequence,
        schedule=schedule,
        virtual_stages=chunks,
        balance="cost" if model.num_layers % (pp * chunks) else "layers",
        recompute=_parse_recompute(row.text("recompute").lower()),
    )


def _parse_recompute(text: str) -> Recompute:
    if text.startswith("full"):
        return "full"
    return "selective" if text.startswith("selective") else "none"


def _parse_precision(text: str) -> Precision:
    pure = "pure" in text or "bf16 weights" in text
    if re.search(r"fp8|fp4|mxfp", text):
        return "fp8_gradients" if pure else "fp8"
    if pure:
        return "bf16_state"
    if re.search(r"bf16|fp16|half|mixed|amp|16-bit", text):
        return "bf16"
    if "32" in text:
        return "fp32"
    raise SkipError(f"precision {text or 'not given'}")
