"""From a published row to what the planner takes: a spec, a cluster, the stack, and how the row was measured.

What a row leaves open is filled in here, once, with the reason beside it. Nothing is fitted.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from benchmarks.published.mixtures import expert_tp, is_gated, mixture_of
from benchmarks.published.own_tests import (
    IN_8_CHUNKS,
    KEEPS_SCORES,
    MAKES_AGAIN,
    UNEVEN,
    UNEVEN_LAST,
    UNEVEN_LAYERS,
    WITHOUT_DROPOUT,
    after_step_s,
    keeps_loaded,
    predicts_two,
    tests_of_megatron,
)
from benchmarks.published.recipes import counts_ends, divides_by_cost, drops_out, lacks_fused_attention, predicts_second
from benchmarks.published.recorded import host_of
from benchmarks.published.repeated import Repeated, repeated_by
from benchmarks.published.rows import PublishedRow, SkipError, has_whole_ends, of_kempner
from benchmarks.published.sizes import sized
from benchmarks.published.software import kernels_of
from planner.facts.resources import Resources, StackName
from planner.facts.spec import AttentionKernel, JobSpec, Layout, ModelSpec, Precision, Recompute, TrainSpec
from planner.hardware.catalog import CLUSTERS, GB
from planner.hardware.cluster import Cluster
from planner.hardware.stacks import (
    Stack,
)

Meter = Literal["device", "reserved", "allocated"]


class Planned(NamedTuple):
    """`scale`: steps of the row over steps of the spec, where its batch cannot be divided evenly.

    `stage`: whose memory was measured, None for the fullest. `meter`: the device's own count, what the allocator
    holds of it, or gives of that. `own_tests`: of Megatron-LM's; `text` tells which,
    `predicts_two`: a second token, `makes_again`: modules, whose memory is not the spec's, `half`: in fp16,
    `loaded_twice`: moments of a run after a stop. `gated`: as the row's own MLPs are. `kempner`: as `of_kempner` says.
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


def plan_of(row: PublishedRow) -> Planned:
    """What the planner is asked about a row.

    Raises:
        SkipError: with the reason.
    """
    text = f"{row.text('model')} {row.text('note')}".lower()
    _refuse(text)
    row = _as_listed(sized(row), text)
    stack, cluster = stack_of(row), _cluster(row)
    model = _model(row, text, stack)
    layout = _layout(row, text, stack, model)
    precision = _precision(row.text("precision").lower())
    if re.search(NARROW_GRADIENTS, row.source.lower()) or _before_bf16_optimizer(text):
        precision = NARROWED.get(precision, precision)
    if of_kempner(row):
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
        attention="unfused" if lacks_fused_attention(row) else _attention(text, stack),
        compile=stack == "fsdp2" and not _computes_loss_apart(row),
        dropout=_drops_out(row, text, layout),
    )
    spec = JobSpec(model=model, layout=layout, train=train, resources=Resources(device=cluster.device, stack=stack))
    told = row.text("recompute").lower() not in ("see recipe", "unknown", "")
    kernels = kernels_of(row, text, stack, model, layout)
    if tests_of_megatron(row):
        kernels = kernels._replace(step_s=kernels.step_s + host_of(row) * after_step_s(text, spec))
    return Planned(
        spec,
        cluster,
        stack,
        kernels,
        scale=global_batch / whole,
        stage=_stage(row, text, layout),
        meter=_meter(row),
        own_tests=tests_of_megatron(row),
        text=text,
        predicts_two=predicts_two(row, text) is not None,
        makes_again=tests_of_megatron(row) and re.search(MAKES_AGAIN, text) is not None,
        half=row.text("precision").lower() == "fp16",
        loaded_twice=keeps_loaded(row),
        gated=is_gated(row, text),
        kempner=of_kempner(row),
        any_recompute=not told,
        usual_recompute=not told and repeated_by(row) is None,
    )


def _stage(row: PublishedRow, text: str, layout: Layout) -> int | None:
    if of_kempner(row):
        return 0  # its rank 0 alone logs (metrics/tracker.py)
    return layout.pp - 1 if "(last)" in text or row.kind == "steady" else None


def _drops_out(row: PublishedRow, text: str, layout: Layout) -> bool:
    if tests_of_megatron(row):
        return layout.cp == 1 and not re.search(WITHOUT_DROPOUT, text)
    return drops_out(row)


