"""ZeRO stages 1 to 3 (1910.02054 section 5), plain or hybrid (HSDP), as settings of FSDP2.

1: gradients stay whole until the last micro-batch, one reduce-scatter and one all-gather a step.
2: a reduce-scatter each micro-batch, so only shards of gradients stay; one all-gather a step.
3: parameters are freed after use too: two all-gathers and one reduce-scatter each micro-batch. Under a pipe they may
   stay gathered while a rank works on one chunk: an all-gather for each time that it turns to it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from planner.facts.placements import get_zero_shard
from workers.torch_private.fsdp import finish_backward
from workers.trainer.parallel.data_parallel import NoDataParallel


class Zero(NoDataParallel):
    """The FSDP2 roots of this rank's chunks, under one stage. `keeps`: stage 3 frees a chunk when it is left."""

    def __init__(self, roots: list[FSDPModule], stage: int, *, keeps: bool = False) -> None:
        self._roots, self._stage, self._keeps = roots, stage, keeps
        self._frees_each = stage == 3 and not keeps
        for root in roots:
            _say_what_backward_gathers_next(root, stage)

    def before_backward(self, chunk: int, *, last: bool, split: bool) -> None:
        reduces = not split and (last or self._stage >= 2)
        self._set(self._roots[chunk], last=last and not split, reduces=reduces, frees=last or self._frees_each)

    def weights_added(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None:
        root = self._roots[chunk]
        self._set(root, last=last, reduces=last or self._stage >= 2, frees=last or self._frees_each)
        finish_backward(root)  # unless it reduces, this adds them up in the type that they are reduced in

    def after_chunk(self, chunk: int) -> None:
        if self._keeps:
            _free(self._roots[chunk])

    def after_eval(self) -> None:
        # Nothing freed the gathered parameters of stages 1 and 2, and the next step must not find old ones.
        for root in self._roots:
            _free(root)

    def _set(self, root: FSDPModule, *, last: bool, reduces: bool, frees: bool) -> None:
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(reduces)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(frees)


def _free(root: FSDPModule) -> None:
    """Let go of what is gathered of a chunk; its shards stay."""
    for module in units_of(root):
        module.reshard()


def units_of(root: FSDPModule) -> list[FSDPModule]:
    """Every unit below a root, itself first."""
    assert isinstance(root, nn.Module)
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


def _say_what_backward_gathers_next(root: FSDPModule, stage: int) -> None:
    """FSDP2 guesses the next unit of backward from the forwards it saw, those of a validation too, and may gather one
    that is done. Stages 1 and 2 need nothing gathered ahead, 3 what backward comes to next: a layer, its experts where
    they are a unit, the layer before."""
    layers: list[list[FSDPModule]] = []
    for unit in units_of(root)[1:]:
        if not (layers and unit in layers[-1]):
            layers.append(units_of(unit))
    units = [root, *(unit for layer in reversed(layers) for unit in layer)]
    for unit, following in zip(units, [*units[1:], units[-1]], strict=True):
        unit.set_modules_to_backward_prefetch([following if stage == 3 else unit])


def shard(
    module: nn.Module,
    shards: dist.ProcessGroup,
    copies: dist.ProcessGroup | None,
    device: torch.device,
    *,
    frees: bool,
    compute: torch.dtype,
    reduced: torch.dtype,
    besides: set[nn.Parameter],
) -> FSDPModule:
    """Let FSDP2 shard one unit over `shards`, and keep `copies` of each shard alike. Sums gradients, undivided.

    `frees`: parameters are freed after each forward. Those in `besides`, which another unit or nobody shards, stay
    whole.
    """
    policy = MixedPrecisionPolicy()
    if compute != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced)
    fully_shard(
        module,
        mesh=_mesh(shards, copies, device),
        reshard_after_forward=frees,
        shard_placement_fn=lambda parameter: _shard_of(parameter, shards.size()),
        mp_policy=policy,
        ignored_params=besides,
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    # gloo lacks the pre-multiplied sum that FSDP2 would use for a factor.
    module.set_force_sum_reduction_for_comms(True)
    return module


def _shard_of(parameter: nn.Parameter, degree: int) -> Shard:
    found = get_zero_shard(tuple(parameter.shape), degree)
    return Shard(found.dim if found else 0)


def _mesh(shards: dist.ProcessGroup, copies: dist.ProcessGroup | None, device: torch.device) -> DeviceMesh:
    if copies is None:
        return DeviceMesh.from_group(shards, device.type, mesh_dim_names=("dp",))
    inner, outer = dist.get_process_group_ranks(shards), dist.get_process_group_ranks(copies)
    rows = [[rank + other - dist.get_rank() for rank in inner] for other in outer]
    return DeviceMesh.from_group([copies, shards], device.type, torch.tensor(rows), mesh_dim_names=("copies", "dp"))
