"""The three products of a linear layer: in the type of what enters, or in fp8 with one scale a tensor.

fp8 as torchao's dynamic scaling has it (2209.05433 section 3): inputs and weights in E4M3, gradients in E5M2, each
scaled when it is cast so that its largest element just fits; sums are kept in more. Scales are powers of two: then an
element that is not among the smallest is rounded alike whatever the rest of its tensor holds, on every rank.

Weight gradients that wait for their turn, for schedules that split backward in two (2401.10241 section 3).

Zero-bubble schedules pass input gradients on first (I) and compute weight gradients later, where a rank would idle (W).
Autograd has one backward, so a layer that uses a parameter through `WeightGradients` gives backward no path to it:
what would have been its gradient is kept, as a product still to be computed, in the micro-batch's bag. Computed, it
adds to the gradient that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST = 1e-12  # a largest element that is less is scaled as this one
EXPONENT = 0x7F800000  # those bits of an fp32: without the others it is the power of two below
Operand = Any  # what `gradient` makes of an output's


class Products:
    """Of one input (..., in) with several weights (out, in); `rows` are gradients of outputs, (tokens, out)."""

    def outputs(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        """x W^T + b of each, (..., out)."""
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    def gradient(self, rows: torch.Tensor) -> Operand:
        """As both products of backward take it."""
        return rows

    def input_gradient(self, rows: Sequence[Operand], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """(tokens, in), the sum over the outputs."""
        total: torch.Tensor = rows[0] @ weights[0]
        for row, weight in zip(rows[1:], weights[1:], strict=True):
            total.addmm_(row, weight)
        return total

    def weight_gradients(self, rows: Sequence[Operand], entered: torch.Tensor) -> list[torch.Tensor]:
        """(out, in) each; `entered` (tokens, in)."""
        return [row.T @ entered for row in rows]

    def add_weight_gradient(self, so_far: torch.Tensor, rows: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        """So far and this one, in place."""
        return so_far.addmm_(rows.T, entered)


class Fp8(Products):
    """The same with every operand cast to 8 bits; what comes out has the type of what was cast."""

    def outputs(
        self, x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        entered = _cast(x.flatten(0, -2), E4M3)
        made = [_product(entered, _cast(weight, E4M3).turned(), x.dtype) for weight in weights]
        whole = [y if bias is None else y.add_(bias) for y, bias in zip(made, biases, strict=True)]
        return tuple(y.view(*x.shape[:-1], -1) for y in whole)

    def gradient(self, rows: torch.Tensor) -> Operand:
        return rows.dtype, _cast(rows, E5M2)

    def input_gradient(self, rows: Sequence[Operand], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        total: torch.Tensor | None = None
        for (kind, row), weight in zip(rows, weights, strict=True):
            made = _product(row, _cast(weight, E4M3).by_columns(), kind)
            total = made if total is None else total.add_(made)
        assert total is not None
        return total

    def weight_gradients(self, rows: Sequence[Operand], entered: torch.Tensor) -> list[torch.Tensor]:
        columns = _cast(entered, E4M3).by_columns()
        return [_product(row.turned().by_rows(), columns, kind) for kind, row in rows]

    def add_weight_gradient(self, so_far: torch.Tensor, rows: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        (made,) = self.weight_gradients([self.gradient(rows)], entered)
        return so_far.add_(made)


class _Cast(NamedTuple):
    """Two dimensions in 8 bits, and what each element stands for times this, fp32."""

    data: torch.Tensor
    unit: torch.Tensor

    def turned(self) -> _Cast:
        return self._replace(data=self.data.T)

    def by_rows(self) -> _Cast:
        return self._replace(data=self.data.contiguous())

    def by_columns(self) -> _Cast:
        """As the second operand must lie: before Blackwell the kernel takes no other."""
        return self._replace(data=self.data.T.contiguous().T)


def _cast(x: torch.Tensor, kind: torch.dtype) -> _Cast:
    largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32).clamp_(min=LEAST)
    scale = ((torch.finfo(kind).max / largest).view(torch.int32) & EXPONENT).view(torch.float32)
    # 8 bits have no infinity, and the largest number would stand for it: so all that comes of it is no number.
    return _Cast((x * scale).to(kind), scale.reciprocal() + 0 * largest)


def _product(a: _Cast, b: _Cast, kind: torch.dtype) -> torch.Tensor:
    """(m, k) x (k, n) -> (m, n)"""
    whole = F.ScalingType.TensorWise
    return F.scaled_mm(a.data, b.data, a.unit, whole, b.unit, whole, output_dtype=kind)


class Linears(torch.autograd.Function):
    """x W^T + b of each (W, b) by `products`: weights come first, then as many biases or None."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, products: Products, *parameters: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = halves(parameters)
        ctx.products, ctx.biased = products, [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        return products.outputs(x, weights, biases)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = [grad.flatten(0, -2) for grad in grads]
        rows = [ctx.products.gradient(row) for row in flat]
        entered_grad = ctx.products.input_gradient(rows, weights).view_as(x)
        weight_grads = ctx.products.weight_gradients(rows, x.flatten(0, -2))
        bias_grads = [row.sum(0) if biased else None for row, biased in zip(flat, ctx.biased, strict=True)]
        return entered_grad, None, *weight_grads, *bias_grads


def halves(
    parameters: Sequence[torch.Tensor | None],
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None]]:
    """Weights, and as many biases or None, of an argument list."""
    middle = len(parameters) // 2
    return parameters[:middle], parameters[middle:]  # type: ignore[return-value]


