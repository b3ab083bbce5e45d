"""Gradients in 16 bits accumulate in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from workers.torch_private import kernels
from workers.torch_private.kernels import layer_norm, look_up, rms_norm

TOKENS, SIZE, ROWS, EPS = 4096, 48, 16, 1e-5
BF16 = 2**-8  # between two numbers that are 1 to 2


def _given() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias, table = (
        torch.randn(*shape, generator=draw).bfloat16() for shape in ((TOKENS, SIZE), (SIZE,), (SIZE,), (ROWS, SIZE))
    )
    return [x, weight, bias, table, torch.randint(ROWS, (4, TOKENS // 4), generator=draw)]


Kernel = Callable[..., torch.Tensor]
OURS: dict[str, Kernel] = {
    "rms norm": lambda x, weight, *_: rms_norm(x, weight, EPS),
    "layer norm": lambda x, weight, bias, *_: layer_norm(x, weight, bias, EPS),
    "table": lambda _x, _weight, _bias, table, tokens: look_up(tokens, table),
}
TORCH_S: dict[str, Kernel] = {
    "rms norm": lambda x, weight, *_: F.rms_norm(x, weight.shape, weight, EPS),
    "layer norm": lambda x, weight, bias, *_: F.layer_norm(x, weight.shape, weight, bias, EPS),
    "table": lambda _x, _weight, _bias, table, tokens: F.embedding(tokens, table),
}


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
