"""Groups that count what passes and send nothing: any rank of any world in one process.

Checked on torch 2.13.0: `FakeProcessGroup`, torch's own stand-in for a backend, answers what is not a collective.
tests/workers/test_dry_run.py fails when it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from contracts.telemetry import Op
from workers.meter.group import Carried, MeteredGroup
from workers.meter.recorder import Recorder


class Done(dist.Work):
    """Work that was over when it began."""

    def __init__(self) -> None:
        super().__init__()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class DryGroup(MeteredGroup):
    """Records each call; outputs keep whatever they hold."""

    def _run(self, method: str, op: Op, carried: Carried, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._issue(op, carried)()
        return Done()


def dry_world(recorder: Recorder, rank: int, world_size: int) -> None:
    """Make this process rank `rank` of `world_size` that are not there."""
    name = f"dry_{len(dist.Backend.backend_list)}"

    def create(options: Any, backend_options: Any) -> MeteredGroup:
        return DryGroup(_stand_in(options), options.group_id, recorder, [torch.device("cpu")])

    dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    dist.init_process_group(name, store=FakeStore(), rank=rank, world_size=world_size)


def _stand_in(options: Any) -> Any:
    backend = FakeProcessGroup._create_internal(options.group_rank, options.group_size)
    group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    kind = c10d.Backend.backend_type_map["gloo"]
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)
    return group
