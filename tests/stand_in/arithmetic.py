"""Compute CUDA operations on the CPU in the stand-in's memory, which is host memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from workers.torch_private.compiler import FakeTensor

aten: Any = torch.ops.aten
# Operations that create or rearrange memory, on any device.
UNCHANGED_OPS = {
    *("aten::empty.memory_format", "aten::empty_strided", "aten::empty_like", "aten::new_empty"),
    *(
        "aten::new_empty_strided",
        "aten::resize_",
        "aten::set_.source_Storage_storage_offset",
        "aten::set_.source_Tensor",
    ),
    *("aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::_unsafe_view", "aten::lift_fresh"),
    "prim::device",
}
# Operations that copy between devices, or index one device with numbers of another.
CROSS_DEVICE_OPS = {"aten::copy_", "aten::_to_copy", "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"}
OTHER_NAMESPACES = ("c10d", "profiler")  # collectives and profiler ranges


class CpuDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Run operations without GPU kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DTensor in types:
            return NotImplemented  # the wrapped function also passes by
        arguments = tree_flatten((args, kwargs))[0]
        device = next((d for d in map(_find_cuda_device, arguments) if d is not None), None)
        if device is None or func.namespace in OTHER_NAMESPACES or func.name() in UNCHANGED_OPS or _is_view(func):
            return func(*args, **kwargs)
        if any(isinstance(one, FakeTensor) for one in arguments):
            return func(*args, **kwargs)
        if func.name() not in CROSS_DEVICE_OPS:
            _check_devices(func, args, kwargs, device)
        torch.cuda.current_stream().synchronize()  # for data on its way into this memory
        if func is aten._to_copy.default:
            return _move(args[0], kwargs)
        return _compute_on_cpu(func, args, kwargs, device)


def _find_cuda_device(one: Any) -> torch.device | None:
    if isinstance(one, torch.Tensor):
        return one.device if one.is_cuda else None
    return one if isinstance(one, torch.device) and one.type == "cuda" else None


def _check_devices(func: Any, args: Any, kwargs: Any, device: torch.device) -> None:
    """Check that a GPU kernel gets only host scalars, and none in a list.

    Raises:
        RuntimeError: The message is torch's own.
    """
    for one in (*args, *kwargs.values()):
        listed = isinstance(one, (list, tuple))
        for tensor in one if listed else [one]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and (listed or tensor.ndim):
                raise RuntimeError(f"{func.name()}: expected all tensors to be on {device}, found one on cpu")


def _is_view(func: Any) -> bool:
    schema = func._schema
    reads = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
    return reads and bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)


def view_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor with the same memory."""
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    bare = torch.empty(0, dtype=tensor.dtype)
    held = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return bare.set_(held, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to device memory with its size and strides."""
    storage = tensor.untyped_storage()
    memory = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    ctypes.memmove(memory.data_ptr(), storage.data_ptr(), storage.nbytes())
    bare = torch.empty(0, dtype=tensor.dtype, device=device)
    return bare.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]


def _move(tensor: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    to = torch.device(kwargs.get("device") or tensor.device)
    how = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "non_blocking")}
    copy: torch.Tensor = aten._to_copy(view_on_host(tensor) if tensor.is_cuda else tensor, **how)
    return copy_to_device(copy, to) if to.type == "cuda" else copy


def _compute_on_cpu(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    hosts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_host(one: Any) -> Any:
        if isinstance(one, torch.Tensor) and one.is_cuda:
            return hosts.setdefault(id(one), (view_on_host(one), one))[0]
        return torch.device("cpu") if isinstance(one, torch.device) else one

    args, kwargs = tree_map(to_host, args), tree_map(to_host, kwargs)
    found = OTHERWISE.get(func.name(), func)(*args, **kwargs)
    arguments = {id(host): tensor for host, tensor in hosts.values()}

    def back(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        return arguments[id(one)] if id(one) in arguments else copy_to_device(one, device)

    return tree_map(back, found)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float = 0.0, causal: bool = False, **more: Any
) -> Any:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=more.get("scale"))
    seed = torch.zeros(2, dtype=torch.uint64)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, seed[0], torch.empty(0)


def _flash_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    _q: Any, _k: Any, _most_q: int, _most_k: int, dropout: float, causal: bool, *_seed: Any, **more: Any,
) -> Any:  # fmt: skip
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad, q, k, v, out, lse, dropout, causal, scale=more.get("scale"))


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, compute_log_sumexp: bool,
    dropout: float = 0.0, is_causal: bool = False, **more: Any,
) -> Any:  # fmt: skip
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, dropout, is_causal, attn_mask=bias, scale=more.get("scale"))
    return out, lse, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _efficient_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, _seed: Any, _offset: Any, dropout: float, _wanted: Any, causal: bool = False,
    **more: Any,
) -> Any:  # fmt: skip
    kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
    lse = lse[..., : q.shape[2]].contiguous()
    return (*kernel(grad, q, k, v, out, lse, dropout, causal, attn_mask=bias, scale=more.get("scale")), None)


def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: list[int], rstd: torch.Tensor, weight: torch.Tensor, wanted: list[bool]
) -> Any:
    normed, dims = x.float() * rstd.float(), tuple(range(-len(shape), 0))
    weighted = grad.float() * weight.float()
    dx = rstd.float() * (weighted - normed * (weighted * normed).mean(dims, keepdim=True))
    dw = (grad.float() * normed).reshape(-1, *shape).sum(0).to(weight.dtype) if wanted[1] else None
    return dx.to(x.dtype) if wanted[0] else None, dw


# Operations that the CPU has under another name, or not at all.
OTHERWISE: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention": _flash,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention": _efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_fused_rms_norm_backward": _rms_norm_backward,
}
