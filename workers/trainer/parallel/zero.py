"""ZeRO stages 1 to 3 (1910.02054, section 5), plain or hybrid (HSDP), as settings of FSDP2.

Stage 1 keeps whole gradients until the last micro-batch, then does one reduce-scatter and one all-gather per step.
Stage 2 does a reduce-scatter per micro-batch, and one all-gather per step.
Stage 3 also frees parameters after use: two all-gathers and one reduce-scatter per micro-batch. With a pipeline,
parameters can stay gathered while a rank works on one chunk.
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
from workers.trainer.parallel.data_parallel import DataParallel


class ZeroDataParallel(DataParallel):
    """Configure the FSDP2 roots of this rank's chunks for a ZeRO stage.

    With `keeps_gathered`, stage 3 frees the parameters of a chunk when the rank switches chunks.
    """

    def __init__(self, roots: list[FSDPModule], stage: int, *, keeps_gathered: bool = False) -> None:
        self._roots, self._stage, self._keeps_gathered = roots, stage, keeps_gathered
        self._frees_each = stage == 3 and not keeps_gathered
        for root in roots:
            _set_backward_prefetch(root, stage)

    def before_backward(self, chunk: int, *, last: bool, split: bool) -> None:
        reduces = not split and (last or self._stage >= 2)
        self._configure(self._roots[chunk], last=last and not split, reduces=reduces, frees=last or self._frees_each)

    def after_weight_gradients(self, chunk: int, parameters: list[torch.Tensor], *, last: bool) -> None:
        root = self._roots[chunk]
        self._configure(root, last=last, reduces=last or self._stage >= 2, frees=last or self._frees_each)
        finish_backward(root)  # Without a reduction, this accumulates the gradients in the reduction dtype.

    def after_chunk(self, chunk: int) -> None:
        if self._keeps_gathered:
            _free_gathered(self._roots[chunk])

    def after_eval(self) -> None:
        # In stages 1 and 2 the gathered parameters would stay, and the next step would use old values.
        for root in self._roots:
            _free_gathered(root)

    def _configure(self, root: FSDPModule, *, last: bool, reduces: bool, frees: bool) -> None:
        root.set_is_last_backward(last)
        root.set_requires_gradient_sync(reduces)
        root.set_requires_all_reduce(last)
        root.set_reshard_after_backward(frees)


def _free_gathered(root: FSDPModule) -> None:
    """Free the gathered parameters of a chunk, and keep its shards."""
    for module in get_fsdp_units(root):
        module.reshard()


def get_fsdp_units(root: FSDPModule) -> list[FSDPModule]:
    """Return all FSDP2 units below a root, starting with the root."""
    assert isinstance(root, nn.Module)
    return [m for m in root.modules() if isinstance(m, FSDPModule)]


def _set_backward_prefetch(root: FSDPModule, stage: int) -> None:
    """Set the units that backward prefetches.

    FSDP2 infers the order from forwards, including forwards of validations, and may gather a finished unit. Stages 1
    and 2 need no prefetch. Stage 3 prefetches the next unit in backward: a layer, its experts, the previous layer.
    """
    layers: list[list[FSDPModule]] = []
    for unit in get_fsdp_units(root)[1:]:
        if not (layers and unit in layers[-1]):
            layers.append(get_fsdp_units(unit))
    units = [root, *(unit for layer in reversed(layers) for unit in layer)]
    for unit, following in zip(units, [*units[1:], units[-1]], strict=True):
        unit.set_modules_to_backward_prefetch([following if stage == 3 else unit])


def shard_module(
    module: nn.Module,
    shards: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None,
    device: torch.device,
    *,
    frees: bool,
    compute: torch.dtype,
    reduced: torch.dtype,
    ignored: set[nn.Parameter],
) -> FSDPModule:
    """Shard one FSDP2 unit over `shards`, with HSDP replicas in `replicas`. Gradients are summed.

    Args:
        frees: free parameters after each forward.
        ignored: parameters that this unit leaves whole.
    """

    def get_shard(parameter: nn.Parameter) -> Shard:
        found = get_zero_shard(tuple(parameter.shape), shards.size())
        return Shard(found.dim if found else 0)

    policy = MixedPrecisionPolicy()
    if compute != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduced)
    fully_shard(
        module,
        mesh=_mesh(shards, replicas, device),
        reshard_after_forward=frees,
        shard_placement_fn=get_shard,
        mp_policy=policy,
        ignored_params=ignored,
    )
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    # gloo does not support the pre-multiplied sum that FSDP2 uses for a factor.
    module.set_force_sum_reduction_for_comms(True)
    return module


def _mesh(shards: dist.ProcessGroup, replicas: dist.ProcessGroup | None, device: torch.device) -> DeviceMesh:
    if replicas is None:
        return DeviceMesh.from_group(shards, device.type, mesh_dim_names=("dp",))
    inner, outer = dist.get_process_group_ranks(shards), dist.get_process_group_ranks(replicas)
    rows = [[rank + other - dist.get_rank() for rank in inner] for other in outer]
    return DeviceMesh.from_group([replicas, shards], device.type, torch.tensor(rows), mesh_dim_names=("replicas", "dp"))
