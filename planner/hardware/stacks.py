"""Define software stacks: how a training framework uses the kernels and links.

A spec names its stack, and can set options of it (`planner.facts.resources.SoftwareSpec`). The effect of other
properties of a run is unknown, and `within` is the margin of error without them.

Constants multiply those of the accelerator. Each was chosen on the fit half of the published rows of its stack
(2026-11-25; `python -m benchmarks.published` prints both halves) and rounded. The kinds of effects were chosen with all
open rows known for stacks other than Megatron, so their report half is not blind to that choice.
"""

from __future__ import annotations

from typing import NamedTuple

from contracts.telemetry.vocabulary import Axis
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
from planner.hardware.kernels import Gemm, MemoryKernelKind, RecomputeModule, build_layer_kernels


class Stack(NamedTuple):
    """Constants of a software stack. Fractions have no unit, times are in seconds.

    Margins of error:
    - `within`: 90% of step times differ by at most this fraction, with 90% confidence from the fit half
      (`benchmarks.published.scores.sure`). With fewer than 22 rows it is the worst difference.
    - `memory_within`: the same for a rank's peak memory, in addition to a constant number of bytes; 1 without published
      peaks.
    - `measured_on`: accelerators whose steps confirm `within`; others have the widest margin. Empty means all.

    Matmuls:
    - `gemm`, `attention`: factors on the accelerator's efficiency. `gemm_hopper`: factor on GPUs with fp8, whose clock
      power limits. `gemm_fp8`: factor of fp8 matmuls. `attention_*`: rates per generation.
    - `fp4`: fp8 matmuls run at the rate of fp4 if the accelerator has it.
    - `joins_products`: query, key, and value are one matmul, and gate and up are one matmul.
    - `copies_queries`: grouped queries are copied out of the joined output, and their gradients are concatenated.
    - `adds_gradients`: fraction of the time to read and write a gradient that its matmul takes longer to accumulate.
    - `adds_apart`: autograd accumulates gradients in a separate kernel, `adds_unlike` times as slow for different
      types.

    Memory-bound kernels, as bytes relative to one kernel per operation (below 1 with fusion, above 1 in eager code):
    - `norms`, `scores` (unfused attention), `casts` (to fp8), `loss` (logits), and `passes` (all others).

    Host time:
    - `launch_s`: per kernel of `planner.hardware.kernels`, including autograd and Python.
    - `chunk_launches`: additional launches per forward and per backward of a chunk, for messages and loss scaling.
    - `expert_s`: per expert of a grouped matmul. `expert_cast_s`: additional time in fp8.
    - `cast_s`: additional time per other fp8 matmul. `casts_each`: weights are cast per matmul, and again in backward.
    - `layer_s`: additional (forward, backward) time per layer. `mixture_s`: the same for layers with experts.
    - `syncs_experts`: forward waits for the router's counts, so the device waits for the host.
    - `step_s`: per step, for optimizer, data, and logging. `tensor_s`: per tensor before the update.

    Experts:
    - `experts_apart`: each expert runs separate kernels. `bias_sums`: slowdown of matmuls that sum a bias gradient.
    - `divides_dispatch`: each tp rank sends a shard of the tokens, and all-gathers the received tokens.
      `experts_whole`: it does not if tp does not shard experts.
    - `shares_dispatch`: a token is sent once per node, and once per rank inside a node.
    - `sorts_dispatch`: received tokens are sorted by expert, and restored.

    Communication:
    - `links`: factor on a link's efficiency during compute.
    - `hidden`: overlapped fraction of communication per axis; for dp, of the available compute time.
    - `hides_sends`: sends of interleaved chunks overlap with the next chunk, except during fill and drain.
    - `sums_chunks`: ZeRO-1 gathers a chunk during the fill of the previous one, and reduces it during the drain.
    - `narrow_gathers`: tp gathers inputs in fp8. `narrow_parameters`: ZeRO gathers weights in fp8.
    - `inputs_apart`: query, key, value, gate, and up each gather their input, and reduce its gradient.
    - `sums_late`: sharded gradients are reduced once in fp32 after the last micro-batch.
    - `sums_whole`: every rank receives all gradient sums in fp32.
    - `contention`: fraction of overlapped gathers and reductions that compute loses.
    - `jitter`: fraction of a step that is added per doubling of the nodes.

    Head and loss:
    - `gathers_logits`: every tp rank gathers all logits and computes the whole loss.
    - `fused_loss`: one kernel reads logits and writes their gradient. `compiles_loss`: only in compiled jobs.
    - `narrow_head`: the head uses fp8 if layers do. `heads`: head evaluations per micro-batch, 2 with a second token.

    Recompute and memory:
    - `repeats`: modules that selective recompute repeats, if not the default.
    - `repeats_layers`: fraction of layers that full recompute repeats.
    - `repeats_operations`: selective recompute saves attention and every second matmul, and repeats other operations.
    - `repeats_whole`: the whole recompute precedes its backward. `repeats_needed`: full recompute skips a dense layer's
      last matmul.
    - `norms_heads`: queries and keys are normalized.
    - `frozen`: weights have no gradients or updates; adapters are too small to count.
    - `offloads`: fraction of layers whose activations move to the host and back, without overlap.
    - `keeps_opened`: SwiGLU is two operations, and the gate activation is saved too.
    - `keeps_both_gradients`: gradients of the compute type stay allocated next to fp32 sums.
    - `beside_bytes`: bytes of communicators, buckets, and the allocator in addition to the accelerator's overhead.
    """

    title: str
    within: float
    memory_within: float = 1.0
    measured_on: tuple[str, ...] = ()
    gemm: float = 1.0
    gemm_hopper: float = 1.0
    gemm_fp8: float = 1.0
    fp4: bool = False
    joins_products: bool = False
    copies_queries: bool = False
    adds_gradients: float = 0.0
    adds_apart: bool = False
    adds_unlike: float = 1.0
    attention: float = 1.0
    attention_ampere: AttentionRates = AttentionRates()
    attention_hopper: AttentionRates = AttentionRates()
    attention_blackwell: AttentionRates = AttentionRates()
    norms: float = 1.0
    scores: float = 1.0
    casts: float = 1.0
    loss: float = 1.0
    passes: float = 1.0
    launch_s: float = DEFAULT_LAUNCH_S
    chunk_launches: int = 0
    expert_s: float = 0.0
    expert_cast_s: float = 0.0
    cast_s: float = 0.0
    casts_each: bool = False
    layer_s: tuple[float, float] = (0.0, 0.0)
    mixture_s: tuple[float, float] = (0.0, 0.0)
    syncs_experts: bool = False
    experts_apart: bool = False
    bias_sums: float = 1.0
    norms_heads: bool = False
    links: float = 1.0
    divides_dispatch: bool = False
    shares_dispatch: bool = False
    sorts_dispatch: bool = False
    experts_whole: bool = False
    hidden: dict[Axis, float] = {}
    hides_sends: bool = False
    sums_chunks: bool = False
    narrow_gathers: bool = False
    narrow_parameters: bool = False
    inputs_apart: bool = False
    sums_late: bool = False
    sums_whole: bool = False
    contention: float = 0.0
    step_s: float = 0.0
    tensor_s: float = 0.0
    jitter: float = 0.0
    gathers_logits: bool = False
    fused_loss: bool = False
    compiles_loss: bool = False
    repeats: tuple[RecomputeModule, ...] | None = None
    repeats_layers: float = 1.0
    narrow_head: bool = False
    heads: int = 1
    frozen: bool = False
    offloads: float = 0.0
    keeps_opened: bool = True
    repeats_operations: bool = False
    repeats_whole: bool = False
    repeats_needed: bool = False
    keeps_both_gradients: bool = False
    beside_bytes: int = 0

    def bytes_of(self, kind: MemoryKernelKind) -> float:
        """Return the factor on the bytes of a memory-bound kernel."""
        return {
            "norm": self.norms,
            "scores": self.scores,
            "casts": self.casts,
            "loss": self.loss,
            "other": self.passes,
        }[kind]