def _meter(row: PublishedRow) -> Meter:
    if row.text("measure_name").endswith("_bytes") or of_kempner(row):
        return "allocated"
    return "reserved" if "max_reserved" in row.text("note") else "device"


def _computes_loss_apart(row: PublishedRow) -> bool:
    """torchtitan compiled layers alone until 2025."""
    return of_kempner(row) or "_202412_" in row.text("source_repo_path")


def _before_bf16_optimizer(text: str) -> bool:
    """Whether a row of BLOOM's stands before its chronicle turns to an optimiser that adds gradients up in fp32: those
    before it were fp16 throughout (chronicles-prequel.md, line 899)."""
    line = re.search(r"line (\d+); megatron-deepspeed", text)
    return line is not None and int(line[1]) < BF16_OPTIMIZER_LINE


def _refuse(text: str) -> None:
    if "mamba" in text or "nemotron-h" in text or "nemotron_3" in text:
        raise SkipError("layers without attention (Mamba)")


def stack_of(row: PublishedRow) -> StackName:
    """By what the row says of its software, then by who published it, then by how it shards."""
    text = f"{row.text('source_repo_path')} {row.text('note')}".lower()
    if tests_of_megatron(row):  # names of some say FSDP2
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


def _cluster(row: PublishedRow) -> Cluster:
    gpu, note = row.text("gpu").lower(), row.text("note").lower()
    name = next((name for pattern, name in _GPUS if re.search(pattern, gpu)), None)
    if name is None or name not in CLUSTERS:
        raise SkipError(f"no such accelerator: {row.text('gpu') or 'none given'}")
    cluster = CLUSTERS[name]
    changed: dict[str, object] = {}
    if found := re.search(r"x ?(\d+) a node", gpu):
        changed["per_node"] = int(found[1])
    if of_kempner(row):
        changed["per_node"] = 4
    if found := re.search(r"(\d+)x omni-path (\d+)", note):  # links a node, Gb/s each
        rate = int(found[1]) * int(found[2]) / 8 / cluster.per_node * GB
        changed["network"] = cluster.network.model_copy(update={"bytes_per_s": rate})
    if "fp4" in row.text("precision").lower() and not cluster.accelerator.fp4_flops:
        raise SkipError("fp4 on an accelerator without it")
    return cluster.model_copy(update=changed) if changed else cluster


def _model(row: PublishedRow, text: str, stack: StackName) -> ModelSpec:
    hidden, heads, seq = row.count("hidden"), row.count("heads"), row.count("seq")
    if hidden % heads and not any(re.search(pattern, text) for pattern, _ in _HEAD_DIMS):
        raise SkipError("hidden is not a multiple of heads")
    kv_heads = row.count("kv_heads", heads) or heads
    tp = max(1, row.count("tp", 1))
    moe, mla, dense_ffn = mixture_of(row, text)
    ffn = dense_ffn or row.count("ffn", 4 * hidden)
    if heads % kv_heads or (kv_heads > tp and kv_heads % tp) or heads % tp:
        raise SkipError("heads cannot be divided so")
    gated = moe is not None or is_gated(row, text)
    like_gpt = not gated and mla is None and kv_heads == heads and "nemotron" not in text
    if not gated and not like_gpt:
        ffn = round(ffn * 2 / 3 / (8 * tp)) * 8 * tp  # without gate and biases: as many weights in a gated MLP
    layers, vocab = row.count("layers"), row.count("vocab", 128256)
    if moe and (two := predicts_two(row, text)):
        layers, moe = two[0], moe.model_copy(update={"dense_layers": two[1]})
    layers += predicts_second(row)
    if tests_of_megatron(row) and re.search(UNEVEN, text):
        layers = UNEVEN_LAYERS if row.kind == "time" else UNEVEN_LAST
    if counts_ends(row) and layers + 2 == row.count("pp") * row.count("vpp", 1):
        layers += 2  # in chunks of one layer each the slowest rank holds none of the ends
    if has_whole_ends(row):
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
        tied_embeddings=(like_gpt or tests_of_megatron(row)) and "untie" not in text,
        moe=moe,
        mla=mla,
    )


