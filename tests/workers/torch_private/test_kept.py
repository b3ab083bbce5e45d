"""CPU kernels save the same bytes for backward as GPU kernels, which dry runs rely on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from workers.torch_private.compiler import FakeTensorMode

aten: Any = torch.ops.aten
TOKENS = 100  # no multiple of what the memory-efficient kernel rounds up to
REFUSED = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    weight = torch.empty(4, 4, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()
"""


def kept(found: Any) -> int:
    """Return the bytes of the outputs of a kernel."""
    return sum(x.untyped_storage().nbytes() for x in found if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_flash_attention_saves_two_more_seeds_on_a_gpu(kv_heads: int) -> None:
    def on(device: str) -> list[torch.Tensor]:
        return [
            torch.empty(2, heads, TOKENS, 64, dtype=torch.bfloat16, device=device) for heads in (8, kv_heads, kv_heads)
        ]

    with FakeTensorMode():
        cpu = kept(aten._scaled_dot_product_flash_attention_for_cpu(*on("cpu"), 0.0, True))
        assert kept(aten._scaled_dot_product_flash_attention(*on("cuda"), 0.0, True)) == cpu + 24


def test_memory_efficient_attention_pads_the_log_sum_exp_to_32_queries() -> None:
    with FakeTensorMode():
        q, q_gpu = (torch.empty(2, 8, TOKENS, 64, device=device) for device in ("cpu", "cuda"))
        cpu = kept(aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True))
        gpu = kept(aten._scaled_dot_product_efficient_attention(q_gpu, q_gpu, q_gpu, None, True, 0.0, True))
        assert gpu == cpu + 2 * 8 * 28 * 4 + 16


def test_norms_save_fp32_statistics_on_a_gpu() -> None:
    def on(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.empty(TOKENS, 512, dtype=torch.bfloat16, device=device)
        return x, torch.empty(512, dtype=torch.bfloat16, device=device)

    with FakeTensorMode():
        (x, weight), (x_gpu, weight_gpu) = on("cpu"), on("cuda")
        cpu = kept(aten.native_layer_norm(x, [512], weight, weight, 1e-5))
        assert kept(aten.native_layer_norm(x_gpu, [512], weight_gpu, weight_gpu, 1e-5)) == cpu + TOKENS * 2 * 2
        assert kept(aten._fused_rms_norm(x_gpu, [512], weight_gpu, 1e-5)) == x.nbytes + TOKENS * 4


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA takes fake tensors of a GPU")
def test_a_cpu_build_of_torch_rejects_backward_on_fake_cuda_tensors() -> None:
    """If this fails, a dry run can use fake CUDA tensors."""
    told = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=False)
    assert told.returncode != 0
    assert "not linked with support for cuda devices" in told.stderr
