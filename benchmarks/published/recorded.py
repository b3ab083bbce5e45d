"""When files of Megatron-LM's own tests were recorded, by which their host's time differs.

The history of tests/functional_tests/test_cases/*/*/golden_values_dev_dgx_h100.json in NVIDIA/Megatron-LM up to commit
d98e8a64, of every test that trains, whether any row of it is published or not: a file is of the oldest commit since
which its step times have not changed.
"""

from __future__ import annotations

from benchmarks.published.rows import PublishedRow

# Of the host's time with the other recordings' machines: what a test took in the recording over what the same test took
# in the next or the last one, median of those of the fit half (8 and 12 tests; 1.40 to 1.60 and 1.09 to 1.40).
IN_MAY, IN_OCTOBER = 1.46, 1.17
# Commit 5fe3f066 of 7 May 2026 recorded tests with a new image; the next commits that recorded some of them again
# (4933b24b, a53107c0, 6e091e1b) have the times from before it. These stand as it left them.
OF_MAY = frozenset(
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
OF_OCTOBER = frozenset(
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


def host_of(row: PublishedRow) -> float:
    """Factor on the host's time by when a test was recorded; its run after a stop (`_2nd.json`) is a file of its own,
    and none of those was recorded then."""
    folder, _, file = row.text("source_repo_path").rpartition("/")
    if file != "golden_values_dev_dgx_h100.json":
        return 1.0
    name = folder.rpartition("/")[2]
    if name in OF_MAY:
        return IN_MAY
    return IN_OCTOBER if name in OF_OCTOBER else 1.0
