"""Custom kernels match torch, save only their inputs, and accumulate 16-bit gradients in fp32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from workers.torch_private import kernels
from workers.torch_private.compiler import FakeTensorMode
from workers.torch_private.kernels import attend, attend_backward, layer_norm, look_up, rms_norm, swiglu

EPS = 1e-5
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # of fp32 values about 1, summed in another order by another number of threads
TOKENS, SIZE, ROWS, SUM_EPS = 4096, 48, 16, 1e-5
BF16 = 2**-8  # between two numbers that are 1 to 2
Kernel = Callable[..., torch.Tensor]
OURS: dict[str, Kernel] = {
    "rms norm": lambda x, weight, *_: rms_norm(x, weight, SUM_EPS),
    "layer norm": lambda x, weight, bias, *_: layer_norm(x, weight, bias, SUM_EPS),
    "table": lambda _x, _weight, _bias, table, tokens: look_up(tokens, table),
}
TORCH_S: dict[str, Kernel] = {
    "rms norm": lambda x, weight, *_: F.rms_norm(x, weight.shape, weight, SUM_EPS),
    "layer norm": lambda x, weight, bias, *_: F.layer_norm(x, weight.shape, weight, bias, SUM_EPS),
    "table": lambda _x, _weight, _bias, table, tokens: F.embedding(tokens, table),
}
ODD_TOKENS = 100  # no multiple of what the memory-efficient kernel rounds up to
REFUSED = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    weight = torch.empty(4, 4, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()
"""


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    return made.to(dtype)


def compute_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


PAIRS: dict[str, tuple[Function, Function, tuple[int, ...], tuple[int, ...]]] = {
    "rms_norm": (lambda x, weight: rms_norm(x, weight, EPS), compute_norm, (3, 7, 48), (48,)),
    "rms_norm of rows": (lambda x, weight: rms_norm(x, weight, EPS), compute_norm, (5, 48), (48,)),
    "swiglu": (swiglu, gated, (3, 7, 48), (3, 7, 48)),
}


