"""Facts of Megatron-LM's tests that the columns of a row omit, by model and note.

Source: tests/functional_tests/test_cases/*/*/model_config.yaml of NVIDIA/Megatron-LM (commit d98e8a64).
"""

from __future__ import annotations

import re

from benchmarks.published.rows import PublishedRow
from planner.cost.memory import count_held_parameters
from planner.facts.precision import FP32_BYTES
from planner.facts.resources import CudaGraphs
from planner.facts.spec import JobSpec, ModelSpec
from planner.facts.stages import get_stage_layers
from planner.hardware.cluster import DEFAULT_LAUNCH_S
from planner.hardware.kernels import RecomputeModule

# Its recompute-modules hold norms and products, not the attention core, whose unfused scores are what it keeps.
KEEPS_SCORES = "tp2_pp2_ep4_etp1_selective_recompute_experimental"
# Tests whose configuration disables dropout, like all tests with cp. The default of the arguments enables it.
WITHOUT_DROPOUT = r"ep4_etp1|deepseek(v3)?_proxy|scoped_cudagraph|mixtral_8x|15b_8t"
# Tests that set the pipeline's layout (`Et*3|(tt|)*6tmL`) with 8 chunks.
IN_8_CHUNKS = r"selective_recompute_experimental|fine_grained_offloading|scoped_cudagraph|deepseekv3_proxy"
# Tests without --moe-grouped-gemm. Sharded tests have it.
EXPERTS_APART = r"(?<!groupedgemm)experts2parallel(?!.*groupedgemm)(?!_top2router|_ddp_average)|te_2experts"
# --mtp-num-layers 1: the last rank has an additional layer, embedding table, projection, and logits. (pattern; number
# of layers and of dense layers that give the last rank of an even division its actual layers)
_PREDICTS_TWO = (
    (r"scoped_cudagraph", 14, 4),  # Et|(tt|)*6mL
    (r"(?<!no_a2a_ovlp_)fine_grained_offloading", 14, 1),  # Et*3|(tt|)*6mL
    (KEEPS_SCORES, 16, 2),  # Et*3|(tt|)*6tmL
    (r"ep4_etp1_(mtp|memory_speed)", 18, 1),  # even chunks, with the additional layer in the last
    (r"deepseekv3_proxy", 16, 3),  # Et*2|(tt|)*5t|tmL on 4 stages
)
# Tests with --normalization RMSNorm, and tests with rotary positions in place of a position table.
WITHOUT_NORM_BIAS = r"ep4_etp1|deepseek(v3)?_proxy|current_scaling|mixtral_8x"
ROTARY = r"position-embedding-type=rope|rope_embeddings|ep4_etp1|deepseek(v3)?_proxy|scoped_cudagraph|mixtral_8x|15b_8t"
# --disable-bias-linear.
WITHOUT_BIAS = r"disable-bias-linear"
# --no-gradient-accumulation-fusion: a kernel computes a weight's gradient, and another adds it.
ADDS_APART = r"no-gradient-accumulation-fusion"
# --moe-token-dispatcher-type alltoall.
SENDS_TO_ALL = r"ep4_etp1|te_a2a_ovlp|ep2_etp2_pp2|deepseek_proxy|mixtral_8x"
# --overlap-moe-expert-parallel-comm.
OVERLAPS_EXPERTS = rf"{KEEPS_SCORES}|(?<!no_a2a_ovlp_)fine_grained_offloading|te_a2a_ovlp"
# --decoder-first-pipeline-num-layers 2 and the same for the last stage: stages of 2, 4, 4 and 2 of 12 layers. An even
# plan has an equal slowest stage of 4 layers with 13 in all, or 2 on the last with 8.
UNEVEN = r"uneven_pipeline"
UNEVEN_LAYERS, UNEVEN_LAST = 13, 8
# --recompute-modules: layernorm mla_up_proj mlp moe_act.
MAKES_AGAIN = r"selective_recompute_experimental|fine_grained_offloading"
MADE_AGAIN: tuple[RecomputeModule, ...] = ("norms", "latents", "mlp", "activation")
# --recompute-modules: moe_act alone.
MAKES_ACTIVATIONS_AGAIN = r"scoped_cudagraph"
# --fine-grained-activation-offloading of every module.
OFFLOADS = r"fine_grained_offloading"
# --cross-entropy-loss-fusion by torch's compiler, which does not overwrite a logit with its exponential.
_ON_GB200 = r"15b_8t_release(_sm)?_gb200"
FUSED_LOSS = (
    rf"cross_entropy_loss_fusion|ep4_etp1_(mtp|memory_speed|resume)|deepseekv3_proxy|{KEEPS_SCORES}|{_ON_GB200}"
)
# --wgrad-deferral-limit 2: two gradients of logits wait for the end of the pipeline.
DEFERS_GRADIENTS = r"defer_embedding_wgrad"
DEFERRED = 2
# --microbatch-group-size-per-virtual-pipeline-stage 5: each turn has five micro-batches. The default is the number of
# stages.
WIDER_TURNS = r"vp1.*_tunable_overlap"
TURN = 5
# --transformer-impl local: no kernels of Transformer Engine. --optimizer muon: one moment for matrices.
LOCAL = r"transformer-impl=local"
MUON = r"muon"
# --check-weight-hash-across-dp-replicas-interval 1: after each step, the host computes SHA-1 of every fp32 weight
# (utils.py, `check_param_hashes_across_dp_replicas`). The rate is `openssl speed sha1` on one core of the test
# machine.
HASHES_WEIGHTS = r"torch_dist_muon"
SHA1_BYTES_PER_S = 1.6e9
# Kernels that Muon launches per matrix: its norm, 5 iterations of three matmuls, casts, momentum and update
# (emerging_optimizers, `newton_schulz`). Queries, keys and values are separate matrices.
MUON_KERNELS = 27
# --test-mode with --qk-layernorm: each layer's forward gathers four weights of every data and tensor rank
# (attention.py, `run_realtime_tests`). It compares them with two kernels each, and copies each gathered list.
COMPARES_RANKS = r"qk_layernorm_test_mode"
COMPARED, COMPARE_KERNELS, GATHER_KERNELS = 4, 2, 2
# --moe-router-dtype fp32, and --tp-comm-overlap.
FP32_ROUTER = r"te_ep8|ep4_etp1|ep2_etp2_pp2|deepseek(v3)?_proxy"
OVERLAPS_TENSORS = rf"tp_overlap|{_ON_GB200}"
# --cuda-graph-modules attn mlp moe_router moe_preprocess, and attn alone.
GRAPHED_MODULES = r"scoped_cudagraph"
GRAPHED_CORE = r"attn_cudagraph"
# --log-params-norm and --log-num-zeros-in-grad, in all tests: after each step, the host computes the norm of every
# tensor of its rank (common_utils.py, `calc_params_l2_norm`). It also counts zeros in gradients of the tensors that
# it updates (clip_grads.py, `count_zeros_fp32`). Kernels are launched as in eager torch.
LOGGED_S = DEFAULT_LAUNCH_S
# --no-rope-fusion, or latent attention without --position-embedding-type rope (arguments.py): rotations of queries
# and keys run as separate operations. The numbers for forward and backward are torch's dispatches in
# `_apply_rotary_pos_emb_bshd` (rope_utils.py). Latent attention also sorts its pairs. Two operations take the time of
# one kernel, like GPT layers in eager torch.
ROTATES_APART = (
    r"no_fusion|tp2_pp2_mla|ep4_etp1|deepseek_proxy|mixtral_8x|modelopt_distill|15b_8t_release(?!(_sm)?_gb200)"
)
ROTATIONS, LATENT_ROTATIONS = (24, 14), (26, 20)
OPERATION_S = DEFAULT_LAUNCH_S / 2
# --account-for-embedding-in-pipeline-split and the same for the loss: each counts as a layer.
COUNTS_ENDS = r"account_for_embedding"

