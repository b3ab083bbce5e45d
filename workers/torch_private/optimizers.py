"""An AdamW that does not import torch's compiler.

torch's own keeps each step, and the making of it, out of compiled code, and imports the compiler to do so: most of a
second of each rank's start, for nothing where nothing compiles an optimizer. Here the same functions, unwrapped.

Relied on: functools alone wraps these methods, and what wraps `step` does nothing else than to forbid gradients.
"""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW, never compiled."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = torch.no_grad()(inspect.unwrap(Optimizer.load_state_dict))
