"""Fake tensors, dispatch modes, storage keys, and control over when torch imports its compiler.

Importing the compiler takes almost a second and tens of MiB. `torch.optim.AdamW` imports it to exclude its steps from
compiled code. `AdamW` here unwraps the methods. This relies on functools wrappers, and on a wrapper of `step` that only
disables gradients.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# ruff: noqa: F401 - imported for their side effects


def load_symbolic_shapes() -> None:
    """Import sympy, which `torch.autograd.backward` uses to compare shapes of gradients."""
    import torch.fx.experimental.symbolic_shapes


def load_dynamo() -> None:
    """Import Dynamo, which FSDP2 hooks and custom operators use."""
    import torch._dynamo


def load_compiler() -> None:
    """Import `torch.compile` and Inductor."""
    import torch._dynamo
    import torch._inductor.compile_fx


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW that is never compiled."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = torch.no_grad()(inspect.unwrap(Optimizer.load_state_dict))


__all__ = ["ATTENTION", "ATTENTION_BACKWARD", "FakeTensor", "FakeTensorMode", "TorchDispatchMode", "storage_key"]


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a key that all tensors of a live storage share, including storages without memory."""
    return cast(int, storage._cdata)
