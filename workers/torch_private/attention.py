"""SDPA's own kernels, with the log-sum-exp that `scaled_dot_product_attention` keeps to itself.

With it a part of the keys can be attended to at a time: answers are joined by their log-sum-exps, and backward works
part by part from the joined ones (FlashAttention 2205.14135 section 3). No kernel holds scores.

Queries are (batch, heads, queries, head size), keys and values (batch, kv heads, keys, head size); the log-sum-exp is
(batch, heads, queries) fp32. `causal` needs as many keys as queries. A `bias` (1, 1, queries, keys) in the type of the
queries is added to the scores of a batch of one; FlashAttention takes none on a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

aten: Any = torch.ops.aten
EFFICIENT_ROW = 32  # what the memory-efficient kernel rounds its log-sum-exps up to
ALIGNED = 8  # elements of a head that CUDA's kernels read at once


class Gradients(NamedTuple):
    """Of queries, keys and values, in their shapes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over these keys alone: (output, log-sum-exp)."""
    size = q.shape[-1]
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_grouped(q, k, v), 0.0, causal, attn_mask=bias)
        return _heads(out, q), _heads(lse, q)
    scale, (q, k, v) = size**-0.5, _aligned(q, k, v)
    if bias is None and takes_flash(q, k, v, causal=causal):
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
        return out[..., :size], lse
    out, lse = aten._scaled_dot_product_efficient_attention(
        *(grouped := _grouped(q, k, v)),
        _spread(bias, grouped[0]),
        compute_log_sumexp=True,
        is_causal=causal,
        scale=scale,
    )[:2]
    return _heads(out, q)[..., :size], _heads(lse[..., : q.shape[2]], q)


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
) -> Gradients:
    """What these keys add to the gradients, where `out` and `lse` are those over all keys."""
    size = q.shape[-1]
    if q.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        some = (_by_group(x, k.shape[1]) for x in (out, lse))
        return _ungrouped(
            kernel(_by_group(grad, k.shape[1]), *_grouped(q, k, v), *some, 0.0, causal, attn_mask=bias), q, k
        )
    scale, (q, k, v, grad, out) = size**-0.5, _aligned(q, k, v, grad, out)
    seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # of dropout, which there is none of
    if bias is None and takes_flash(q, k, v, causal=causal):
        lengths = (None, None, q.shape[2], k.shape[2])
        kernel = aten._scaled_dot_product_flash_attention_backward
        found = kernel(grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, causal, seed, seed[:0], scale=scale)
        return Gradients(*(x[..., :size] for x in found))
    rows = F.pad(_by_group(lse, k.shape[1]), (0, -lse.shape[-1] % EFFICIENT_ROW), value=float("inf")).contiguous()
    grad, out = (_by_group(x, k.shape[1]) for x in (grad, out))
    kernel = aten._scaled_dot_product_efficient_attention_backward
    wanted = (True, True, True, False)
    q_grouped, *pair = _grouped(q, k, v)
    spread = _spread(bias, q_grouped)
    *found, _ = kernel(grad, q_grouped, *pair, spread, out, rows, seed[0], seed[1], 0.0, wanted, causal, scale=scale)
    return Gradients(*(x[..., :size] for x in _ungrouped(found, q, k)))


def takes_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> bool:
    """Whether FlashAttention computes these on this GPU; the memory-efficient kernel takes the rest."""
    grouped = q.shape[1] != k.shape[1]
    parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _spread(bias: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """One for each of q's heads, without copies, in rows as long as CUDA's kernels read them."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % ALIGNED))[..., :keys].expand(*q.shape[:2], -1, -1)


def _aligned(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Heads filled up with zeros to a size that CUDA's kernels take."""
    rest = -tensors[0].shape[-1] % ALIGNED
    return [F.pad(x, (0, rest)) if rest else x for x in tensors]


def _by_group(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """(batch, heads, ...) -> (batch x kv heads, heads that share one, ...)"""
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).flatten(0, 1)


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with as many key/value heads as queries', which see one head's memory: nothing is repeated."""
    served = q.shape[1] // k.shape[1]
    if served == 1:
        return q, k, v
    k_shared, v_shared = (x.flatten(0, 1).unsqueeze(1).expand(-1, served, -1, -1) for x in (k, v))
    return _by_group(q, k.shape[1]), k_shared, v_shared


def _heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Back from `_by_group`."""
    return x if x.shape[:2] == q.shape[:2] else x.unflatten(0, (q.shape[0], -1)).flatten(1, 2)


def _ungrouped(found: Any, q: torch.Tensor, k: torch.Tensor) -> Gradients:
    q_grad, k_grad, v_grad = found
    if q.shape[1] == k.shape[1]:
        return Gradients(q_grad, k_grad, v_grad)
    return Gradients(_heads(q_grad, q), *(x.sum(1).unflatten(0, k.shape[:2]) for x in (k_grad, v_grad)))
