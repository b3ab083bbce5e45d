"""Map a published row to a spec, a cluster, a stack, and a kind of measurement.

Values that the row omits are set here, with the reason. Nothing is fitted.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from benchmarks.published.megatron_tests import (
    IN_8_CHUNKS,
    KEEPS_SCORES,
    MAKES_AGAIN,
    UNEVEN,
    UNEVEN_LAST,
    UNEVEN_LAYERS,
    WITHOUT_DROPOUT,
    compute_after_step_s,
    get_host_factor,
    get_mtp_layers,
    is_megatron_test,
    keeps_loaded_moments,
)
from benchmarks.published.mixtures import fill_sizes, find_mixture, get_expert_tp, has_gated_mlp
from benchmarks.published.recipes import (
    counts_embedding_as_layer,
    has_dropout,
    has_mtp_layer,
    has_short_last_chunk,
    lacks_fused_attention,
)
from benchmarks.published.recompute import RecipeRecompute, find_recompute
from benchmarks.published.rows import PublishedRow, SkipError, has_unsharded_ends, is_kempner
from benchmarks.published.software import build_stack
from planner.facts.resources import Resources, StackName
from planner.facts.spec import AttentionKernel, JobSpec, Layout, ModelSpec, Precision, Recompute, TrainSpec
from planner.hardware.catalog import CLUSTERS, GB
from planner.hardware.cluster import Cluster
from planner.hardware.stacks import (
    Stack,
)

Meter = Literal["device", "reserved", "allocated"]


class MappedRow(NamedTuple):
    """Input of the planner for a row.

    Attributes:
        scale: Steps of the row per step of the spec, if its batch is not divisible.
        stage: Stage whose memory was measured, or None for the fullest.
        meter: Memory of the device, reserved memory of the allocator, or allocated memory.
        own_tests: The row is of Megatron-LM's tests. `text` has the name of the test.
        predicts_two: The model has an MTP layer.
        makes_again: Recomputed modules that a spec cannot name.
        half: Training is in fp16.
        loaded_twice: A resumed run keeps its loaded moments.
        gated: The MLPs are gated.
        kempner: See `is_kempner`.
    """

    spec: JobSpec
    cluster: Cluster
    stack: StackName
    kernels: Stack
    scale: float
    stage: int | None
    meter: Meter
    any_recompute: bool
    usual_recompute: bool
    own_tests: bool
    text: str
    predicts_two: bool
    makes_again: bool
    half: bool
    loaded_twice: bool
    gated: bool
    kempner: bool


# Whose gradients are no wider than weights: Aleph Alpha's (15 B parameters a GPU ran on 80 GB), and NVIDIA's recipes
# for speed, which reduce gradients in bf16 (a log of one has 4.4 B a parameter allocated).
NARROW_GRADIENTS = r"aleph-alpha|nvidia/dgxc|nvidia/nemo|nvidia-nemo|mlcommons"
BF16_OPTIMIZER_LINE = 899
NARROWED: dict[Precision, Precision] = {"bf16": "bf16_gradients", "fp8": "fp8_gradients"}

# (pattern in the row's gpu, in lower case; cluster): first match wins.
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

_HEAD_DIMS = ((r"qwen3", 128), (r"gpt-oss", 64))
_GPT_OSS_WINDOW = 128  # its config.json, `sliding_window`; of every second layer


def map_row(row: PublishedRow) -> MappedRow:
    """Return the input of the planner for a row.

    Raises:
        SkipError: The planner does not support the row. The error has the reason.
    """
    text = f"{row.text('model')} {row.text('note')}".lower()
    _check_supported(text)
    row = _limit_gpus_to_degrees(fill_sizes(row), text)
    stack, cluster = choose_stack(row), _build_cluster(row)
    model = _build_model(row, text, stack)
    layout = _build_layout(row, text, stack, model)
    precision = _parse_precision(row.text("precision").lower())
    if re.search(NARROW_GRADIENTS, row.source.lower()) or _is_before_bf16_optimizer(text):
        precision = NARROWED.get(precision, precision)
    if is_kempner(row):
        precision = "bf16_state"
    seq = row.count("seq")
    global_batch = row.count("global_batch")
    micro_batch = max(1, row.count("micro_batch"))
    if global_batch < layout.dp:
        raise SkipError("fewer sequences than replicas")
    m = max(1, math.ceil(global_batch / (layout.dp * micro_batch)))
    whole = m * layout.dp * micro_batch
    train = TrainSpec(
        global_batch=whole,
        micro_batches=m,
        seq_len=seq,
        precision=precision,
        attention="unfused" if lacks_fused_attention(row) else _choose_attention(text, stack),
        compile=stack == "fsdp2" and not _has_uncompiled_loss(row),
        dropout=_has_dropout(row, text, layout),
    )
    spec = JobSpec(model=model, layout=layout, train=train, resources=Resources(device=cluster.device, stack=stack))
    result = row.text("recompute").lower() not in ("see recipe", "unknown", "")
    kernels = build_stack(row, text, stack, model, layout)
    if is_megatron_test(row):
        kernels = kernels._replace(step_s=kernels.step_s + get_host_factor(row) * compute_after_step_s(text, spec))
    return MappedRow(
        spec,
        cluster,
        stack,
        kernels,
        scale=global_batch / whole,
        stage=_get_measured_stage(row, text, layout),
        meter=_get_meter(row),
        own_tests=is_megatron_test(row),
        text=text,
        predicts_two=get_mtp_layers(row, text) is not None,
        makes_again=is_megatron_test(row) and re.search(MAKES_AGAIN, text) is not None,
        half=row.text("precision").lower() == "fp16",
        loaded_twice=keeps_loaded_moments(row),
        gated=has_gated_mlp(row, text),
        kempner=is_kempner(row),
        any_recompute=not result,
        usual_recompute=not result and find_recompute(row) is None,
    )


def _get_measured_stage(row: PublishedRow, text: str, layout: Layout) -> int | None:
    if is_kempner(row):
        return 0  # its rank 0 alone logs (metrics/tracker.py)
    return layout.pp - 1 if "(last)" in text or row.kind == "steady" else None


def _has_dropout(row: PublishedRow, text: str, layout: Layout) -> bool:
    if is_megatron_test(row):
        return layout.cp == 1 and not re.search(WITHOUT_DROPOUT, text)
    return has_dropout(row)


def _get_meter(row: PublishedRow) -> Meter:
    if row.text("measure_name").endswith("_bytes") or is_kempner(row):
        return "allocated"
    return "reserved" if "max_reserved" in row.text("note") else "device"


def _has_uncompiled_loss(row: PublishedRow) -> bool:
    """Return True for torchtitan until 2025, which compiled only layers."""
    return is_kempner(row) or "_202412_" in row.text("source_repo_path")


def _is_before_bf16_optimizer(text: str) -> bool:
    """Return True for fp16 rows of BLOOM, before its optimizer summed gradients in fp32
    (chronicles-prequel.md, line 899).
    """
    line = re.search(r"line (\d+); megatron-deepspeed", text)
    return line is not None and int(line[1]) < BF16_OPTIMIZER_LINE


def _check_supported(text: str) -> None:
    if "mamba" in text or "nemotron-h" in text or "nemotron_3" in text:
        raise SkipError("layers without attention (Mamba)")


def choose_stack(row: PublishedRow) -> StackName:
    """Choose a stack by the software of the row, then by its publisher, then by its sharding."""
    text = f"{row.text('source_repo_path')} {row.text('note')}".lower()
    if is_megatron_test(row):  # names of some say FSDP2
        return "megatron"
    if re.search(r"fsdp1|llm-foundry", text):
        return "fsdp1"
    if re.search(r"compile off|eager, fsdp", text):
        return "fsdp2_eager"
    if re.search(r"fsdp2|fsdp\+|torchtitan|torch\.compile|maxtext|paxml|kempner", text):
        return "fsdp2"
    if "aleph-alpha" in text:
        return "scaling"
    if re.search(r"deepspeed|bigscience|sailor", text):
        return "deepspeed"
    if re.search(r"nvidia|megatron|mlcommons|nemo", text):
        return "megatron"
    return "fsdp2" if row.count("zero", 0) == 3 else "megatron"


def _build_cluster(row: PublishedRow) -> Cluster:
    gpu, note = row.text("gpu").lower(), row.text("note").lower()
    name = next((name for pattern, name in _GPUS if re.search(pattern, gpu)), None)
    if name is None or name not in CLUSTERS:
        raise SkipError(f"no such accelerator: {row.text('gpu') or 'none given'}")
    cluster = CLUSTERS[name]
    changed: dict[str, object] = {}
    if found := re.search(r"x ?(\d+) a node", gpu):
        changed["per_node"] = int(found[1])
    if is_kempner(row):
        changed["per_node"] = 4
    if found := re.search(r"(\d+)x omni-path (\d+)", note):  # links a node, Gb/s each
        rate = int(found[1]) * int(found[2]) / 8 / cluster.per_node * GB
        changed["network"] = cluster.network.model_copy(update={"bytes_per_s": rate})
    if "fp4" in row.text("precision").lower() and not cluster.accelerator.fp4_flops:
        raise SkipError("fp4 on an accelerator without it")
    return cluster.model_copy(update=changed) if changed else cluster


def _build_model(row: PublishedRow, text: str, stack: StackName) -> ModelSpec:
    hidden, heads, seq = row.count("hidden"), row.count("heads"), row.count("seq")
    if hidden % heads and not any(re.search(pattern, text) for pattern, _ in _HEAD_DIMS):
        raise SkipError("hidden is not a multiple of heads")
    kv_heads = row.count("kv_heads", heads) or heads
    tp = max(1, row.count("tp", 1))
    moe, mla, dense_ffn = find_mixture(row, text)
    ffn = dense_ffn or row.count("ffn", 4 * hidden)
    if heads % kv_heads or (kv_heads > tp and kv_heads % tp) or heads % tp:
        raise SkipError("heads cannot be divided so")
    gated = moe is not None or has_gated_mlp(row, text)
    like_gpt = not gated and mla is None and kv_heads == heads and "nemotron" not in text
    if not gated and not like_gpt:
        ffn = round(ffn * 2 / 3 / (8 * tp)) * 8 * tp  # without gate and biases: as many weights in a gated MLP
    layers, vocab = row.count("layers"), row.count("vocab", 128256)
    if moe and (two := get_mtp_layers(row, text)):
        layers, moe = two[0], moe.model_copy(update={"dense_layers": two[1]})
    layers += has_mtp_layer(row)
    if is_megatron_test(row) and re.search(UNEVEN, text):
        layers = UNEVEN_LAYERS if row.kind == "time" else UNEVEN_LAST
    if counts_embedding_as_layer(row) and layers + 2 == row.count("pp") * row.count("vpp", 1):
        layers += 2  # in chunks of one layer each the slowest rank holds none of the ends
    if has_unsharded_ends(row):
        vocab *= tp
    head_dim = next((size for pattern, size in _HEAD_DIMS if re.search(pattern, text)), None)
    return ModelSpec(
        head_dim=head_dim,
        sliding_window=_GPT_OSS_WINDOW if "gpt-oss" in text else None,
        arch="gpt" if like_gpt else "llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_hidden_size=ffn,
        vocab_size=-(-max(256, vocab) // tp) * tp,
        max_seq_len=seq,
        tied_embeddings=(like_gpt or is_megatron_test(row)) and "untie" not in text,
        moe=moe,
        mla=mla,
    )


def _limit_gpus_to_degrees(row: PublishedRow, text: str) -> PublishedRow:
    """Limit the GPUs to the product of the degrees if a table lists more.

    A later draft of NeMo's table (performance_long_sequence.md, # of GPUs 2 to 256) has equal degrees and rates for
    that number of GPUs.
    """
    listed = re.search(r"dp as listed (\d+)", text)
    if listed is None:
        return row
    gpus = math.prod(max(1, row.count(axis, 1)) for axis in ("tp", "pp", "cp")) * int(listed[1])
    return row._replace(fields={**row.fields, "gpus": str(gpus), "dp": listed[1]})


def _build_layout(row: PublishedRow, text: str, stack: StackName, model: ModelSpec) -> Layout:
    tp, pp, cp = (max(1, row.count(axis, 1)) for axis in ("tp", "pp", "cp"))
    dp, rest = divmod(row.count("gpus"), tp * pp * cp)
    if rest or dp < 1:
        raise SkipError("degrees do not divide the GPUs")
    chunks = row.count("vpp", 1) if pp > 1 else 1
    if is_megatron_test(row) and re.search(IN_8_CHUNKS, text):
        chunks = 8 // pp
    if pp * max(1, chunks) > model.num_layers:
        raise SkipError("more stages than layers")
    # Where tensor ranks divide no expert (etp 1) they have other ones. Here they divide each: a rank holds and computes
    # as much with so many times fewer expert ranks.
    held = max(1, row.count("ep", 1) * get_expert_tp(row, text, tp) // tp)
    ep = math.gcd(held, dp * cp, model.moe.num_experts) if model.moe else 1
    zero = min(3, row.count("zero", 0)) if dp * cp > 1 else 0
    if zero > 1 and pp > 1 and row.source == "pytorch/torchtitan":
        # torchtitan's stages gather once per step and sum after the last micro-batch (parallelize_llama.py,
        # apply_fsdp)
        zero = 1
    replicas = 1
    if found := re.search(r"shard group (\d+)", text):
        replicas = max(1, dp * cp // int(found[1]))
    elif "multi_dist_optimizer_instances" in text:
        replicas = 2  # its --num-distributed-optimizer-instances
    sequence = _has_sequence_parallel(text, stack, tp) and not has_unsharded_ends(row)
    recompute = _parse_recompute(row.text("recompute").lower())
    if repeated := find_recompute(row):
        recompute = _get_recompute_policy(repeated)
    if KEEPS_SCORES in text:
        recompute = "none"
    return Layout(
        dp=dp,
        pp=pp,
        tp=tp,
        cp=cp,
        ep=ep,
        zero=zero,
        dp_replicas=replicas if zero and dp % replicas == 0 else 1,
        sequence_parallel=sequence,
        # Both regather a matmul's input in backward: Megatron always, and torchtitan as part of its recompute.
        regather=sequence and (stack == "megatron" or (stack == "fsdp2" and recompute == "selective")),
        # Stages of Megatron and DeepSpeed divide the activations that they send (runtime/pipe/engine.py,
        # `is_pipe_partitioned`). Stages of Scaling send them whole (core/nn/parallel_module/communicator.py).
        scatter_gather=pp > 1 and tp > 1 and not sequence and stack != "scaling",
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        virtual_stages=max(1, chunks),
        cp_method="ring",
        balance="cost" if has_short_last_chunk(row) else "layers",
        recompute=recompute,
    )


def _has_sequence_parallel(text: str, stack: StackName, tp: int) -> bool:
    if tp == 1 or "sequence parallel off" in text:
        return False
    if "sequence parallel on" in text or "sequence-parallel=true" in text:
        return True
    return stack in ("megatron", "fsdp2", "fsdp2_eager") and "-test " not in text


def _get_recompute_policy(repeated: RecipeRecompute) -> Recompute:
    if repeated.layers:
        return "full"
    return "selective" if repeated.modules else "none"


def _parse_recompute(text: str) -> Recompute:
    if text.startswith("full"):
        return "full"
    return "selective" if text.startswith("selective") else "none"


def _parse_precision(text: str) -> Precision:
    if re.search(r"fp8|fp4|mxfp", text):
        return "fp8"
    if "pure" in text:
        return "bf16_gradients"
    if re.search(r"bf16|fp16|half|mixed|amp", text):
        return "bf16"
    if "32" in text:
        return "fp32"
    raise SkipError(f"precision {text or 'not given'}")


def _choose_attention(text: str, stack: StackName) -> AttentionKernel:
    if found := re.search(r"attention kernel (\w+)", text):
        return "unfused" if found[1] in ("torch", "fused") else "fused"
    if "attention-backend=unfused" in text or "transformer-impl=local" in text or "bloom" in text:
        return "unfused"
    return "fused"
