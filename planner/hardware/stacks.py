"""Software stacks to plan for: what a training framework makes of the same kernels and links.

A spec names its stack, and may say of it what `planner.facts.spec_rules` has: what a run's own release, recipe and
kernels change besides is not known then, and `within` is how far off step times are without it.

Constants stand on top of those of the accelerator. Each was chosen on the fit half of the published rows of its stack
(2026-11-25; `python -m benchmarks.published` prints both halves) and rounded. Which effects there are was settled with
all open rows in sight for stacks other than Megatron, so that the report half is not blind to that.

Floating point operations that a step carries out: with what its stack computes twice (2205.05198 equations 7 and 8),
and with all rows of experts' buffers. HFU is these over the peak.
"""

from __future__ import annotations

from typing import NamedTuple

from contracts.telemetry.vocabulary import Axis
from planner.facts.model_shapes import compute_layer_flops, compute_score_flops, compute_single_pass_flops, is_moe_layer
from planner.facts.resources import StackName
from planner.facts.spec import JobSpec, Layout
from planner.hardware.cluster import LAUNCH_S
from planner.hardware.kernel_time import (
    BLACKWELL_WIDTHS,
    CUDNN_BLACKWELL,
    CUDNN_HOPPER,
    FLASH_1_WIDTHS,
    FLASH_2_WIDTHS,
    SDPA_HOPPER,
    Attention,
)
from planner.hardware.kernels import Gemm, Module, PassKind, layer_work


