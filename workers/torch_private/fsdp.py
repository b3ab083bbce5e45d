"""State of FSDP2, for weight gradients that follow after backward.

Used API: `FSDPState._fsdp_param_groups`, `post_backward`, and `_root_post_backward_final_callback`, as in torch's
pipelining (`stage.py`); unreduced gradients; `alloc_storage` and `free_storage`.
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
    """Run the FSDP2 actions at the end of a backward of all units."""
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    for inside in state._state_ctx.all_states:
        for group in inside._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def iter_unsharded_gradients(root: nn.Module) -> Iterator[torch.Tensor]:
    """Yield gradients that wait for their reduction, as computed and as accumulated."""
    state: Any = fully_shard.state(root)  # type: ignore[attr-defined]
    for inside in state._state_ctx.all_states:
        for parameter in (p for group in inside._fsdp_param_groups for p in group.fsdp_params):
            whole = getattr(parameter, "_unsharded_param", None)  # missing before the first gather
            for gradient in (parameter.unsharded_accumulated_grad, None if whole is None else whole.grad):
                if gradient is not None:
                    yield gradient


@contextmanager
def watch_storage(on_change: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `on_change` for each tensor whose storage FSDP2 allocates or frees in place."""
    functions = [
        (module, name) for module in (_fsdp_param, _fsdp_param_group) for name in ("alloc_storage", "free_storage")
    ]
    before = [(module, name, getattr(module, name)) for module, name in functions if hasattr(module, name)]

    def wrap(change: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        def changed(tensor: torch.Tensor) -> None:
            change(tensor)
            on_change(tensor)

        return changed

    try:
        for module, name, change in before:
            setattr(module, name, wrap(change))
        yield
    finally:
        for module, name, change in before:
            setattr(module, name, change)
