"""SDPA kernels compute attention over parts of the keys."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from workers.torch_private import kernels
from workers.torch_private.kernels import attend, attend_backward

CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # of fp32 values about 1, summed in another order by another number of threads


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_the_cpu_kernel_returns_output_log_sum_exp_and_gradients(kv_heads: int, causal: bool) -> None:
    q, k, v = drawn(2, 4, 24, 16), drawn(2, kv_heads, 24, 16), drawn(2, kv_heads, 24, 16) + 1
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    grad = drawn(2, 4, 24, 16) - 1
    expected.backward(grad)
    scores = q @ k.repeat_interleave(4 // kv_heads, 1).transpose(-1, -2) / 4
    if causal:
        scores = scores.masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), float("-inf"))

    out, lse = attend(q, k, v, causal=causal)

    torch.testing.assert_close(out, expected.detach(), **CLOSE)
    torch.testing.assert_close(lse, scores.logsumexp(-1), **CLOSE)
    found = attend_backward(grad, q, k, v, out, lse, causal=causal)
    for gradient, x in zip(found, whole, strict=True):
        torch.testing.assert_close(gradient, x.grad, **CLOSE)


def test_backward_of_some_keys_uses_the_log_sum_exp_of_all_keys() -> None:
    q, k, v = drawn(1, 4, 10, 8), drawn(1, 2, 30, 8), drawn(1, 2, 30, 8) + 1
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*whole, enable_gqa=True)
    grad = drawn(1, 4, 10, 8) - 1
    out.backward(grad)
    _, lse = attend(q, k, v, causal=False)
    runs = (slice(12), slice(12, 30))
    parts = [attend_backward(grad, q, k[..., run, :], v[..., run, :], out, lse, causal=False) for run in runs]
    torch.testing.assert_close(parts[0].q + parts[1].q, whole[0].grad, **CLOSE)
    torch.testing.assert_close(torch.cat([part.k for part in parts], 2), whole[1].grad, **CLOSE)
    torch.testing.assert_close(torch.cat([part.v for part in parts], 2), whole[2].grad, **CLOSE)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize(("kv_heads", "size"), [(8, 64), (2, 64), (2, 60)])
def test_cuda_kernels_accept_the_shapes(flash: bool, kv_heads: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the shapes of both CUDA kernels with meta tensors."""
    monkeypatch.setattr(kernels, "uses_flash_attention", lambda *_tensors, causal: flash)
    made = {"dtype": torch.bfloat16, "device": "meta"}
    q, k, v = torch.empty(2, 8, 40, size, **made), *(torch.empty(2, kv_heads, 24, size, **made) for _ in "kv")  # type: ignore[call-overload]
    out, lse = attend(q, k, v, causal=False)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    found = attend_backward(torch.empty_like(out), q, k, v, out, lse, causal=False)
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


def test_torch_selects_the_gpu_kernel() -> None:
    q = torch.empty(2, 8, 40, 64, dtype=torch.bfloat16, device="meta")
    assert kernels.uses_flash_attention(q, q, q, causal=True) in (True, False)
