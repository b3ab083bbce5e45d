"""SDPA kernels with their log-sum-exp, which `scaled_dot_product_attention` does not return.

With the log-sum-exp, attention can process parts of the keys and merge the outputs. Backward works part by part from
the merged output (FlashAttention 2205.14135, section 3). No kernel stores scores.

Queries are (batch, heads, queries, head size), keys and values are (batch, kv heads, keys, head size). The log-sum-exp
is (batch, heads, queries) fp32. `causal` needs equal numbers of keys and queries. A `bias` (1, 1, queries, keys) in the
dtype of the queries is added to the scores of a batch of one. FlashAttention on a GPU accepts no bias.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

aten: Any = torch.ops.aten
LSE_ALIGNMENT = 32  # alignment of the log-sum-exp in the memory-efficient kernel
HEAD_ALIGNMENT = 8  # alignment of the head size in CUDA kernels


class AttentionGradients(NamedTuple):
    """Store gradients of queries, keys, and values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp over these keys."""
    size = q.shape[-1]
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_group(q, k, v), 0.0, causal, attn_mask=bias)
        return _ungroup_heads(out, q), _ungroup_heads(lse, q)
    scale, (q, k, v) = size**-0.5, _pad_heads(q, k, v)
    if bias is None and uses_flash_attention(q, k, v, causal=causal):
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
        return out[..., :size], lse
    out, lse = aten._scaled_dot_product_efficient_attention(
        *(grouped := _group(q, k, v)),
        _expand_bias(bias, grouped[0]),
        compute_log_sumexp=True,
        is_causal=causal,
        scale=scale,
    )[:2]
    return _ungroup_heads(out, q)[..., :size], _ungroup_heads(lse[..., : q.shape[2]], q)


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    causal: bool,
    bias: torch.Tensor | None = None,
) -> AttentionGradients:
    """Return the gradients from these keys. `out` and `lse` are over all keys."""
    size = q.shape[-1]
    if q.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        some = (_group_heads(x, k.shape[1]) for x in (out, lse))
        return _ungroup(
            kernel(_group_heads(grad, k.shape[1]), *_group(q, k, v), *some, 0.0, causal, attn_mask=bias), q, k
        )
    scale, (q, k, v, grad, out) = size**-0.5, _pad_heads(q, k, v, grad, out)
    seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # for dropout, which is off
    if bias is None and uses_flash_attention(q, k, v, causal=causal):
        lengths = (None, None, q.shape[2], k.shape[2])
        kernel = aten._scaled_dot_product_flash_attention_backward
        grads = kernel(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, seed, seed[:0], scale=scale)
        return AttentionGradients(*(x[..., :size] for x in grads))
    rows = F.pad(_group_heads(lse, k.shape[1]), (0, -lse.shape[-1] % LSE_ALIGNMENT), value=float("inf")).contiguous()
    grad, out = (_group_heads(x, k.shape[1]) for x in (grad, out))
    kernel = aten._scaled_dot_product_efficient_attention_backward
    wanted = (True, True, True, False)
    q_grouped, *pair = _group(q, k, v)
    spread = _expand_bias(bias, q_grouped)
    *grads, _ = kernel(grad, q_grouped, *pair, spread, out, rows, seed[0], seed[1], 0.0, wanted, causal, scale=scale)
    return AttentionGradients(*(x[..., :size] for x in _ungroup(grads, q, k)))


def uses_flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> bool:
    """Return whether this GPU uses FlashAttention. Otherwise it uses the memory-efficient kernel."""
    grouped = q.shape[1] != k.shape[1]
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _expand_bias(bias: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """Expand the bias to all heads without a copy, with aligned rows."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % HEAD_ALIGNMENT))[..., :keys].expand(*q.shape[:2], -1, -1)


def _pad_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pad heads with zeros to the alignment of CUDA kernels."""
    rest = -tensors[0].shape[-1] % HEAD_ALIGNMENT
    return [F.pad(x, (0, rest)) if rest else x for x in tensors]


def _group_heads(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Reshape (batch, heads, ...) -> (batch * kv heads, heads per group, ...)."""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).flatten(0, 1)


def _group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Expand key/value heads to the number of query heads, without a copy."""
    served = q.shape[1] // k.shape[1]
    if served == 1:
        return q, k, v
    k_shared, v_shared = (x.flatten(0, 1).unsqueeze(1).expand(-1, served, -1, -1) for x in (k, v))
    return _group_heads(q, k.shape[1]), k_shared, v_shared


def _ungroup_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Revert `_group_heads`."""
    return x if x.shape[:2] == q.shape[:2] else x.unflatten(0, (q.shape[0], -1)).flatten(1, 2)


def _ungroup(grads: Any, q: torch.Tensor, k: torch.Tensor) -> AttentionGradients:
    q_grad, k_grad, v_grad = grads
    if q.shape[1] == k.shape[1]:
        return AttentionGradients(q_grad, k_grad, v_grad)
    return AttentionGradients(
        _ungroup_heads(q_grad, q), *(x.sum(1).unflatten(0, k.shape[:2]) for x in (k_grad, v_grad))
    )
