"""Control when torch imports its compiler, which takes almost a second and tens of MiB.

`torch.optim.AdamW` imports the compiler to exclude its steps from compiled code. `AdamW` here unwraps the methods. This
relies on functools wrappers, and on a wrapper of `step` that only disables gradients.
"""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer

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