class Stack(NamedTuple):
    """Shares and factors have no unit, times are seconds.

    `within`: 9 of 10 step times lie no further from what a spec gets, told with a certainty of 9 in 10 by the fit half
    (`benchmarks.published.scores.sure`): of fewer than 22 rows the worst.
    `memory_within`: the same of a rank's peak, beside UNTOLD_BYTES; 1 where nobody published one.
    `measured_on`: accelerators whose steps `within` was seen to hold on; any other has the widest. Empty is all.
    `fp4`: products in fp8 run at the rate of fp4, where the accelerator has it.
    `gemm`, `attention`: of the accelerator's own efficiency; `gemm_hopper` also, where it has fp8: power holds the
    clock of those down; `gemm_fp8` of products in fp8; `attention_ampere`, `_hopper` and `_blackwell` there besides.
    `joins_products`: queries, keys and values
    are one product, so are gate and up. `copies_queries`: where these are grouped they are copied out of what it gives,
    and their gradients put together. `adds_gradients`: share of the time to read and write a gradient that its
    product takes longer where it adds to it.
    `adds_apart`: autograd adds it to those so far, by a kernel of its own, which takes `adds_unlike` times as long
    where they are kept in another type.
    `norms`, `scores` (unfused attention), `casts` (to fp8), `loss` (over logits) and `passes` (all else that is no
    product): bytes moved over the fewest that one kernel for each needs; below 1 where a compiler fuses, above where
    eager code cuts.
    `launch_s`: the host's time for a kernel of `planner.hardware.kernels`, autograd and Python included;
    `chunk_launches`: as many more in each forward and backward of a chunk, to receive, to send, to scale its loss.
    `expert_s`: the host's time for each expert of a product of several, which are launched one by one; `expert_cast_s`:
    more where its operands are cast to fp8, one by one too. `cast_s`: more for any other product in fp8.
    `casts_each`: weights too are cast for each product, and what forward cast is cast again in backward.
    `layer_s`: more in a layer's forward and in its backward, for what is no kernel of it here, or less for one that it
    has not; repeated with its latents. `mixture_s`: more in those of a layer with experts. `syncs_experts`: it waits
    for the router's counts before it launches experts, so that the device waits for all of its time in forward.
    `experts_apart`: each expert runs by itself.
    `bias_sums`: how many times as long an expert's product takes that sums its bias' gradient.
    `norms_heads`: queries and keys are normed.
    `links`: of a link's efficiency, that collectives reach beside compute.
    `divides_dispatch`: each tensor rank sends its part of the tokens, and gathers what came to the others, but where
    tensor ranks divide no expert (`experts_whole`). `shares_dispatch`: a token goes once to each node, inside one to
    each rank, that has an expert for it. `sorts_dispatch`: tokens come by sender, and are put in the order of a rank's
    experts, and back.
    `hidden`: share of each axis' waiting that runs beside products; of dp, of the room that compute leaves to it.
    `hides_sends`: chunks of an interleaved pipe send beside the next one's products, but while it fills and drains.
    `sums_chunks`: under ZeRO-1 each of its chunks is gathered while the pipe fills with the chunk before, and summed
    while it drains of that.
    `narrow_gathers`: tensor ranks gather what products in fp8 take after it was cast.
    `narrow_parameters`: ZeRO gathers in fp8 what products in fp8 take.
    `inputs_apart`: queries, keys, values, gate and up each gather their input, and sum its gradient, over tensor ranks.
    `sums_late`: gradients that ZeRO shards wait whole for the last micro-batch, and are summed once, in fp32.
    `sums_whole`: every rank gets the sums of all gradients, in fp32, of whatever it then updates.
    `contention`: share of hidden gathers' and sums' time that compute loses to them.
    `step_s`: once a step, for the optimiser's launches, data and logging. `tensor_s`: more for each tensor between the
    last backward and the update, where the device waits for its host.
    `jitter`: share of a step that waiting for the slowest adds with every doubling of the nodes.
    `gathers_logits`: every tensor rank gathers the logits of the whole vocabulary and computes its loss on all of them.
    `fused_loss`: one kernel reads the logits and writes their gradient; `compiles_loss`: where a job compiles at all.
    `repeats`: what selective recompute repeats of a layer, where not the usual; `repeats_layers`: share of all layers
    that full recompute repeats. `narrow_head`: the head's product runs in fp8 where a layer's do. `heads`: so often a
    micro-batch meets it, twice where a second token is predicted.
    `frozen`: weights are, beside adapters too small to count: no gradient of theirs is computed, summed or applied.
    `offloads`: share of layers whose activations go to the host and come back; nothing hides it.
    `keeps_opened`: SwiGLU is two operations, and the gate's activation is kept beside what both are made of.
    `repeats_operations`: selective recompute keeps every second product's output and attention's, and repeats the rest.
    `repeats_whole`: what is recomputed is, before any of its backward, and to its end. `repeats_needed`: full recompute
    makes a layer again no further than its backward needs, which is not a dense one's last product.
    `keeps_both_gradients`: where they are added up in fp32, those of the compute type stay allocated.
    `beside_bytes`: what communicators, buckets and the allocator take beside tensors and an accelerator's allowance.
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
    attention_ampere: Attention = Attention()
    attention_hopper: Attention = Attention()
    attention_blackwell: Attention = Attention()
    norms: float = 1.0
    scores: float = 1.0
    casts: float = 1.0
    loss: float = 1.0
    passes: float = 1.0
    launch_s: float = LAUNCH_S
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
    repeats: tuple[Module, ...] | None = None
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

    def bytes_of(self, kind: PassKind) -> float:
        """Factor on the bytes of a pass over memory."""
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
OURS_ON_CPU = _EAGER._replace(title=STACKS["ours"].title, cast_s=15 * LAUNCH_S, casts_each=True)


def hardware_flops(spec: JobSpec) -> int:
    """Of one step of the whole model."""
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
    """Of the products that are repeated where every second one's output is kept."""
    train = spec.train.model_copy(update={"micro_batches": 1})
    whole = spec.model_copy(update={"layout": Layout(), "train": train})  # undivided, all of a step at once
    moe_layers = sum(is_moe_layer(spec.model, i) for i in range(spec.model.num_layers))
    total = 0
    for moe, number in ((False, spec.model.num_layers - moe_layers), (True, moe_layers)):
        if number:
            work = layer_work(whole, moe=moe, joined=stack.joins_products, apart=stack.experts_apart)
            total += number * sum(kernel.flops for kernel in work.operations if isinstance(kernel, Gemm))
    return total
