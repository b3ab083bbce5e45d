"""The device that a rank computes on, and what its maker calls it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def get_local_device(kind: str) -> torch.device:
    """This rank's of its host: the processor, or the GPU whose number torchrun gave it, made the current one."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def get_device_name(device: torch.device) -> str:
    """Its maker's name of it; of a processor that has none, its architecture."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def barrier(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """A barrier. NCCL's runs on a GPU, which torch would otherwise guess from the rank: wrong where hosts differ."""
    dist.barrier(group, device_ids=None if device.index is None else [device.index])


class SideStream:
    """Lets what is asked for wait for what was computed until some moment, and not for what came since.

    On a CPU what was asked for before is over, and there are no moments.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record_event(self) -> torch.cuda.Event | None:
        """Now, on the computing stream."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    @contextmanager
    def after(self, moment: torch.cuda.Event | None) -> Iterator[None]:
        """Inside, what is asked for waits for the moment alone."""
        if self._stream is None or moment is None:
            yield
            return
        self._stream.wait_event(moment)
        with torch.cuda.stream(self._stream):
            yield
