"""The process group that counts. The one room for torch's private distributed API; checked on torch 2.13.0.

A Python subclass of `torch.distributed.ProcessGroup`, made by a registered backend, stands where the real group
would: direct calls, DDP's C++ reducer, FSDP2, DTensor and pipelining all reach it. Overriding the c10d dispatcher
instead deadlocks (the kernel would hold the GIL that gloo's thread wants).
`tests/workers/meter` fails when torch gains a collective this module does not know.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from contracts.telemetry import Op
from planner.spec import Device
from workers.meter.recorder import Recorder, Ticket

BACKEND = "metered"

Tensors = torch.Tensor | Iterable["Tensors"]


def metered_backend(recorder: Recorder, device: Device) -> str:
    """Register the counting backend over gloo (cpu) or nccl (cuda).

    Returns the name for `init_process_group(backend=...)`. Groups made later, by `new_group` or a mesh, count too.
    """

    def create(options: Any, _backend_options: object) -> dist.ProcessGroup:
        return MeteredGroup(_real_group(options, device), options, recorder, device)

    # Registering a name twice raises; a second recorder in one process replaces the first.
    for names in (dist.Backend.backend_list, dist.Backend.backend_capability):
        with contextlib.suppress(ValueError, KeyError):
            names.remove(BACKEND) if isinstance(names, list) else names.pop(BACKEND)
    with contextlib.suppress(AttributeError):
        delattr(dist.Backend, BACKEND.upper())
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=[device])
    return BACKEND


def _real_group(options: Any, device: Device) -> dist.ProcessGroup:
    """What torch itself would have made: a ProcessGroup over one gloo or nccl backend."""
    group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    kind: Any
    backend: Any
    if device == "cpu":
        kind = dist.ProcessGroup.BackendType.GLOO
        backend = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    else:
        kind = dist.ProcessGroup.BackendType.NCCL
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = options.timeout
        nccl.global_ranks_in_group = options.global_ranks_in_group
        nccl.group_name = options.group_id
        backend = dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, nccl)
        backend._enable_collectives_timing()
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kind)
    group._set_group_name(options.group_id)
    return group


def _bytes(tensors: Tensors) -> int:
    """Bytes of a tensor, or of all tensors in nested lists."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(t) for t in tensors)


Payload = Callable[["MeteredGroup", tuple[Any, ...]], int]


def _first(_group: MeteredGroup, args: tuple[Any, ...]) -> int:
    return _bytes(args[0])


def _second(_group: MeteredGroup, args: tuple[Any, ...]) -> int:
    return _bytes(args[1])


def _gathered(group: MeteredGroup, args: tuple[Any, ...]) -> int:
    return _bytes(args[1]) * group.size()


def _scattered(group: MeteredGroup, args: tuple[Any, ...]) -> int:
    return _bytes(args[0]) * group.size()


def _nothing(_group: MeteredGroup, _args: tuple[Any, ...]) -> int:
    return 0


# Method of ProcessGroup -> (op, which argument is the payload). Outputs come before inputs.
METERED: dict[str, tuple[Op, Payload]] = {
    "allreduce": ("all_reduce", _first),
    "allreduce_coalesced": ("all_reduce", _first),
    "allgather": ("all_gather", _first),
    "allgather_coalesced": ("all_gather", _gathered),
    "_allgather_base": ("all_gather", _first),
    "all_gather_single": ("all_gather", _first),
    "all_gather_single_coalesced": ("all_gather", _first),
    "allgather_into_tensor_coalesced": ("all_gather", _first),
    "reduce_scatter": ("reduce_scatter", _second),
    "_reduce_scatter_base": ("reduce_scatter", _second),
    "reduce_scatter_single": ("reduce_scatter", _second),
    "reduce_scatter_single_coalesced": ("reduce_scatter", _second),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _second),
    "alltoall": ("all_to_all", _second),
    "alltoall_base": ("all_to_all", _second),
    "all_to_all_single": ("all_to_all", _second),
    "broadcast": ("broadcast", _first),
    "reduce": ("reduce", _first),
    "gather": ("gather", _gathered),
    "scatter": ("scatter", _scattered),
    "send": ("send", _first),
    "recv": ("recv", _first),
    "recv_anysource": ("recv", _first),
    "barrier": ("barrier", _nothing),
}


class MeteredGroup(dist.ProcessGroup):
    """Counts each call, hands it to the real group, and times it when its future is done."""

    def __init__(self, inner: dist.ProcessGroup, options: Any, recorder: Recorder, device: Device) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._inner = inner
        self._recorder = recorder
        self._name = options.group_id
        self._timer = NcclTimer(recorder) if device == "cuda" else None
        kind: Any = inner._get_backend(torch.device(device))
        self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, kind)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def getBackendName(self) -> str:  # noqa: N802 - the name torch calls
        return BACKEND

    def abort(self) -> None:
        self._inner.abort()

    def shutdown(self) -> None:
        if self._timer is not None:
            self._timer.close()
        self._inner.shutdown()

    def set_timeout(self, timeout: Any) -> None:
        self._inner.set_timeout(timeout)

    def _call(self, method: str, op: Op, payload: Payload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ticket = self._recorder.issued(op, self._name, self.size(), payload(self, args))
        work = getattr(self._inner, method)(*args, **kwargs)
        if self._timer is not None:
            self._timer.watch(work, ticket)
            return work
        try:
            future = work.get_future()
        except RuntimeError:
            return WaitedWork(work, lambda: self._recorder.completed(ticket))
        future.add_done_callback(lambda _future: self._recorder.completed(ticket))
        return work


class WaitedWork(dist.Work):
    """A work without a future (gloo's reduce-scatter finishes inside `wait`): timed when it was waited for."""

    def __init__(self, inner: Any, completed: Callable[[], None]) -> None:
        super().__init__()
        self._inner = inner
        self._completed: Callable[[], None] | None = completed

    def wait(self, *args: Any) -> bool:
        done: bool = self._inner.wait(*args)
        if self._completed is not None:
            self._completed()
            self._completed = None
        return done

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())


def _forward(method: str, op: Op, payload: Payload) -> Callable[..., Any]:
    def call(self: MeteredGroup, *args: Any, **kwargs: Any) -> Any:
        return self._call(method, op, payload, args, kwargs)

    call.__name__ = method
    return call


for _method, (_op, _payload) in METERED.items():
    setattr(MeteredGroup, _method, _forward(_method, _op, _payload))


class NcclTimer:
    """Reads NCCL's own event times once a collective is done, without synchronising the device."""

    POLL_S = 0.005

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pending: queue.SimpleQueue[tuple[Any, Ticket] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        threading.Thread(target=self._poll, name="nccl-timer", daemon=True).start()

    def watch(self, work: Any, ticket: Ticket) -> None:
        self._pending.put((work, ticket))

    def close(self) -> None:
        self._stopped.set()
        self._pending.put(None)

    def _poll(self) -> None:
        while (entry := self._pending.get()) is not None:
            work, ticket = entry
            while not work.is_completed():
                if self._stopped.wait(self.POLL_S):
                    return
            self._recorder.completed(ticket, work._get_duration() / 1e3)
