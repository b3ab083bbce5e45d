"""Groups that count what passes and send nothing: any rank of any world in one process."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from contracts.telemetry.vocabulary import Op
from planner.facts.resources import Device
from workers.meter.group import Carried, MeteredGroup
from workers.meter.recorder import Recorder
from workers.torch_private.groups import fake_store, stand_in_group

STAGED = ("all_gather", "reduce_scatter")  # gloo gathers and scatters by way of a copy of the whole (torch 2.13)


class Done(dist.Work):
    """Work that was over when it began. As a real one it holds its tensors until it is waited for."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return True


class DryGroup(MeteredGroup):
    """Records each call; outputs keep whatever they hold. `stages`: it takes what gloo takes for a copy."""

    stages = False

    def _run(
        self, method: str, op: Op, carried: Carried, args: Sequence[Any], kwargs: dict[str, Any], poller: object
    ) -> Any:
        self._issue(op, carried)()
        staged = [torch.empty(carried.payload_bytes, dtype=torch.uint8)] if self.stages and op in STAGED else []
        return Done((*args, *staged))


def dry_world(recorder: Recorder, rank: int, world_size: int, device: Device) -> None:
    """Make this process rank `rank` of `world_size` that are not there, each with a `device`."""
    name = f"dry_{len(dist.Backend.backend_list)}"

    def create(options: Any, backend_options: Any) -> MeteredGroup:
        ranks = options.global_ranks_in_group or range(options.group_size)
        group = DryGroup(stand_in_group(options), options.group_id, recorder, [torch.device("cpu")], ranks)
        group.stages = device == "cpu"
        return group

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    dist.init_process_group(name, store=fake_store(), rank=rank, world_size=world_size)