# By how much nvidia-smi's figures of 15 runs of BLOOM's in fp16 exceed tensors and allowance (median; 1.9 to 8.5 GB): a
# communicator for each group and pair of stages, and buckets of 5e8 gradients. Scaling's engine has the same of both.
_PIPELINE_ENGINE = 6 * 10**9

# Norms of `scaling` by its own kernel, and RMSNorm as a dozen kernels in fp32.
FUSED_NORMS, EAGER_NORMS = 1.8, 15.0

# 4 rows of eager FSDP2 (torchtitan, KempnerForge); what they do not tell is fsdp1's.
# Attention on Hopper is what an H100 showed of torch's own, which these rows are too old to have run.
# They are 17% off at worst since two pipes are planned as their code runs; what nobody looked for elsewhere may be
# missing as it was there, so that `within` stands for what they were off before. Memory: the one published peak of
# the trainer's own kind, torchtitan's eager FSDP2; KempnerForge's code keeps what ours does not.
_EAGER = Stack(
    "FSDP2, eager",
    0.45,
    0.15,
    gemm_hopper=0.85,
    adds_apart=True,
    attention_ampere=FLASH_2_WIDTHS,
    attention_hopper=SDPA_HOPPER,
    attention_blackwell=BLACKWELL_WIDTHS,
    norms=1.7,
    loss=1.7,
    passes=1.7,
    contention=0.3,
    keeps_opened=False,
    repeats_needed=True,
)

