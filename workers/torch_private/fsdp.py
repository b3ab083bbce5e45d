"""FSDP2's state: its hooks know nothing of weight gradients that come after backward.

`FSDPState._fsdp_param_groups`, their `post_backward`, and `_root_post_backward_final_callback` as torch's own
pipelining calls them (`stage.py`); gradients of their parameters that are not reduced yet; `alloc_storage` and
`free_storage`, by which units come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group


def finish_backward(root: FSDPModule) -> None:
    """Do now what FSDP2 does when a backward of all units has ended."""
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    for inside in state._state_ctx.all_states:
        for group in inside._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def whole_gradients(root: nn.Module) -> Iterator[torch.Tensor]:
    """Those of its units that wait to be reduced: as they came, and summed in the type they are reduced in."""
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    for inside in state._state_ctx.all_states:
        for parameter in (p for group in inside._fsdp_param_groups for p in group.fsdp_params):
            whole = getattr(parameter, "_unsharded_param", None)  # none before the first gather
            for gradient in (parameter.unsharded_accumulated_grad, None if whole is None else whole.grad):
                if gradient is not None:
                    yield gradient


@contextmanager
def storage_changes(told: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Inside, `told` hears of each tensor whose storage FSDP2 fills or frees in place."""
    rooms = [
        (module, name) for module in (_fsdp_param, _fsdp_param_group) for name in ("alloc_storage", "free_storage")
    ]
    before = [(module, name, getattr(module, name)) for module, name in rooms if hasattr(module, name)]

    def telling(change: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def changed(tensor: torch.Tensor) -> None:
            change(tensor)
            told(tensor)

        return changed

    try:
        for module, name, change in before:
            setattr(module, name, telling(change))
        yield
    finally:
        for module, name, change in before:
            setattr(module, name, change)
