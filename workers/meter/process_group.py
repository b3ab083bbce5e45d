"""A process group that counts its collectives.

tests/workers/meter/test_process_group.py fails when the set of torch's methods changes.

The creator of a backend may return a `ProcessGroup`, which torch then uses directly. `MeteredProcessGroup` wraps a
native group over the real backend. Calls from Python and, through pybind's trampolines, from C++ (DDP's reducer,
functional collectives) arrive at its methods. The trampolines lack some methods: C++ code that calls `_allgather_base`
itself (Inductor's `all_gather_into_tensor_out`) is not seen. No method is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from contracts.telemetry.items import Axis, Op
from workers.meter.collectives import Collective
from workers.meter.recorder import AXES, Recorder
from workers.meter.work import (
    MeteredNcclWork,
    MeteredWork,
    NcclPoller,
    create_timing_event,
    on_side_stream,
    time_wait,
)
from workers.torch_private.groups import (
    NATIVE,
    GroupName,
    Store,
    WrappedGroup,
    batch_p2p,
    get_sparse_bytes,
    make_native_group,
    skip_dynamo,
)

# method: (op, index of the positional argument with the payload, payload times group size).
# The payload is the full (gathered) buffer. Each rank holds it for all_gather (output) and reduce_scatter (input). Only
# the root holds it for gather and scatter, so it is counted as the buffer of one rank times the group size.
COLLECTIVES: dict[str, tuple[Op, int, bool]] = {
    "allreduce": ("all_reduce", 0, False),
    "allreduce_coalesced": ("all_reduce", 0, False),
    "allgather": ("all_gather", 0, False),
    "allgather_coalesced": ("all_gather", 0, False),
    "_allgather_base": ("all_gather", 0, False),
    "all_gather_single": ("all_gather", 0, False),
    "all_gather_single_coalesced": ("all_gather", 0, False),
    "allgather_into_tensor_coalesced": ("all_gather", 0, False),
    "reduce_scatter": ("reduce_scatter", 1, False),
    "_reduce_scatter_base": ("reduce_scatter", 1, False),
    "reduce_scatter_single": ("reduce_scatter", 1, False),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1, False),
    "alltoall": ("all_to_all", 1, False),
    "alltoall_base": ("all_to_all", 1, False),
    "all_to_all_single": ("all_to_all", 1, False),
    "broadcast": ("broadcast", 0, False),
    "reduce": ("reduce", 0, False),
    "gather": ("gather", 1, True),
    "scatter": ("scatter", 0, True),
    "send": ("send", 0, False),
    "recv": ("recv", 0, False),
    "recv_anysource": ("recv", 0, False),
}
# Collectives without a tensor, which have no payload.
BARRIERS = ("barrier", "monitored_barrier")


def register_metered_backend(recorder: Recorder, device: str) -> str:
    """Register a counting backend over gloo ("cpu") or NCCL ("cuda"), and return its name.

    Pass the name to `init_process_group`. Later groups and meshes without an explicit backend are counted too. The
    group of a named mesh axis is labeled with the axis. A mesh axis of world size uses the default group, which the
    caller labels.
    """
    if device not in NATIVE:
        raise ValueError(f"device is {device!r}, expected one of {sorted(NATIVE)}")
    if device == "cuda" and not dist.is_nccl_available():
        raise RuntimeError(f"GPUs need NCCL, but torch {torch.__version__} is a build without NCCL.")
    name = f"metered_{NATIVE[device]}"
    if name in dist.Backend.backend_list:  # a second recorder in this process; existing groups keep their recorder
        name += f"_{len(dist.Backend.backend_list)}"

    def create(options: Any, backend_options: Any) -> MeteredProcessGroup:
        native = make_native_group(options, backend_options, device)
        ranks = options.global_ranks_in_group or range(options.group_size)  # torch passes no ranks for the world
        return MeteredProcessGroup(native, options.group_id, recorder, [torch.device(device)], ranks)

    dist.Backend.register_backend(name, create, extended_api=True, devices=[device])
    if device == "cuda":
        patch_batch_isend_irecv()
    return name


class CollectiveBytes(NamedTuple):
    """Bytes of one call. `sent_bytes` is set if the caller specifies the splits, `peer` for sends and receives.

    `dtype` is set if all ranks must use this type and size. `root` is a rank of the group, or -1.
    """

    payload_bytes: int
    sent_bytes: int | None = None
    peer: int | None = None
    dtype: torch.dtype | None = None
    root: int = -1


class MeteredProcessGroup(WrappedGroup):
    """Process group that forwards each collective to a native group, and records it."""

    def __init__(
        self, native: Any, name: str, recorder: Recorder, devices: Sequence[torch.device], ranks: Sequence[int]
    ) -> None:
        """Wrap `native`, whose members have the global ranks `ranks`."""
        super().__init__(native, devices)
        self._recorder = recorder
        self._group_size: int = native.size()
        self._name = name
        self._methods_without_future: set[str] = set()
        self._coalesced: list[Collective] | None = None
        self._coalesced_start: Any = None  # event before a synchronous batch
        self._poller: NcclPoller | None = None
        if self.is_nccl:
            self._poller = NcclPoller()
            recorder.add_poller(self._poller.poll)
        self._state = recorder.add_group(name, ranks, on_device=self.is_nccl)

    def named(self, name: GroupName) -> None:
        self._recorder.groups.rename(self._state, name)
        self._name = name

    def described(self, words: str) -> None:
        axis = words.removeprefix("mesh_")
        if axis != words and axis in AXES:
            self._recorder.label_group(self._name, cast(Axis, axis))

    def get_group_store(self) -> Store:
        """Return the rendezvous store of this group."""
        return cast(Store, self.native.get_group_store())

    @skip_dynamo
    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Run gloo's blocking barrier, which reports missing ranks."""
        collective = self._recorder.issue("barrier", self._name, self._group_size, 0)
        try:
            time_wait(collective, collective.started_s, self.native.monitored_barrier, *args, **kwargs)
        finally:
            collective.abandon()  # after an error

    def begin_batch(self) -> None:
        self._coalesced = []

    def end_batch(self, work: Any) -> Any:
        collectives, self._coalesced = self._coalesced or [], None
        start, self._coalesced_start = self._coalesced_start, None
        if self._poller is None or not collectives:
            return work
        # A wait for the batch is counted once, on a collective that counts as in flight, which a receive does not.
        waited = next((collective for collective in collectives if collective.key[1] != "recv"), collectives[0])
        if work is not None:
            self._poller.watch_work(work, collectives)
            return MeteredNcclWork(work, waited, self._poller)
        if start is not None:  # the batch ran on the current stream
            end = create_timing_event()
            end.record()
            for collective in collectives:
                blocks_compute = collective is waited and not on_side_stream()
                self._poller.watch_events(start, end, collective, blocks_compute=blocks_compute)
        return None

    def _run(
        self,
        method: str,
        op: Op,
        sizes: CollectiveBytes,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        poller: NcclPoller | None,
    ) -> Any:
        """Issue a collective, and arrange that its end is recorded without an extra wait.

        Args:
            poller: None if gloo carries the collective.
        """
        is_async = _is_async(args, kwargs)
        if poller is not None and self._coalesced is None and not is_async:
            start, end = create_timing_event(), create_timing_event()
            start.record()
            collective, work = self._call(method, op, sizes, args, kwargs)
            end.record()
            poller.watch_events(start, end, collective, blocks_compute=not on_side_stream())
            return work
        if self._coalesced is not None and self._coalesced_start is None and self._poller is not None and not is_async:
            self._coalesced_start = create_timing_event()
            self._coalesced_start.record()
        collective, work = self._call(method, op, sizes, args, kwargs)
        if self._coalesced is not None:  # ends with the whole batch
            self._coalesced.append(collective)
            return work
        if poller is not None:
            poller.watch_work(work, [collective])
            return MeteredNcclWork(work, collective, poller)
        # A synchronous caller waits at once. A callback would only take the GIL in gloo's thread.
        has_callback = is_async and method not in self._methods_without_future
        if has_callback:
            try:
                work.get_future().add_done_callback(collective)
            except RuntimeError:  # gloo has no future for some works
                self._methods_without_future.add(method)
                has_callback = False
        return MeteredWork(work, collective, is_sync=not is_async, has_callback=has_callback)

    def _call(
        self, method: str, op: Op, sizes: CollectiveBytes, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Collective, Any]:
        collective = self._issue(op, sizes)
        try:
            return collective, getattr(self.native, method)(*args, **kwargs)
        except BaseException:
            self._recorder.undo_issue(collective, sizes.sent_bytes)
            raise

    def _issue(self, op: Op, sizes: CollectiveBytes) -> Collective:
        return self._recorder.issue(op, self._name, self._group_size, *sizes)