# A tensor's gradient norm took the trainer's host so long on those GPUs, by ten kernels. It is two since, which no GPU
# has timed; a CPU's dispatch takes 0.32 to 0.49 of the time.
TENSOR_S = 8e-5

STACKS: dict[StackName, Stack] = {
    # Chosen on trainer steps on one H100 and two H200 (docs/reference/gpu.md). Others are those of eager FSDP2.
    "ours": _EAGER._replace(
        title="Meshboard's trainer",
        gemm_hopper=1.1,
        norms=2.0,
        loss=2.0,
        passes=2.0,
        adds_unlike=2.0,
        launch_s=8e-5,
        mixture_s=(2.5e-3, 5e-3),
        tensor_s=0.4 * TENSOR_S,
        casts=3.4,
        cast_s=4.7e-4,
        casts_each=True,
    ),
    # 155 rows: NVIDIA's performance tables, MLPerf's logs, Megatron-LM's own tests. The host's time is what recipes of
    # mixtures without CUDA graphs take beyond those with them, for an expert in fp8 and in 16 bits.
    "megatron": Stack(
        "Megatron with Transformer Engine",
        0.25,
        0.14,
        norms=1.6,
        loss=1.6,
        passes=1.6,
        casts=0.6,
        launch_s=8e-5,
        chunk_launches=3,
        expert_s=1e-5,
        expert_cast_s=4.5e-5,
        syncs_experts=True,
        joins_products=True,
        copies_queries=True,  # attention.py, `get_query_key_value_tensors`
        adds_gradients=0.5,
        attention_hopper=CUDNN_HOPPER,
        attention_blackwell=CUDNN_BLACKWELL,
        divides_dispatch=True,
        shares_dispatch=True,
        hidden={"tp": 0.55},
        hides_sends=True,  # `overlap_p2p_comm`, without `overlap_p2p_comm_warmup_flush` (model_parallel_config.py)
        sums_chunks=True,  # `param_sync_func` and `grad_sync_func` of each chunk (schedules.py)
        contention=0.1,
        step_s=5e-3,
        jitter=0.002,
        measured_on=("H100", "H200", "B200", "B300", "GB200", "GB300"),
        repeats_whole=True,
    ),
    # What the accelerators' own constants were chosen on: Megatron-LM's table 1, Korthikanti's table 5.
    "megatron_2021": Stack("Megatron-LM before Transformer Engine", 0.1, measured_on=("A100",), repeats_whole=True),
    # 21 rows: torchtitan, KempnerForge, MaxText. `within` is the worst of all 35: of the fit half's it was 0.24, which
    # held for 10 of the report half's 14.
    "fsdp2": Stack(
        "FSDP2, compiled",
        0.27,
        0.96,
        measured_on=("H100", "H200"),
        adds_apart=True,
        attention_ampere=FLASH_2_WIDTHS,
        attention_hopper=FLASH_2_WIDTHS,
        attention_blackwell=BLACKWELL_WIDTHS,
        norms=1.2,
        loss=1.2,
        passes=0.6,
        casts=1.5,
        launch_s=1e-4,
        links=0.5,
        contention=0.1,
        step_s=5e-3,
        compiles_loss=True,
        repeats_operations=True,  # torchtitan's parallelize_llama.py, `_save_list`
    ),
    "fsdp2_eager": _EAGER,
    # 52 rows of MosaicML's llm-foundry; attention is FlashAttention 1's.
    "fsdp1": Stack(
        "FSDP1, eager",
        0.12,
        measured_on=("A100", "H100"),
        gemm_hopper=0.85,
        adds_apart=True,
        attention=0.58,
        attention_ampere=FLASH_1_WIDTHS,
        attention_hopper=FLASH_1_WIDTHS,
        attention_blackwell=BLACKWELL_WIDTHS,
        norms=1.7,
        loss=1.7,
        passes=1.7,
        launch_s=6e-5,
        links=0.88,
        contention=0.3,
        step_s=5e-3,
        fused_loss=True,  # flash-attn's kernel
    ),
    # 25 rows of BLOOM's, and Aleph Alpha's before these had a stack of their own. Its pipeline engine reduces gradients
    # after the last backward.
    "deepspeed": Stack(
        "Megatron-DeepSpeed",
        0.18,
        0.07,
        measured_on=("A100",),
        adds_apart=True,
        attention=1.12,
        attention_ampere=FLASH_2_WIDTHS,
        attention_hopper=FLASH_2_WIDTHS,
        attention_blackwell=BLACKWELL_WIDTHS,
        norms=2.2,
        scores=2.0,
        loss=2.2,
        passes=2.2,
        launch_s=6e-5,
        links=0.4,
        hidden={"dp": 0.0},
        step_s=5e-3,
        repeats_whole=True,  # runtime/activation_checkpointing/checkpointing.py
        keeps_both_gradients=True,  # runtime/bf16_optimizer.py: zeroed, not freed
        beside_bytes=_PIPELINE_ENGINE,
    ),
    # 103 rows of Aleph Alpha's sweeps. Its code (github.com/Aleph-Alpha/scaling): the column-parallel head gathers its
    # output, the loss is computed on all of it and the engine keeps it, nothing overlaps the step's end, where whole
    # gradients are all-reduced in fp32 before ZeRO takes its part (core/optimizer/allreduce.py). `loss` is counted: its
    # loss is torch's own, which reads fp32 logits for softmax three times, for the accuracy once more
    # (losses/cross_entropy.py) and writes the gradient that it begins with: 52 to 56 bytes an element for 32. Norms are
    # those of most runs: 71 of the fit half's 103 were without its kernel for them.
    "scaling": Stack(
        "Scaling (Aleph Alpha), norms in eager kernels",
        0.26,
        measured_on=("A100",),
        adds_apart=True,
        attention=1.12,
        attention_ampere=FLASH_2_WIDTHS,
        attention_hopper=FLASH_2_WIDTHS,
        attention_blackwell=BLACKWELL_WIDTHS,
        norms=EAGER_NORMS,
        scores=2.0,
        loss=1.7,
        passes=2.5,
        launch_s=6e-5,
        links=0.75,
        hidden={"dp": 0.0},
        sums_whole=True,
        step_s=0.3,
        gathers_logits=True,
        repeats_whole=True,
        beside_bytes=_PIPELINE_ENGINE,
    ),
}

