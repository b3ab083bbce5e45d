"""Run one rank of a training job with failing stages: FAULTS is {stage: [rank, step of the checkpoint]}."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.workers.checkpoint.rank import main as main
from workers.checkpoint import folder, manager
from workers.checkpoint import folder as manifest
from workers.checkpoint.state import BoxSavePlanner

FAULTS: dict[str, tuple[int, int]] = json.loads(os.environ["FAULTS"])
PLACES: dict[str, tuple[Any, str]] = {
    "room": (manager, "_allocate_copy"),
    "prepare": (manager, "_create_draft"),
    "plan": (BoxSavePlanner, "create_local_plan"),
    "write": (FileSystemWriter, "write_data"),
    "metadata": (FileSystemWriter, "finish"),
    "describe": (folder, "describe_files"),
    "rename": (folder, "publish"),
    "manifest": (manifest, "read_manifest"),
    "check": (folder, "find_damage"),
}
now = {"step": 0}


def failing(stage: str, work: Any) -> Any:
    def fails(*args: Any, **kwargs: Any) -> Any:
        if [int(os.environ["RANK"]), now["step"]] == FAULTS.get(stage):
            raise OSError(errno.ENOSPC, "No space left on device", f"/{stage}")
        return work(*args, **kwargs)

    return fails


for stage, (owner, name) in PLACES.items():
    setattr(owner, name, failing(stage, getattr(owner, name)))

write = manager.Saver._write


def writing(self: manager.Saver, step: int, *args: Any) -> None:
    now["step"] = step
    write(self, step, *args)


manager.Saver._write = writing  # type: ignore[method-assign]
