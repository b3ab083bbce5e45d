"""What torch imports when it is first needed: hundreds of modules, tens of MiB of a process that are not training's.

An AdamW that does not import torch's compiler.

torch's own keeps each step, and the making of it, out of compiled code, and imports the compiler to do so: most of a
second of each rank's start, for nothing where nothing compiles an optimizer. Here the same functions, unwrapped.

Relied on: functools alone wraps these methods, and what wraps `step` does nothing else than to forbid gradients.
"""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer

# ruff: noqa: F401 - imported to be there


def load_for_given_gradients() -> None:
    """`torch.autograd.backward` with gradients compares their shapes by sympy, symbols or not."""
    import torch.fx.experimental.symbolic_shapes


def load_for_hidden_operations() -> None:
    """FSDP2's hooks and a custom operator's gradients are kept out of compiled code, by asking the compiler."""
    import torch._dynamo


def load_compiler() -> None:
    """`torch.compile` and Inductor."""
    import torch._dynamo
    import torch._inductor.compile_fx


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW, never compiled."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = torch.no_grad()(inspect.unwrap(Optimizer.load_state_dict))