def _build_method(method: str, op: Op, payload_index: int, times_size: bool) -> Callable[..., Any]:
    has_peer = method in ("send", "recv")  # not recv_anysource
    has_root = op in ("broadcast", "reduce", "gather", "scatter")

    def collective(self: MeteredProcessGroup, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values()) if kwargs else args
        buffers = values[payload_index]
        if op == "all_to_all":
            sizes = _measure_all_to_all(buffers, values[3] if method != "alltoall" else (), self.rank())
        else:
            num_bytes = _count_bytes(buffers) * (self._group_size if times_size else 1)
            root = getattr(values[-1], "rootRank", -1) if has_root else -1
            sizes = CollectiveBytes(num_bytes, None, values[1] if has_peer else None, _get_dtype(buffers), root)
        # In a group over both gloo and NCCL, the device of the tensor decides.
        poller = self._poller if self._poller is not None and _is_on_device(buffers) else None
        return self._run(method, op, sizes, args, kwargs, poller)

    collective.__name__ = method
    return collective


def _barrier(self: MeteredProcessGroup, *args: Any, **kwargs: Any) -> Any:
    return self._run("barrier", "barrier", CollectiveBytes(0), args, kwargs, self._poller)


for _method, _how in COLLECTIVES.items():
    setattr(MeteredProcessGroup, _method, skip_dynamo(_build_method(_method, *_how)))
