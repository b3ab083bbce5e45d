"""Custom kernels match torch, and save only their inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from workers.torch_private.kernels import rms_norm, swiglu

EPS = 1e-5
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    return made.to(dtype)


def norm_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


PAIRS: dict[str, tuple[Function, Function, tuple[int, ...], tuple[int, ...]]] = {
    "rms_norm": (lambda x, weight: rms_norm(x, weight, EPS), norm_of, (3, 7, 48), (48,)),
    "rms_norm of rows": (lambda x, weight: rms_norm(x, weight, EPS), norm_of, (5, 48), (48,)),
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
    ours, torchs, *shapes = PAIRS[name]
    first, second = (drawn(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))
    first = first * (scale if ours is not swiglu else 1)
    grad = drawn(*shapes[0], dtype=dtype, seed=2) - 1
    found = answers(ours, (first, second), grad)
    expected = answers(torchs, (first.double(), second.double()), grad.double())
    assert len(found) == len(expected) == 3
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == dtype
        off = (value.double() - wanted).abs().max() / wanted.abs().max()
        assert off < within, (name, off)


@pytest.mark.parametrize("name", PAIRS)
def test_accepts_a_non_contiguous_gradient(name: str) -> None:
    ours, _, *shapes = PAIRS[name]
    inputs = tuple(drawn(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes))
    grad = drawn(*shapes[0], dtype=torch.float32, seed=2)
    turned = grad.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    for one, other in zip(answers(ours, inputs, grad), answers(ours, inputs, turned), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", PAIRS)
def test_backward_saves_only_inputs_and_one_number_per_row(name: str) -> None:
    ours, _, *shapes = PAIRS[name]
    inputs = [drawn(*shape, dtype=torch.bfloat16, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        ours(*inputs)
    others = [x for x in kept if all(x.data_ptr() != given.data_ptr() for given in inputs)]
    assert all(x.numel() == inputs[0].numel() // shapes[0][-1] for x in others), [x.shape for x in others]
    assert len(kept) - len(others) == 2


def test_layer_norm_backward_uses_the_given_mean() -> None:
    """RMSNorm relies on a LayerNorm backward that does not compute the mean."""
    x, grad = (drawn(4, 16, dtype=torch.float32, seed=i) for i in range(2))
    scale, weight = torch.ones(4, 1), torch.ones(16)
    backward, mask = torch.ops.aten.native_layer_norm_backward, [True, True, False]
    told = [backward(grad, x, [16], torch.full((4, 1), mean), scale, weight, None, mask)[1] for mean in (0.0, 1.0)]
    torch.testing.assert_close(told[0] - told[1], grad.sum(0))
