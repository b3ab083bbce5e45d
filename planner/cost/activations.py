"""Bytes of activations that backward keeps of one layer and micro-batch, tensor by tensor.

For the layers of 2205.05198 (16-bit, dropout, every score kept) the sum is its equations 1 to 4; a test compares the
sum with what autograd really saves.
"""

from __future__ import annotations

from planner.facts.placements import vocab_rows
from planner.facts.precision import FP32_BYTES, mix_of
from planner.facts.shards import micro_batch_tokens
from planner.facts.spec import JobSpec


def layer_activation_bytes(spec: JobSpec, *, moe: bool = False, recompute: str | None = None) -> int:
    """What one layer keeps from a micro-batch's forward to its backward, on one rank.

    Full recompute keeps a layer's input. Selective drops what costs no product: the scores (2205.05198 section 5), and
    where attention is fused and has none, the norms' and the MLP activation's outputs. With sequence parallelism a
    norm's output can only be dropped when inputs are gathered again.

    `recompute` asks for another policy than the layout's: "none" is a layer's working set while it is recomputed.
    """
    layout = spec.layout
    policy = recompute or layout.recompute
    divided = layout.tp if layout.sequence_parallel else 1
    hidden = micro_batch_tokens(spec) * spec.model.hidden_size
    compute = mix_of(spec.train.precision).compute
    if policy == "full":
        return hidden * compute // divided
    norm_inputs = 2 * hidden * (2 * FP32_BYTES if _is_unfused_rms_norm(spec) else compute)
    masks = 2 * hidden * spec.train.dropout
    gathered = divided if layout.regather else 1
    light = policy == "selective" and spec.train.attention == "fused"
    product_inputs = 0 if light and gathered == divided else 2 * hidden * compute
    kept = norm_inputs // divided + product_inputs // gathered + masks // divided
    return kept + _attention(spec, compute, policy) + (_experts if moe else _mlp)(spec, compute, light=light)


def _is_unfused_rms_norm(spec: JobSpec) -> bool:
    """torch's RMSNorm on a CPU keeps its input and the normalised values, both in fp32 (checked with 2.13)."""
    return spec.model.arch == "llama" and spec.resources.device == "cpu"


def _attention(spec: JobSpec, compute: int, recompute: str) -> int:
    """Queries, keys, values and output; scores, their softmax and its dropout where they are kept."""
    model, tp, train = spec.model, spec.layout.tp, spec.train
    tokens, heads = micro_batch_tokens(spec), model.num_heads // tp
    if model.mla:
        mla = model.mla
        latent = mla.q_rank + mla.kv_rank + mla.rope_head_dim
        query = heads * (mla.nope_head_dim + mla.rope_head_dim)
        width = 2 * latent + 2 * query + 2 * heads * mla.value_head_dim
    else:
        # On a CPU each key/value head is repeated for the queries it serves, but where that is done again.
        repeated = spec.resources.device == "cpu" and (train.attention, recompute) != ("unfused", "selective")
        kv_heads = heads if repeated else max(1, model.num_kv_heads // tp)
        width = 2 * (heads + kv_heads) * model.head_dim
    kept = tokens * width * compute
    if train.attention == "fused":
        return kept + tokens * heads * FP32_BYTES  # each query's log-sum-exp
    if recompute == "selective":
        return kept
    scores = tokens * train.seq_len * heads
    return kept + scores * (2 * compute + 1 if train.dropout else compute)


def _mlp(spec: JobSpec, compute: int, *, light: bool) -> int:
    """GELU's input and output; for SwiGLU gate, its SiLU, up and their product. `light` keeps what comes in."""
    tensors = _inner_tensors(spec, light=light)
    return micro_batch_tokens(spec) * tensors * (spec.model.ffn_hidden_size // spec.layout.tp) * compute


def _inner_tensors(spec: JobSpec, *, light: bool) -> int:
    tensors = 4 if spec.model.arch == "llama" else 2
    return tensors // 2 if light else tensors


def _experts(spec: JobSpec, compute: int, *, light: bool) -> int:
    """Each token once for each of its experts: dispatched input, inner tensors, output; and the router's logits."""
    moe, h = spec.model.moe, spec.model.hidden_size
    assert moe is not None
    tokens = micro_batch_tokens(spec)
    inner = _inner_tensors(spec, light=light) * moe.expert_ffn_hidden_size // spec.layout.tp
    routed = tokens * moe.experts_per_token * (2 * h + inner) * compute
    shared = tokens * moe.shared_experts * inner * compute
    return routed + shared + tokens * moe.num_experts * FP32_BYTES


def inner_gradient_bytes(spec: JobSpec, *, moe: bool = False) -> int:
    """Gradients inside an MLP that exist at once in its backward: GELU's; SwiGLU's are three but for its product."""
    rows, inner = micro_batch_tokens(spec), spec.model.ffn_hidden_size
    if moe and spec.model.moe:
        rows, inner = rows * spec.model.moe.experts_per_token, spec.model.moe.expert_ffn_hidden_size
    tensors = 2 if spec.model.arch == "llama" else 1
    return rows * tensors * (inner // spec.layout.tp) * mix_of(spec.train.precision).compute


def logit_bytes(spec: JobSpec) -> int:
    """Logits in the compute type, in fp32, and their gradient; the loss runs one micro-batch at a time."""
    compute = mix_of(spec.train.precision).compute
    return micro_batch_tokens(spec) * vocab_rows(spec) * (compute + 2 * FP32_BYTES)