setattr(MeteredProcessGroup, "barrier", skip_dynamo(_barrier))  # noqa: B010 - torch types it as overloads


def _measure_all_to_all(buffers: Any, splits: Sequence[int], rank: int) -> CollectiveBytes:
    """Return the bytes of an all-to-all.

    Args:
        buffers: One tensor per rank, or one tensor with rows per rank.
        splits: Rows per rank. Empty for equal shares.
    """
    if not isinstance(buffers, torch.Tensor):
        return CollectiveBytes(_count_bytes(buffers), _count_bytes(buffers) - _count_bytes(buffers[rank]))
    if not splits:
        return CollectiveBytes(buffers.nbytes)
    return CollectiveBytes(buffers.nbytes, buffers.nbytes - buffers[: splits[rank]].nbytes)


def _count_bytes(buffers: Any) -> int:
    """Return the bytes of a tensor, or of nested lists of tensors.

    A sparse tensor has the bytes of its indices and values. Torch refuses other layouts before.
    """
    if isinstance(buffers, torch.Tensor):
        return get_sparse_bytes(buffers) if buffers.is_sparse else buffers.nbytes
    return sum(map(_count_bytes, buffers))


def _get_dtype(buffers: Any) -> torch.dtype | None:
    """Return the type of the first tensor, or None for sparse tensors, whose size differs between ranks."""
    while not isinstance(buffers, torch.Tensor):
        if not buffers:
            return None
        buffers = buffers[0]
    return None if buffers.is_sparse else buffers.dtype


def _is_on_device(buffers: Any) -> bool:
    if isinstance(buffers, torch.Tensor):
        return buffers.device.type != "cpu"
    return any(map(_is_on_device, buffers))


def _is_async(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if the caller may continue before the end, as for all sends and receives."""
    options = kwargs.get("opts", args[-1] if args else None)
    return bool(getattr(options, "asyncOp", True))


def patch_batch_isend_irecv() -> None:
    """Let `batch_isend_irecv` coalesce the operations of a metered group, as NCCL requires.

    Torch checks `type(group) is ProcessGroup` and would otherwise issue them one by one. Two ranks that send to each
    other could then deadlock on NCCL.
    """
    original = c10d.batch_isend_irecv
    if getattr(original, "coalesces_metered", False):
        return

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = p2p_op_list[0].group or dist.group.WORLD
        if isinstance(group, MeteredProcessGroup) and group.batches(p2p_op_list[0].tensor.device):
            return batch_p2p(p2p_op_list, group)
        return original(p2p_op_list)

    batch_isend_irecv.coalesces_metered = True  # type: ignore[attr-defined]  # marks the replacement
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv
