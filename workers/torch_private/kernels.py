"""Kernels whose outputs or backwards differ from torch's public functions.

Norms, lookup, and SwiGLU have custom backwards, which keep only inputs like fused kernels. On a CPU, torch 2.13
accumulates `native_layer_norm_backward` and `embedding_dense_backward` over tokens in 16 bits. With 2,048 tokens,
gradients of norms had an error of 21%, and gradients of a table 14%. A GPU accumulates in fp32, and so do these
functions.

Attention returns its log-sum-exp, which `scaled_dot_product_attention` does not. With it, attention can process parts
of the keys and merge the outputs. Backward works part by part from the merged output (FlashAttention 2205.14135,
section 3). No kernel stores scores. Queries are (batch, heads, queries, head size), keys and values are (batch, kv
heads, keys, head size). The log-sum-exp is (batch, heads, queries) fp32. `causal` needs equal numbers of keys and
queries. A `bias` (1, 1, queries, keys) in the dtype of the queries is added to the scores of a batch of one.
FlashAttention on a GPU accepts no bias.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

aten: Any = torch.ops.aten
MAX_FP32_ELEMENTS = 2**18  # fp32 elements per block, 1 MiB
LSE_ALIGNMENT = 32  # alignment of the log-sum-exp in the memory-efficient kernel
HEAD_ALIGNMENT = 8  # alignment of the head size in CUDA kernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim (1910.07467, equation 4).

    A GPU has a kernel. On a CPU, torch uses a dozen operations and keeps two fp32 tensors. LayerNorm's backward with a
    mean of 0 computes all terms except one.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias over the last dim (1607.06450, equation 4)."""
    if _accumulates_in_fp32(x):
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return]


def look_up(tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the table row of each token, (*tokens, size)."""
    if _accumulates_in_fp32(table):
        return F.embedding(tokens, table)
    return _Rows.apply(tokens, table)  # type: ignore[no-any-return]


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up (2002.05202, section 2). Backward recomputes silu(gate)."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return _SwiGlu.apply(gate, up)  # type: ignore[no-any-return]


def _accumulates_in_fp32(x: torch.Tensor) -> bool:
    """Return whether torch's backward accumulates in fp32."""
    return x.dtype == torch.float32 or x.device.type != "cpu" or torch.compiler.is_compiling()


def _sum_weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, mean: torch.Tensor | None
) -> torch.Tensor:
    """Return the sum of grad * (x - mean) * scale over all rows, (size,) in fp32."""
    size = x.shape[-1]
    step, total = max(1, MAX_FP32_ELEMENTS // size), torch.zeros(size, device=x.device)
    grads, rows, scales = grad.reshape(-1, size), x.reshape(-1, size), scale.reshape(-1, 1)
    means = None if mean is None else mean.reshape(-1, 1)
    for first in range(0, rows.shape[0], step):
        part = slice(first, first + step)
        wide = rows[part].float() if means is None else rows[part].float().sub_(means[part])
        total += wide.mul_(scales[part]).mul_(grads[part]).sum(0)
    return total


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale, out=torch.empty_like(x)).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        size, adds_up = x.shape[-1], _accumulates_in_fp32(x)
        wide = weight.float()  # The kernel needs the dtype of the scale.
        x_grad, weight_grad, _ = aten.native_layer_norm_backward(
            grad, x, [size], torch.zeros_like(scale), scale, wide, None, [True, adds_up, False]
        )
        if not adds_up:
            weight_grad = _sum_weight_gradient(grad, x, scale, None)
        mean = (grad @ weight.to(grad.dtype)).unsqueeze(-1).mul_(scale).div_(size)
        return x_grad.add_(mean), weight_grad.to(weight.dtype), None  # LayerNorm subtracted the mean.


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        out, mean, scale = aten.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        x_grad, _, _ = aten.native_layer_norm_backward(
            grad, x, weight.shape, mean, scale, weight, bias, [True, False, False]
        )
        weight_grad = _sum_weight_gradient(grad, x, scale, mean)
        bias_grad = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=torch.float32)
        return x_grad, weight_grad.to(weight.dtype), bias_grad.to(bias.dtype), None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = table.shape
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Compute the gradient in blocks of columns, so that no whole table is in fp32."""
        (tokens,), (rows, size) = ctx.saved_tensors, ctx.shape
        flat, grads, table = tokens.reshape(-1), grad.reshape(-1, size), grad.new_empty(ctx.shape)
        step = max(1, MAX_FP32_ELEMENTS // max(rows, len(flat)))
        for first in range(0, size, step):
            part = slice(first, first + step)
            wide = torch.zeros(rows, min(step, size - first), device=grad.device)
            table[:, part] = wide.index_add_(0, flat, grads[:, part].float())
        return None, table


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        return aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


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
