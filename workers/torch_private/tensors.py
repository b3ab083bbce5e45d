"""Fake tensors, dispatch modes, and storage keys."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ATTENTION", "ATTENTION_BACKWARD", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "storage_key"]

ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that all tensors of a live storage share, including storages without memory."""
    return cast(int, storage._cdata)
