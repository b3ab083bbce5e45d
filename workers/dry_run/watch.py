"""Counts the FLOPs of every operation and the bytes that are alive, for tensors that hold nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from workers.torch_private.tensors import ATTENTION, ATTENTION_BACKWARD, FakeTensor, TorchDispatchMode, storage_key

DEVICE_OF = torch.ops.prim.device.default
aten = torch.ops.aten
IN_PLACE = {aten.addmm_: aten.addmm, aten.baddbmm_: aten.baddbmm}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of storages alive at once. `flops`: of products, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self._most_bytes = 0
        self._alive: dict[int, int] = {}
        self._alive_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:  # asked twice for every operation, and dear to answer for a fake tensor
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        out = func(*args, **(kwargs or {}))
        self.flops += _flops(func, args, kwargs or {}, out)
        for tensor in out if isinstance(out, tuple | list) else (out,):
            # A DTensor holds nothing itself: what it wraps passes by as well.
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                self._keep(tensor)
        return out

    def read(self) -> int:
        """The most alive at once since `restart`."""
        return self._most_bytes

    def restart(self) -> None:
        """Forget what was alive before now."""
        self._most_bytes = self._alive_bytes

    def resized(self, tensor: torch.Tensor) -> None:
        """A storage was freed or filled in place, which no operation tells."""
        storage = tensor.untyped_storage()
        if storage_key(storage) in self._alive:
            self._set(storage_key(storage), storage.nbytes())

    def _keep(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage_key(storage) in self._alive:
            return
        self._set(storage_key(storage), storage.nbytes())
        weakref.finalize(storage, self._gone, storage_key(storage))

    def _set(self, key: int, num_bytes: int) -> None:
        self._alive_bytes += num_bytes - self._alive.get(key, 0)
        self._alive[key] = num_bytes
        self._most_bytes = max(self._most_bytes, self._alive_bytes)

    def _gone(self, key: int) -> None:
        self._alive_bytes -= self._alive.pop(key)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Of one operation; torch's table, and what it lacks: products added in place, and attention on a CPU."""
    count = flop_registry.get(IN_PLACE.get(func.overloadpacket, func.overloadpacket))
    if count is not None:
        return int(count(*args, **kwargs, out_val=out))
    if func is ATTENTION:
        return int(sdpa_flop_count(*(x.shape for x in args[:3])))  # type: ignore[no-untyped-call]
    if func is ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(*(x.shape for x in args[:4])))  # type: ignore[no-untyped-call]
    return 0
