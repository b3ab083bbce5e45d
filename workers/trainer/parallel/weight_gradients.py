"""Weight gradients that wait for their turn, for schedules that split backward in two (2401.10241 section 3).

Zero-bubble schedules pass input gradients on first (I) and compute weight gradients later, where a rank would idle (W).
Autograd has one backward, so a layer that uses a parameter through `WeightGradients` gives backward no path to it:
what would have been its gradient is kept, as a product still to be computed, in the micro-batch's bag. Computed, it
adds to the gradient that is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from workers.trainer.parallel.products import WIDE, Products

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
