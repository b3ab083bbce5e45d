"""Device of a rank, and operations that depend on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def get_local_device(kind: str) -> torch.device:
    """Return the CPU, or the GPU with this rank's LOCAL_RANK, which becomes the current device."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def get_device_name(device: torch.device) -> str:
    """Return the product name of a device, or the architecture of a CPU without a name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def barrier(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Run a barrier on `device`. Torch would guess a GPU from the rank, which is wrong if hosts differ."""
    dist.barrier(group, device_ids=None if device.index is None else [device.index])


def synchronize(device: torch.device) -> None:
    """Wait for all kernels on a GPU. No effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class SideStream:
    """Stream whose kernels wait for an event of the compute stream, and not for later kernels.

    No effect on a CPU, where all calls are synchronous.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record_event(self) -> torch.cuda.Event | None:
        """Record an event on the compute stream."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    @contextmanager
    def after(self, event: torch.cuda.Event | None) -> Iterator[None]:
        """Issue kernels on this stream after the event."""
        if self._stream is None or event is None:
            yield
            return
        self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            yield
