"""What backward needs of a tensor, kept as a way to make it again (2205.05198 sections 4.2.2 and 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from workers.torch_private.tensors import storage_key


@contextmanager
def remade(tensor: torch.Tensor, make: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Products inside keep `make` in place of `tensor`, and backward calls it once, when the first asks for it.

    `make` runs without autograd and must give the same values.
    """
    uses = _Uses(make)
    # torch keeps both hooks as long as what was saved: they must not hold the tensor.
    storage, numel = storage_key(tensor.untyped_storage()), tensor.numel()

    def pack(saved: torch.Tensor) -> torch.Tensor | _View:
        if storage_key(saved.untyped_storage()) != storage or saved.numel() != numel:
            return saved
        uses.count += 1
        return _View(uses, saved.shape, saved.stride())

    def unpack(saved: torch.Tensor | _View) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else saved.make()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class _Uses:
    """How many saved tensors share one remade value, which is let go after the last."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._value: torch.Tensor | None = None
        self.count = 0

    def take(self) -> torch.Tensor:
        if self._value is None:
            with torch.no_grad():
                self._value = self._make().contiguous()
        value = self._value
        self.count -= 1
        if self.count == 0:
            self._value = None
        return value


class _View:
    """A saved tensor's shape over the remade values."""

    def __init__(self, uses: _Uses, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self._uses, self._shape, self._stride = uses, shape, stride

    def make(self) -> torch.Tensor:
        return self._uses.take().as_strided(self._shape, self._stride)
