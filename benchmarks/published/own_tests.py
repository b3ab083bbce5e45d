"""What the configurations of Megatron-LM's own tests switch on that a row's columns do not say.

tests/functional_tests/test_cases/*/*/model_config.yaml of NVIDIA/Megatron-LM (commit d98e8a64). Patterns are of a row's
model and note.
"""

from __future__ import annotations

import re

from benchmarks.published.rows import PublishedRow

# Its recompute-modules hold norms and products, not the attention core, whose unfused scores are what it keeps.
KEEPS_SCORES = "tp2_pp2_ep4_etp1_selective_recompute_experimental"
# Those whose configuration drops nothing out, as those with cp do, against its arguments' default.
WITHOUT_DROPOUT = r"etp1|deepseek_proxy|scoped_cudagraph"
# Those that give the pipe's layout (`Et*3|(tt|)*6tmL`): 8 chunks on 2 stages.
IN_8_CHUNKS = r"selective_recompute_experimental|fine_grained_offloading|scoped_cudagraph"
# Those that lack --moe-grouped-gemm; sharded ones have it.
EXPERTS_APART = r"(?<!groupedgemm)experts2parallel(?!.*groupedgemm)(?!_top2router)"
# --mtp-num-layers 1: beside a layer more, the last rank has the embedding's table, a projection and logits once more.
# (pattern; layers and dense ones that put on the last rank as many of each kind as it has there, that one included)
_PREDICTS_TWO = (
    (r"scoped_cudagraph", 14, 4),  # Et|(tt|)*6mL
    (r"fine_grained_offloading", 14, 1),  # Et*3|(tt|)*6mL
    (KEEPS_SCORES, 16, 2),  # Et*3|(tt|)*6tmL
    (r"ep4_etp1_mtp", 18, 1),  # even chunks, and it in the last
)
# --recompute-modules: layernorm mla_up_proj mlp moe_act.
MAKES_AGAIN = r"selective_recompute_experimental|fine_grained_offloading"
# --cross-entropy-loss-fusion by torch's compiler, which writes no exponential in place of its logit.
FUSED_LOSS = rf"cross_entropy_loss_fusion|ep4_etp1_mtp|{KEEPS_SCORES}"
# --wgrad-deferral-limit 2: as many gradients of logits wait for the pipe's end.
DEFERS_GRADIENTS = r"defer_embedding_wgrad"
DEFERRED = 2
# --microbatch-group-size-per-virtual-pipeline-stage 5, of as many micro-batches, where the usual is the stages.
WIDER_TURNS = r"vp1_tunable_overlap"
TURN = 5
# --transformer-impl local: none of Transformer Engine's kernels. --optimizer muon: one moment of matrices.
LOCAL = r"transformer-impl=local"
MUON = r"muon"
# --moe-router-dtype fp32, and --tp-comm-overlap.
FP32_ROUTER = r"te_ep8|ep4_etp1|scoped_cudagraph|deepseek_proxy"
OVERLAPS_TENSORS = r"tp_overlap"


def tests_of_megatron(row: PublishedRow) -> bool:
    """Whether the row is of Megatron-LM's own tests."""
    return row.source == "NVIDIA/Megatron-LM"


def predicts_two(row: PublishedRow, text: str) -> tuple[int, int] | None:
    """(layers, dense ones) to plan for a model that predicts a second token, None for any other."""
    if not tests_of_megatron(row):
        return None
    return next(((layers, dense) for pattern, layers, dense in _PREDICTS_TWO if re.search(pattern, text)), None)