# Since 30 May 2026, Megatron-FSDP keeps tensors outside layers gathered between steps (378d81fb,
# `preserve_non_fsdp_units`). The other tests with it are older.
KEEPS_ENDS = r"deepseek_proxy"
# Resumed runs whose record is still that of commit ad2ab2ca of January 2026, in which loaded state stays in memory.
# torch flattened the state by functions that refer to each other and to it (_traverse.py, fixed by pull request
# 170431). Megatron kept the flattened state until pull request 3263. Transformer Engine's Adam copies the moments
# that it receives (fused_adam.py, `set_scaled_state`). No configuration determines when Python collects such a cycle.
# In that commit, it had not in any of the six tests of this size with tp 2 and pp 2. Four of them were recorded again
# since, without the loaded state.
_KEEPS_LOADED = (
    "te_tp2_pp2_resume_torch_dist_cp2_nondeterministic",
    "te_tp2_pp2_resume_torch_dist_cross_entropy_loss_fusion",
)


def get_test_graphs(text: str) -> CudaGraphs:
    """Return the modules of a test's layer that are one CUDA graph."""
    if re.search(GRAPHED_MODULES, text):
        return "attention_and_router"
    return "attention" if re.search(GRAPHED_CORE, text) else "none"


def compute_rotary_s(text: str, model: ModelSpec, launch_s: float) -> tuple[float, float]:
    """Return host seconds of rotary embedding in forward and backward of a layer, without the planned kernel."""
    planned = launch_s if model.arch == "llama" else 0.0
    if re.search(ROTATES_APART, text):
        forward, backward = LATENT_ROTATIONS if model.mla else ROTATIONS
        return forward * OPERATION_S - planned, backward * OPERATION_S - planned
    more = launch_s - planned if model.mla or re.search(ROTARY, text) else -planned
    return more, more