def _as_listed(row: PublishedRow, text: str) -> PublishedRow:
    """With as many GPUs as the listed degrees make, where a table lists more. A later draft of NeMo's
    (performance_long_sequence.md, # of GPUs 2 to 256) has the same degrees and rates beside just so many."""
    listed = re.search(r"dp as listed (\d+)", text)
    if listed is None:
        return row
    gpus = math.prod(max(1, row.count(axis, 1)) for axis in ("tp", "pp", "cp")) * int(listed[1])
    return row._replace(fields={**row.fields, "gpus": str(gpus), "dp": listed[1]})


def _layout(row: PublishedRow, text: str, stack: StackName, model: ModelSpec) -> Layout:
    tp, pp, cp = (max(1, row.count(axis, 1)) for axis in ("tp", "pp", "cp"))
    dp, rest = divmod(row.count("gpus"), tp * pp * cp)
    if rest or dp < 1:
        raise SkipError("degrees do not divide the GPUs")
    chunks = row.count("vpp", 1) if pp > 1 else 1
    if tests_of_megatron(row) and re.search(IN_8_CHUNKS, text):
        chunks = 8 // pp
    if pp * max(1, chunks) > model.num_layers:
        raise SkipError("more stages than layers")
    # Where tensor ranks divide no expert (etp 1) they have other ones. Here they divide each: a rank holds and computes
    # as much with so many times fewer expert ranks.
    held = max(1, row.count("ep", 1) * expert_tp(row, text, tp) // tp)
    ep = math.gcd(held, dp * cp, model.moe.num_experts) if model.moe else 1
    zero = min(3, row.count("zero", 0)) if dp * cp > 1 else 0
    if zero > 1 and pp > 1 and row.source == "pytorch/torchtitan":
        zero = 1  # its stages gather once a step and sum after the last micro-batch (parallelize_llama.py, apply_fsdp)
    replicas = 1
    if found := re.search(r"shard group (\d+)", text):
        replicas = max(1, dp * cp // int(found[1]))
    elif "multi_dist_optimizer_instances" in text:
        replicas = 2  # its --num-distributed-optimizer-instances
    sequence = _sequence_parallel(text, stack, tp) and not has_whole_ends(row)
    recompute = _recompute(row.text("recompute").lower())
    if repeated := repeated_by(row):
        recompute = _policy(repeated)
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
        # Both gather a product's input again in backward: Megatron always, torchtitan as part of what it repeats.
        regather=sequence and (stack == "megatron" or (stack == "fsdp2" and recompute == "selective")),
        # Stages of Megatron do, and of DeepSpeed (runtime/pipe/engine.py, `is_pipe_partitioned`); Scaling's send whole
        # what they have (core/nn/parallel_module/communicator.py).
        scatter_gather=pp > 1 and tp > 1 and not sequence and stack != "scaling",
        schedule="interleaved_1f1b" if chunks > 1 else "1f1b",
        virtual_stages=max(1, chunks),
        cp_method="ring",
        balance="cost" if divides_by_cost(row) else "layers",
        recompute=recompute,
    )


def _sequence_parallel(text: str, stack: StackName, tp: int) -> bool:
    if tp == 1 or "sequence parallel off" in text:
        return False
    if "sequence parallel on" in text or "sequence-parallel=true" in text:
        return True
    return stack in ("megatron", "fsdp2", "fsdp2_eager") and "-test " not in text


def _policy(repeated: Repeated) -> Recompute:
    if repeated.layers:
        return "full"
    return "selective" if repeated.modules else "none"


def _recompute(text: str) -> Recompute:
    if text.startswith("full"):
        return "full"
    return "selective" if text.startswith("selective") else "none"


def _precision(text: str) -> Precision:
    if re.search(r"fp8|fp4|mxfp", text):
        return "fp8"
    if "pure" in text:
        return "bf16_gradients"
    if re.search(r"bf16|fp16|half|mixed|amp", text):
        return "bf16"
    if "32" in text:
        return "fp32"
    raise SkipError(f"precision {text or 'not given'}")


def _attention(text: str, stack: StackName) -> AttentionKernel:
    if found := re.search(r"attention kernel (\w+)", text):
        return "unfused" if found[1] in ("torch", "fused") else "fused"
    if "attention-backend=unfused" in text or "transformer-impl=local" in text or "bloom" in text:
        return "unfused"
    return "fused"