def answers(function: Function, inputs: tuple[torch.Tensor, ...], grad: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4])
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_match_torch_in_float64(
    name: str, scale: float, dtype: torch.dtype, within: float
) -> None:
    actual, torchs, *shapes = PAIRS[name]
    first, second = (drawn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    first = first * (scale if actual is not swiglu else 1)
    grad = drawn(*shapes[0], dtype=dtype, seed=2) - 1
    found = answers(actual, (first, second), grad)
    expected = answers(torchs, (first.double(), second.double()), grad.double())
    assert len(found) == len(expected) == 3
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == dtype
        off = (value.double() - wanted).abs().max() / wanted.abs().max()
        assert off < within, (name, off)


@pytest.mark.parametrize("name", PAIRS)
def test_accepts_a_non_contiguous_gradient(name: str) -> None:
    actual, _, *shapes = PAIRS[name]
    inputs = tuple(drawn(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes))
    grad = drawn(*shapes[0], dtype=torch.float32, seed=2)
    turned = grad.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    for one, other in zip(answers(actual, inputs, grad), answers(actual, inputs, turned), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", PAIRS)
def test_backward_saves_only_inputs_and_one_number_per_row(name: str) -> None:
    actual, _, *shapes = PAIRS[name]
    inputs = [drawn(*shape, dtype=torch.bfloat16, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    read_stored: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        read_stored.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        actual(*inputs)
    others = [x for x in read_stored if all(x.data_ptr() != options.data_ptr() for options in inputs)]
    assert all(x.numel() == inputs[0].numel() // shapes[0][-1] for x in others), [x.shape for x in others]
    assert len(read_stored) - len(others) == 2


def test_layer_norm_backward_uses_the_given_mean() -> None:
    """RMSNorm relies on a LayerNorm backward that does not compute the mean."""
    x, grad = (drawn(4, 16, dtype=torch.float32, seed=i) for i in range(2))
    scale, weight = torch.ones(4, 1), torch.ones(16)
    backward, mask = torch.ops.aten.native_layer_norm_backward, [True, True, False]
    result = [backward(grad, x, [16], torch.full((4, 1), mean), scale, weight, None, mask)[1] for mean in (0.0, 1.0)]
    torch.testing.assert_close(result[0] - result[1], grad.sum(0))


def draw_heads(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
def test_the_cpu_kernel_returns_output_log_sum_exp_and_gradients(kv_heads: int, causal: bool) -> None:
    q, k, v = draw_heads(2, 4, 24, 16), draw_heads(2, kv_heads, 24, 16), draw_heads(2, kv_heads, 24, 16) + 1
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    grad = draw_heads(2, 4, 24, 16) - 1
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
    q, k, v = draw_heads(1, 4, 10, 8), draw_heads(1, 2, 30, 8), draw_heads(1, 2, 30, 8) + 1
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*whole, enable_gqa=True)
    grad = draw_heads(1, 4, 10, 8) - 1
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


def _given() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias, table = (
        torch.randn(*shape, generator=draw).bfloat16() for shape in ((TOKENS, SIZE), (SIZE,), (SIZE,), (ROWS, SIZE))
    )
    return [x, weight, bias, table, torch.randint(ROWS, (4, TOKENS // 4), generator=draw)]


def _gradients(kernel: Kernel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the gradients of the inputs by name."""
    *floats, tokens = _given()
    named = dict(zip(("x", "weight", "bias", "table"), floats, strict=True))
    named = {name: one.to(dtype).requires_grad_() for name, one in named.items()}
    out = kernel(*named.values(), tokens)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    out.backward(grad.to(dtype))
    return {name: one.grad.double() for name, one in named.items() if one.grad is not None}


def _apart(kernel: Kernel, exact: Kernel) -> dict[str, float]:
    made, wanted = _gradients(kernel, torch.bfloat16), _gradients(exact, torch.float64)
    assert made.keys() == wanted.keys()
    return {name: float((made[name] - one).norm() / one.norm()) for name, one in wanted.items()}


@pytest.mark.parametrize("name", OURS)
def test_gradients_in_16_bits_match_64_bits_within_rounding(name: str) -> None:
    assert max(_apart(OURS[name], TORCH_S[name]).values()) < BF16


@pytest.mark.parametrize("name", OURS)
def test_sums_in_blocks_are_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a block size with many blocks and a short last block."""
    whole = _gradients(OURS[name], torch.bfloat16)
    monkeypatch.setattr(kernels, "MAX_FP32_ELEMENTS", 7 * max(TOKENS, SIZE) if name == "table" else 7 * SIZE)
    parts = _gradients(OURS[name], torch.bfloat16)
    assert all(torch.allclose(parts[key], one, rtol=2 * BF16, atol=1e-2) for key, one in whole.items())


@pytest.mark.parametrize(("name", "of"), [("layer norm", "weight"), ("table", "table")])
def test_torch_still_accumulates_in_16_bits(name: str, of: str) -> None:
    """If this fails, the custom kernels are not needed (torch 2.13)."""
    assert _apart(TORCH_S[name], TORCH_S[name])[of] > 2 * BF16


aten: Any = torch.ops.aten


def read_stored(found: Any) -> int:
    """Return the bytes of the outputs of a kernel."""
    return sum(x.untyped_storage().nbytes() for x in found if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_flash_attention_saves_two_more_seeds_on_a_gpu(kv_heads: int) -> None:
    def on(device: str) -> list[torch.Tensor]:
        return [
            torch.empty(2, heads, ODD_TOKENS, 64, dtype=torch.bfloat16, device=device)
            for heads in (8, kv_heads, kv_heads)
        ]

    with FakeTensorMode():
        cpu = read_stored(aten._scaled_dot_product_flash_attention_for_cpu(*on("cpu"), 0.0, True))
        assert read_stored(aten._scaled_dot_product_flash_attention(*on("cuda"), 0.0, True)) == cpu + 24


def test_memory_efficient_attention_pads_the_log_sum_exp_to_32_queries() -> None:
    with FakeTensorMode():
        q, q_gpu = (torch.empty(2, 8, ODD_TOKENS, 64, device=device) for device in ("cpu", "cuda"))
        cpu = read_stored(aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True))
        gpu = read_stored(aten._scaled_dot_product_efficient_attention(q_gpu, q_gpu, q_gpu, None, True, 0.0, True))
        assert gpu == cpu + 2 * 8 * 28 * 4 + 16


def test_norms_save_fp32_statistics_on_a_gpu() -> None:
    def on(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.empty(ODD_TOKENS, 512, dtype=torch.bfloat16, device=device)
        return x, torch.empty(512, dtype=torch.bfloat16, device=device)

    with FakeTensorMode():
        (x, weight), (x_gpu, weight_gpu) = on("cpu"), on("cuda")
        cpu = read_stored(aten.native_layer_norm(x, [512], weight, weight, 1e-5))
        assert (
            read_stored(aten.native_layer_norm(x_gpu, [512], weight_gpu, weight_gpu, 1e-5)) == cpu + ODD_TOKENS * 2 * 2
        )
        assert read_stored(aten._fused_rms_norm(x_gpu, [512], weight_gpu, 1e-5)) == x.nbytes + ODD_TOKENS * 4


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA takes fake tensors of a GPU")
def test_a_cpu_build_of_torch_rejects_backward_on_fake_cuda_tensors() -> None:
    """If this fails, a dry run can use fake CUDA tensors."""
    result = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "not linked with support for cuda devices" in result.stderr