# The same on a CPU, of which no step told these: what it launches, it computes itself.
OURS_ON_CPU = _EAGER._replace(title=STACKS["ours"].title, cast_s=15 * DEFAULT_LAUNCH_S, casts_each=True)


def hardware_flops(spec: JobSpec) -> int:
    """Return the FLOPs that a step executes, including recompute.

    Source: 2205.05198 equations 7 and 8. Rows of expert buffers count even if they are empty. HFU is these over the
    peak.
    """
    model, train, stack = spec.model, spec.train, STACKS[spec.resources.stack]
    once = compute_single_pass_flops(spec)
    if spec.layout.recompute == "full":
        again = compute_layer_flops(model, train.seq_len, empty_rows=True)
        if stack.repeats_needed:  # not a dense layer's last product
            dense = sum(not is_moe_layer(model, i) for i in range(model.num_layers))
            again -= 2 * train.seq_len * dense * model.ffn_hidden_size * model.hidden_size
        return once + train.global_batch * again
    if spec.layout.recompute == "selective" and stack.repeats_operations:
        return once + _operations(spec, stack)
    if spec.layout.recompute == "selective" and train.attention == "unfused":
        return once + train.global_batch * train.seq_len * compute_score_flops(model, train.seq_len)
    return once


def _operations(spec: JobSpec, stack: Stack) -> int:
    """Return the FLOPs of recomputed matmuls if the output of every second one is saved."""
    train = spec.train.model_copy(update={"micro_batches": 1})
    whole = spec.model_copy(update={"layout": Layout(), "train": train})  # undivided, all of a step at once
    moe_layers = sum(is_moe_layer(spec.model, i) for i in range(spec.model.num_layers))
    total = 0
    for moe, number in ((False, spec.model.num_layers - moe_layers), (True, moe_layers)):
        if number:
            work = build_layer_kernels(
                whole, moe=moe, fused_projections=stack.joins_products, separate_experts=stack.experts_apart
            )
            total += number * sum(kernel.flops for kernel in work.recomputed_operations if isinstance(kernel, Gemm))
    return total