def compute_after_step_s(text: str, spec: JobSpec) -> float:
    """Return host seconds per step of optimizer, checks, and log, without Adam's kernel."""
    layout, last = spec.layout, spec.layout.pp - 1
    updated = 1 / (layout.dp * layout.cp) if layout.zero else 1.0
    seconds = (1 + updated) * _count_tensors(text, spec, last) * LOGGED_S
    if re.search(COMPARES_RANKS, text):
        copies = layout.dp + layout.tp
        kernels = 1 + 2 * GATHER_KERNELS + copies * (1 + COMPARED * COMPARE_KERNELS)
        layers = spec.train.micro_batches * get_stage_layers(spec, last).num_layers
        seconds += layers * kernels * DEFAULT_LAUNCH_S
    if re.search(HASHES_WEIGHTS, text):
        seconds += FP32_BYTES * count_held_parameters(spec, last) / SHA1_BYTES_PER_S
    if re.search(MUON, text):
        own, moe = get_stage_layers(spec, last), spec.model.moe
        experts = own.num_moe_layers * (1 + 2 * moe.num_experts // layout.ep) if moe else 0
        matrices = own.num_layers * 4 + experts + 2 * (own.num_layers - own.num_moe_layers)
        seconds += matrices * MUON_KERNELS * DEFAULT_LAUNCH_S
    return seconds


def _count_tensors(text: str, spec: JobSpec, stage: int) -> int:
    """Return the tensors of a rank's layers: two per norm, and weight and bias per matmul."""
    own, moe, each = get_stage_layers(spec, stage), spec.model.moe, 1 if re.search(WITHOUT_BIAS, text) else 2
    attention, dense = 2 + each * (5 if spec.model.mla else 2), 2 + each * 2
    mixed = 3 + each * 2 * (moe.num_experts // spec.layout.ep + moe.shared_experts) if moe else 0  # a router's weight
    return own.num_layers * attention + (own.num_layers - own.num_moe_layers) * dense + own.num_moe_layers * mixed


def is_megatron_test(row: PublishedRow) -> bool:
    """Return True if the row is of Megatron-LM's tests."""
    return row.source == "NVIDIA/Megatron-LM"


def keeps_loaded_moments(row: PublishedRow) -> bool:
    """Return True if a resumed run keeps its loaded moments."""
    folder, _, file = row.text("source_repo_path").rpartition("/")
    return file == "golden_values_dev_dgx_h100_2nd.json" and folder.endswith(_KEEPS_LOADED)


def get_mtp_layers(row: PublishedRow, text: str) -> tuple[int, int] | None:
    """Return layers and dense layers to plan for a model with MTP, or None for other models."""
    if not is_megatron_test(row):
        return None
    return next(((layers, dense) for pattern, layers, dense in _PREDICTS_TWO if re.search(pattern, text)), None)


# Host time of a recording, relative to the machines of other recordings. Each test's time is divided by its time in
# the next or last recording. The values are medians of the fit half (8 and 12 tests, 1.40 to 1.60 and 1.09 to 1.40).
IN_MAY, IN_OCTOBER = 1.46, 1.17
# Commit 5fe3f066 of 7 May 2026 recorded tests with a new image. Later commits recorded some of them again, with the
# earlier times (4933b24b, a53107c0, 6e091e1b). These tests still have the values of the first commit.
RECORDED_IN_MAY = frozenset(
    (
        "gpt3_mcore_te_tp1_pp1_dist_optimizer_fim_dataset",
        "gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files",
        "gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute",
        "gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings",
        "gpt3_mcore_te_tp1_pp2_resume_torch_dist_rope_embeddings_interleaved_no_fusion",
        "gpt3_mcore_te_tp1_pp4_resume_torch_dist_disable_bias_linear",
        "gpt3_mcore_te_tp1_pp4_resume_torch_dist_persistent_disable_bias_linear",
        "gpt3_mcore_te_tp1_pp4_resume_torch_dist_untie_embeddings_and_outputs",
        "gpt3_mcore_te_tp1_pp4_vp1_dist_optimizer_overlap_grad_reduce_param_gather_overlap_optimizer",
        "gpt3_mcore_te_tp1_pp4_vp1_resume_torch_decoupled_lr",
        "gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_calculate_per_token_loss",
        "gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce",
        "gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline",
        "gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split",
        "gpt3_mcore_te_tp2_pp1_resume_torch_dist_multi_dist_optimizer_instances",
        "gpt3_mcore_te_tp2_pp2_mla",
        "gpt3_mcore_te_tp2_pp2_resume_torch_dist",
        "gpt3_mcore_te_tp2_pp2_resume_torch_dist_ddp_average_in_collective",
        "gpt3_mcore_te_tp4_pp1_dist_optimizer_overlap_grad_reduce_param_gather",
        "gpt3_mcore_te_tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather",
        "gpt3_mcore_te_tp4_pp1_resume_torch_dist_qk_layernorm_test_mode",
        "gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer",
        "gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances",
        "gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon",
        "gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer",
        "gpt3_moe_mcore_te_ep8_resume_torch_dist_muon",
    )
)
# As the first commit of all, adc69dba of October 2025, left them: the machine that files were named after until then.
RECORDED_IN_OCTOBER = frozenset(
    (
        "gpt3_mcore_te_tp1_pp1_frozen_resume_torch_dist_dist_optimizer",
        "gpt3_mcore_te_tp1_pp4_frozen_resume_torch_dist_swiglu",
        "gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist",
        "gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather",
        "gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_untied",
        "gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_tunable_overlap",
        "gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_cp2_nondeterministic",
        "gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_te_8experts2parallel_dist_optimizer",
        "gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_te_8experts2parallel_groupedGEMM",
        "gpt3_mcore_te_tp2_pp1_te_8experts_etp1_ep4",
        "gpt3_mcore_te_tp2_pp2_ep4_etp1_mtp_resume_torch_dist_fp8",
        "gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental",
        "gpt3_mcore_te_tp2_pp2_resume_torch_dist_no_create_attention_mask_in_dataloader",
        "gpt3_mcore_te_tp4_pp2_frozen_resume_torch_dist_reshard_8x1xNone",
    )
)


def get_host_factor(row: PublishedRow) -> float:
    """Return the factor of the host time by the date of a test.

    A resumed run (`_2nd.json`) has its own file, and none was recorded on these dates.
    """
    folder, _, file = row.text("source_repo_path").rpartition("/")
    if file != "golden_values_dev_dgx_h100.json":
        return 1.0
    name = folder.rpartition("/")[2]
    if name in RECORDED_IN_MAY:
        return IN_MAY
    return IN_OCTOBER if name in RECORDED_IN_OCTOBER else 1.0
