"""Define software stacks: how a training framework uses the kernels and links.

A spec names its stack, and can set options of it (`planner.facts.resources.SoftwareSpec`). The effect of other
properties of a run is unknown, and `time_margin` is the margin of error without them.

Constants multiply those of the accelerator. Those of a named stack were chosen on published rows of that stack, and
rounded. Those of unknown software are fitted on all sources (`python -m benchmarks.published`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from contracts.telemetry.items import Axis
from planner.facts.model_shapes import compute_layer_flops, compute_score_flops, compute_single_pass_flops, is_moe_layer
from planner.facts.resources import StackName
from planner.facts.spec import JobSpec, Layout
from planner.hardware.cluster import DEFAULT_LAUNCH_S
from planner.hardware.kernel_time import (
    BLACKWELL_WIDTHS,
    CUDNN_BLACKWELL,
    CUDNN_HOPPER,
    FLASH_1_WIDTHS,
    FLASH_2_WIDTHS,
    SDPA_HOPPER,
    AttentionRates,
)
from planner.hardware.kernels import Gemm, MemoryKernelKind, build_layer_kernels


class Stack(NamedTuple):
    """Constants of a software stack. Fractions have no unit, and times are in seconds."""

    title: str
    # 90% of published step times differ by at most this fraction.
    time_margin: float
    memory_margin: float = 1.0  # the margin of a rank's peak memory; 1 without published peaks
    # Accelerators whose steps confirm `time_margin`. Others have UNMEASURED_MARGIN. Empty means all.
    measured_on: tuple[str, ...] = ()

    # Matmuls: factors on the accelerator's efficiency.
    gemm: float = 1.0
    gemm_hopper: float = 1.0  # on GPUs with fp8, whose clock power limits
    gemm_blackwell: float = 1.0  # on GPUs with fp4, in addition
    gemm_fp8: float = 1.0
    fp4: bool = False  # fp8 matmuls run at the rate of fp4 if the accelerator has it
    fuses_projections: bool = False  # query, key, and value are one matmul, and gate and up are one
    copies_queries: bool = False  # grouped queries are copied out of the fused output, and gradients concatenated
    accumulation_share: float = 0.0  # of reading and writing a gradient: time that its matmul takes longer to add
    accumulates_separately: bool = False  # autograd accumulates gradients in a separate kernel
    mixed_accumulation_slowdown: float = 1.0  # of that kernel, for gradients of different types
    attention: float = 1.0
    attention_ampere: AttentionRates = AttentionRates()
    attention_hopper: AttentionRates = AttentionRates()
    attention_blackwell: AttentionRates = AttentionRates()

    # Memory-bound kernels: bytes relative to one kernel per operation, below 1 with fusion and above 1 in eager code.
    norms: float = 1.0
    scores: float = 1.0  # unfused attention
    casts: float = 1.0  # to fp8
    loss: float = 1.0
    elementwise: float = 1.0  # all others
    compiled: Mapping[str, Any] = {}  # constants that differ in compiled blocks

    # Host time.
    launch_s: float = DEFAULT_LAUNCH_S  # per kernel of `planner.hardware.kernels`, with autograd and Python
    chunk_launches: int = 0  # additional launches per forward and per backward of a chunk
    expert_s: float = 0.0  # per expert of a grouped matmul
    expert_cast_s: float = 0.0  # additional time per expert in fp8
    cast_s: float = 0.0  # additional time per other fp8 matmul
    casts_all_operands: bool = False  # weights are cast per matmul, and again in backward
    mixture_s: tuple[float, float] = (0.0, 0.0)  # additional (forward, backward) time per layer with experts
    syncs_experts: bool = False  # forward waits for the router's counts, so the device waits for the host

    # Experts.
    link_efficiency: float = 1.0  # factor on a link's efficiency during compute
    shards_dispatch: bool = False  # each tp rank sends a shard of the tokens, and all-gathers the received tokens
    dispatches_per_node: bool = False  # a token is sent once per node, and once per rank inside a node
    sorts_dispatch: bool = False  # received tokens are sorted by expert, and restored

    # Communication.
    overlap: dict[Axis, float] = {}  # overlapped fraction per axis; for dp, of the available compute time
    overlaps_dual_pipe: bool = False  # schedule dualpipev overlaps expert communication with another micro-batch
    overlaps_sends: bool = False  # sends of interleaved chunks overlap with the next chunk, except in fill and drain
    reduces_by_chunk: bool = False  # ZeRO-1 gathers a chunk during the previous fill, and reduces it in the drain
    all_reduces_fp32: bool = False  # every rank receives all gradient sums in fp32
    contention: float = 0.0  # fraction of overlapped gathers and reductions that compute loses
    step_s: float = 0.0  # host time per step, for optimizer, data, and logging
    tensor_s: float = 0.0  # host time per tensor before the update
    jitter: float = 0.0  # fraction of a step that is added per doubling of the nodes

    # Head and loss.
    gathers_logits: bool = False  # every tp rank gathers all logits and computes the whole loss
    fused_loss: bool = False  # one kernel reads logits and writes their gradient
    in_place_loss: bool = False  # the loss works in one fp32 copy of the logits
    compiles_loss: bool = False  # the loss is one kernel only in compiled jobs

    # Recompute and memory.
    saves_gate_activation: bool = True  # SwiGLU is two operations, and the gate activation is saved too
    recomputes_operations: bool = False  # selective recompute saves attention and every second matmul
    recomputes_at_once: bool = False  # the whole recompute precedes its backward
    skips_last_matmul: bool = False  # full recompute skips a dense layer's last matmul
    keeps_both_gradients: bool = False  # gradients of the compute type stay allocated next to fp32 sums
    extra_bytes: int = 0  # communicators, buckets, and allocator in addition to the accelerator's overhead

    def get_byte_factor(self, kind: MemoryKernelKind) -> float:
        """Return the factor on the bytes of a memory-bound kernel."""
        other = self.elementwise
        return {"norm": self.norms, "scores": self.scores, "casts": self.casts, "loss": self.loss, "other": other}[kind]


# Median excess of nvidia-smi's figures over tensors and allowance in 15 fp16 runs of BLOOM (1.9 to 8.5 GB). It contains
# a communicator per group and pair of stages, and buckets of 5e8 gradients. Scaling's engine has both too.
_PIPELINE_ENGINE = 6 * 10**9

# Megatron overlaps the all-to-all of one micro-batch with matmuls of another (--overlap-moe-expert-parallel-comm).
OVERLAPPED_EXPERTS: dict[Axis, float] = {"ep": 0.8}
# DualPipe overlaps the same all-to-all (2412.19437 section 3.2.1). No published row shows how much of it.

# Norms of `scaling` in its own kernel, and RMSNorm in a dozen fp32 kernels.
FUSED_NORMS, EAGER_NORMS = 1.8, 15.0

# 4 rows of eager FSDP2 (torchtitan, KempnerForge). Constants that they do not determine are those of fsdp1.
# Attention on Hopper is torch's own kernel on an H100, which is newer than these rows.
# The worst row differs by 17% after a correction of two pipelines. `time_margin` is the difference before it, as
# other stacks may lack such a correction. The margin of memory is from one peak, of torchtitan's eager FSDP2.
_EAGER = Stack(
    "FSDP2, eager",
    0.45,
    0.15,
    gemm_hopper=0.85,
    accumulates_separately=True,
    attention_ampere=FLASH_2_WIDTHS,
    attention_hopper=SDPA_HOPPER,
    attention_blackwell=BLACKWELL_WIDTHS,
    norms=1.7,
    loss=1.7,
    elementwise=1.7,
    contention=0.3,
    saves_gate_activation=False,
    skips_last_matmul=True,
)

# Host time of a tensor's gradient norm in ten kernels, measured on GPUs. The two kernels of today take 0.32 to 0.49 of
# that time on a CPU. No GPU has timed them.
TENSOR_S = 8e-5

STACKS: dict[StackName, Stack] = {
    # Fitted on published steps of 20 sources, each with the same weight (benchmarks/published/fit.py). The margins hold
    # for 90% of the rows of a source that the fit does not know. No constant is fitted to a V100.
    "unknown": Stack(
        "Unknown software",
        0.55,
        0.75,
        measured_on=("A100", "H100", "H200", "B200", "GB200"),
        gemm=0.94,
        gemm_hopper=1.02,
        gemm_blackwell=0.83,
        attention=0.86,
        attention_ampere=FLASH_2_WIDTHS,
        attention_hopper=SDPA_HOPPER._replace(peak_factor=1.39),
        attention_blackwell=CUDNN_BLACKWELL,
        norms=1.48,
        scores=2.05,
        loss=0.93,
        elementwise=1.48,
        compiled={"norms": 1.09, "elementwise": 1.09},
        launch_s=8e-5,
        in_place_loss=True,
        shards_dispatch=True,
        dispatches_per_node=True,
        link_efficiency=0.87,
        overlap={"tp": 0.4},
        overlaps_dual_pipe=True,
        overlaps_sends=True,
        contention=0.25,
        step_s=9e-3,
        jitter=0.002,
        saves_gate_activation=False,
        recomputes_operations=True,
    ),
    # Chosen on trainer steps on one H100 and two H200 (docs/reference/gpu.md). Others are those of eager FSDP2.
    "ours": _EAGER._replace(
        title="Meshboard's trainer",
        gemm_hopper=1.1,
        norms=2.0,
        loss=2.0,
        elementwise=2.0,
        mixed_accumulation_slowdown=2.0,
        launch_s=8e-5,
        mixture_s=(2.5e-3, 5e-3),
        tensor_s=0.4 * TENSOR_S,
        casts=3.4,
        cast_s=4.7e-4,
        casts_all_operands=True,
        # The same GPUs with compiled blocks. The casts are from one model, and their host time is a guess.
        compiled={"norms": 1.8, "elementwise": 1.8, "casts": 0.55, "cast_s": 2e-4},
    ),
    # 155 rows: NVIDIA's performance tables, MLPerf's logs, Megatron-LM's own tests. The host time per expert is the
    # difference between recipes without and with CUDA graphs, in fp8 and in 16 bits.
    "megatron": Stack(
        "Megatron with Transformer Engine",
        0.25,
        0.14,
        norms=1.6,
        loss=1.6,
        elementwise=1.6,
        casts=0.6,
        launch_s=8e-5,
        chunk_launches=3,
        expert_s=1e-5,
        expert_cast_s=4.5e-5,
        syncs_experts=True,
        fuses_projections=True,
        copies_queries=True,  # attention.py, `get_query_key_value_tensors`
        accumulation_share=0.5,
        attention_hopper=CUDNN_HOPPER,
        attention_blackwell=CUDNN_BLACKWELL,
        shards_dispatch=True,
        dispatches_per_node=True,
        overlap={"tp": 0.55},
        overlaps_sends=True,  # `overlap_p2p_comm`, without `overlap_p2p_comm_warmup_flush` (model_parallel_config.py)
        reduces_by_chunk=True,  # `param_sync_func` and `grad_sync_func` of each chunk (schedules.py)
        contention=0.1,
        step_s=5e-3,
        jitter=0.002,
        measured_on=("H100", "H200", "B200", "B300", "GB200", "GB300"),
        recomputes_at_once=True,
    ),
    # The rows of the accelerators' own constants: Megatron-LM's table 1, Korthikanti's table 5.
    "megatron_2021": Stack(
        "Megatron-LM before Transformer Engine", 0.25, measured_on=("A100",), recomputes_at_once=True
    ),
    # Constants are from 21 rows of torchtitan, KempnerForge, and MaxText. `time_margin` is that of unknown software,
    # because rows of other sources (torchao) differ by more than those.
    "fsdp2": Stack(
        "FSDP2, compiled",
        0.55,
        0.96,
        measured_on=("H100", "H200"),
        accumulates_separately=True,
        attention_ampere=FLASH_2_WIDTHS,
        attention_hopper=FLASH_2_WIDTHS,
        attention_blackwell=BLACKWELL_WIDTHS,
        norms=1.2,
        loss=1.2,
        elementwise=0.6,
        casts=1.5,
        launch_s=1e-4,
        link_efficiency=0.5,
        contention=0.1,
        step_s=5e-3,
        compiles_loss=True,
        recomputes_operations=True,  # torchtitan's parallelize_llama.py, `_save_list`
    ),
    "fsdp2_eager": _EAGER,
    # 52 rows of MosaicML's llm-foundry, with FlashAttention 1.
    "fsdp1": Stack(
        "FSDP1, eager",
        0.12,
        measured_on=("A100", "H100"),
        gemm_hopper=0.85,
        accumulates_separately=True,
        attention=0.58,
        attention_ampere=FLASH_1_WIDTHS,
        attention_hopper=FLASH_1_WIDTHS,
        attention_blackwell=BLACKWELL_WIDTHS,
        norms=1.7,
        loss=1.7,
        elementwise=1.7,
        launch_s=6e-5,
        link_efficiency=0.88,
        contention=0.3,
        step_s=5e-3,
        fused_loss=True,  # flash-attn's kernel
    ),
    # 25 rows of BLOOM and of Aleph Alpha, which has a separate stack now. The pipeline engine reduces gradients after
    # the last backward.
    "deepspeed": Stack(
        "Megatron-DeepSpeed",
        0.18,
        0.07,
        measured_on=("A100",),
        accumulates_separately=True,
        attention=1.12,
        attention_ampere=FLASH_2_WIDTHS,
        attention_hopper=FLASH_2_WIDTHS,
        attention_blackwell=BLACKWELL_WIDTHS,
        norms=2.2,
        scores=2.0,
        loss=2.2,
        elementwise=2.2,
        launch_s=6e-5,
        link_efficiency=0.4,
        overlap={"dp": 0.0},
        step_s=5e-3,
        recomputes_at_once=True,  # runtime/activation_checkpointing/checkpointing.py
        keeps_both_gradients=True,  # runtime/bf16_optimizer.py: zeroed, not freed
        extra_bytes=_PIPELINE_ENGINE,
    ),
    # 103 rows of Aleph Alpha's sweeps. In the code (github.com/Aleph-Alpha/scaling), the column-parallel head gathers
    # its output, and the engine computes the loss on all of it and keeps it. No compute overlaps the end of the step.
    # Whole gradients are all-reduced there in fp32 before ZeRO shards them (core/optimizer/allreduce.py). `loss` is
    # counted: torch's loss reads fp32 logits three times for softmax and once for the accuracy
    # (losses/cross_entropy.py), and writes the first gradient. That is 52 to 56 bytes per element, compared with 32.
    # Norms are those of most runs: 71 of 103 rows do not use the fused kernel.
    "scaling": Stack(
        "Scaling (Aleph Alpha), norms in eager kernels",
        0.26,
        measured_on=("A100",),
        accumulates_separately=True,
        attention=1.12,
        attention_ampere=FLASH_2_WIDTHS,
        attention_hopper=FLASH_2_WIDTHS,
        attention_blackwell=BLACKWELL_WIDTHS,
        norms=EAGER_NORMS,
        scores=2.0,
        loss=1.7,
        elementwise=2.5,
        launch_s=6e-5,
        link_efficiency=0.75,
        overlap={"dp": 0.0},
        all_reduces_fp32=True,
        step_s=0.3,
        gathers_logits=True,
        recomputes_at_once=True,
        extra_bytes=_PIPELINE_ENGINE,
    ),
}

# Meshboard's trainer on a CPU, which computes what it launches. No measured step determines these constants.
OURS_ON_CPU = _EAGER._replace(title=STACKS["ours"].title, cast_s=15 * DEFAULT_LAUNCH_S, casts_all_operands=True)


def compute_hardware_flops(spec: JobSpec) -> int:
    """Return the FLOPs that a step executes, including recompute (2205.05198 equations 7 and 8).

    Empty rows of expert buffers count too. HFU is these FLOPs over the peak.
    """
    model, train, stack = spec.model, spec.train, STACKS[spec.resources.stack]
    once = compute_single_pass_flops(spec)
    if spec.layout.recompute == "full":
        again = compute_layer_flops(model, train.seq_len, empty_rows=True)
        if stack.skips_last_matmul:
            dense = sum(not is_moe_layer(model, i) for i in range(model.num_layers))
            again -= 2 * train.seq_len * dense * model.ffn_hidden_size * model.hidden_size
        return once + train.global_batch * again
    if spec.layout.recompute == "selective" and stack.recomputes_operations:
        return once + _operations(spec, stack)
    if spec.layout.recompute == "selective" and train.attention == "unfused":
        return once + train.global_batch * train.seq_len * compute_score_flops(model, train.seq_len)
    return once


def _operations(spec: JobSpec, stack: Stack) -> int:
    """Return the FLOPs of recomputed matmuls if the output of every second one is saved."""
    train = spec.train.model_copy(update={"micro_batches": 1})
    whole = spec.model_copy(update={"layout": Layout(), "train": train})
    moe_layers = sum(is_moe_layer(spec.model, i) for i in range(spec.model.num_layers))
    total = 0
    for moe, number in ((False, spec.model.num_layers - moe_layers), (True, moe_layers)):
        if number:
            work = build_layer_kernels(whole, moe=moe, fused_projections=stack.fuses_projections)
            total += number * sum(kernel.flops for kernel in work.recomputed_operations if isinstance(kernel, Gemm))
    return total