WIDE = Products()

Summed = Callable[[torch.Tensor | None], torch.Tensor]  # the gradient so far, in the parameter's type -> with this one
Bag = list[tuple[torch.Tensor, Summed]]


def _added(value: torch.Tensor, parameter: torch.Tensor, so_far: torch.Tensor | None) -> torch.Tensor:
    value = value.to(parameter.dtype)
    return value if so_far is None else so_far.add_(value)


class _Linear(torch.autograd.Function):
    """y = x W^T + b; backward gives the input's gradient and leaves the rest in the bag."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, bag: Bag, products: Products
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.bag, ctx.products = weight, bias, bag, products
        (out,) = products.outputs(x, [weight.to(x.dtype)], [None if bias is None else bias.to(x.dtype)])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (x,) = ctx.saved_tensors
        weight, bias, rows = ctx.weight, ctx.bias, grad.flatten(0, -2)
        products: Products = ctx.products

        def add_product(so_far: torch.Tensor | None) -> torch.Tensor:
            entered = x.flatten(0, -2)
            if so_far is not None and so_far.dtype == x.dtype:
                return products.add_weight_gradient(so_far, rows, entered)
            (made,) = products.weight_gradients([products.gradient(rows)], entered)
            return _added(made, weight, so_far)

        ctx.bag.append((weight, add_product))
        if bias is not None:
            ctx.bag.append((bias, lambda so_far: _added(rows.sum(0), bias, so_far)))
        given = products.input_gradient([products.gradient(rows)], [weight.to(grad.dtype)])
        return given.view_as(x), None, None, None, None


class _Held(torch.autograd.Function):
    """A parameter as it is; its gradient is computed in backward, and waits in the bag to be added."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, bag: Bag) -> torch.Tensor:
        ctx.weight, ctx.bag = weight, bag
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        weight = ctx.weight
        ctx.bag.append((weight, lambda so_far: _added(grad, weight, so_far)))
        return None, None


class WeightGradients:
    """The bags of the micro-batches between their I and their W. Set `micro_batch` before each forward and backward."""

    def __init__(self) -> None:
        self.micro_batch = 0
        self._bags: dict[int, Bag] = {}

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, products: Products = WIDE
    ) -> torch.Tensor:
        """As F.linear."""
        return _Linear.apply(x, weight, bias, self._bag(), products)  # type: ignore[no-any-return]

    def held(self, weight: torch.Tensor) -> torch.Tensor:
        """The parameter, for any other use."""
        return _Held.apply(weight, self._bag())  # type: ignore[no-any-return]

    @torch.no_grad()
    def add(self, micro_batch: int) -> list[torch.Tensor]:
        """Compute what waits for a micro-batch and add it to the parameters' gradients, once each; gives them."""
        bag = self._bags.pop(micro_batch, [])
        added: dict[torch.Tensor, None] = {}
        bag.reverse()
        # What a product needs is freed when it is done. And a bag left full would never be: its tensors hold the graph,
        # whose nodes hold the bag.
        while bag:
            parameter, summed = bag.pop()
            parameter.grad = summed(parameter.grad)
            added[parameter] = None
        return list(added)

    def _bag(self) -> Bag:
        return self._bags.setdefault(self.micro_batch, [])
