"""A process group that counts what passes through it.

tests/workers/meter/test_torch_api.py fails when the set of torch's methods changes.

A backend's creator may return a `ProcessGroup`; torch then uses it in place of its own. Ours wraps a plain
group over the real backend. Calls from Python and, through pybind's trampolines, from C++ (DDP's reducer,
functional collectives) arrive at the methods below. The trampolines lack some methods: C++ code that calls
`_allgather_base` itself (Inductor's `all_gather_into_tensor_out`) is NOT seen. Nothing here is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from contracts.telemetry.vocabulary import Axis, Op
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
    native_group,
    never_compiled,
    sparse_bytes,
    together,
)

# method: (op, which positional argument is the payload, multiplied by the group's size).
# The payload is the FULL (gathered) buffer: each rank holds it for all_gather (output) and reduce_scatter
# (input); for gather and scatter only the root does, so it is counted as one rank's share times the size.
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
# Collectives without a tensor: counted with no payload.
BARRIERS = ("barrier", "monitored_barrier")


def register_metered_backend(recorder: Recorder, device: str) -> str:
    """Register a counting backend over gloo ("cpu") or NCCL ("cuda"); the name is for `init_process_group`.

    Groups and meshes made later without naming a backend are counted too. A group that a device mesh makes
    for a named axis is labelled with it; a mesh axis as large as the world IS the default group, so label that.
    """
    if device not in NATIVE:
        raise ValueError(f"device is {device!r}, expected one of {sorted(NATIVE)}")
    if device == "cuda" and not dist.is_nccl_available():
        raise RuntimeError(f"GPUs need NCCL, but torch {torch.__version__} is a build without NCCL.")
    name = f"metered_{NATIVE[device]}"
    if name in dist.Backend.backend_list:  # a second recorder in this process: groups keep the one they have
        name += f"_{len(dist.Backend.backend_list)}"

    def create(options: Any, backend_options: Any) -> MeteredProcessGroup:
        native = native_group(options, backend_options, device)
        ranks = options.global_ranks_in_group or range(options.group_size)  # torch tells none of the whole world
        return MeteredProcessGroup(native, options.group_id, recorder, [torch.device(device)], ranks)

    dist.Backend.register_backend(name, create, extended_api=True, devices=[device])
    if device == "cuda":
        patch_batch_isend_irecv()
    return name


class CollectiveBytes(NamedTuple):
    """Bytes that a caller handed over, and those that leave the rank where the caller says how many go to whom.

    `peer`: the rank in the group at the other end of a send or receive.
    """

    payload_bytes: int
    sent_bytes: int | None = None
    peer: int | None = None


class MeteredProcessGroup(WrappedGroup):
    """Forwards each collective to a plain group over the same backend object, and records it."""

    def __init__(
        self, native: Any, name: str, recorder: Recorder, devices: Sequence[torch.device], ranks: Sequence[int]
    ) -> None:
        """`ranks`: its members, of the whole world."""
        super().__init__(native, devices)
        self._recorder = recorder
        self._group_size: int = native.size()
        self._name = name
        self._futureless: set[str] = set()
        self._coalesced: list[Collective] | None = None
        self._coalesced_from: Any = None  # the event before what is waited for at once
        self._poller: NcclPoller | None = None
        if self.is_nccl:
            self._poller = NcclPoller()
            recorder.add_poller(self._poller.poll)
        self._known = recorder.add_group(name, ranks, on_device=self.is_nccl)

    def named(self, name: GroupName) -> None:
        self._recorder.groups.rename(self._known, name)
        self._name = name

    def described(self, words: str) -> None:
        axis = words.removeprefix("mesh_")
        if axis != words and axis in AXES:
            self._recorder.label_group(self._name, cast(Axis, axis))

    def get_group_store(self) -> Store:
        """The store that this group's ranks meet in."""
        return cast(Store, self.native.get_group_store())

    @never_compiled
    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """gloo's barrier that names the missing ranks; it blocks, so it is complete when it returns."""
        pending = self._recorder.issue("barrier", self._name, self._group_size, 0)
        try:
            time_wait(pending, pending.started_s, self.native.monitored_barrier, *args, **kwargs)
        finally:
            pending.abandon()  # where a rank was missing

    def batch_begins(self) -> None:
        self._coalesced = []

    def batch_ends(self, work: Any) -> Any:
        carried, self._coalesced = self._coalesced or [], None
        start, self._coalesced_from = self._coalesced_from, None
        if self._poller is None or not carried:
            return work
        # A wait for all of it is told once, of one that counts as on its way: a receive does not.
        told = next((pending for pending in carried if pending.key[1] != "recv"), carried[0])
        if work is not None:
            self._poller.watch_work(work, carried)
            return MeteredNcclWork(work, told, self._poller)
        if start is not None:  # it was given to the current stream
            end = create_timing_event()
            end.record()
            for pending in carried:
                computes = pending is told and not on_side_stream()
                self._poller.watch_events(start, end, pending, computes=computes)
        return None

    def _run(
        self,
        method: str,
        op: Op,
        carried: CollectiveBytes,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        poller: NcclPoller | None,
    ) -> Any:
        """Issue the collective, and arrange that its end is recorded without anyone waiting for it. `poller`: None
        where it is not NCCL's."""
        is_async = _is_async(args, kwargs)
        if poller is not None and self._coalesced is None and not is_async:
            return self._run_on_current_stream(method, op, carried, args, kwargs, poller)
        if self._coalesced is not None and self._coalesced_from is None and self._poller is not None and not is_async:
            self._coalesced_from = create_timing_event()
            self._coalesced_from.record()
        pending, work = self._call(method, op, carried, args, kwargs)
        if self._coalesced is not None:  # ends with the whole batch
            self._coalesced.append(pending)
            return work
        if poller is not None:
            poller.watch_work(work, [pending])
            return MeteredNcclWork(work, pending, poller)
        # A synchronous caller waits at once, which says as much as a callback and spares gloo's thread the GIL.
        calls_back = is_async and method not in self._futureless
        if calls_back:
            try:
                work.get_future().add_done_callback(pending)
            except RuntimeError:  # gloo has no future for some works
                self._futureless.add(method)
                calls_back = False
        return MeteredWork(work, pending, at_once=not is_async, calls_back=calls_back)

    def _call(
        self, method: str, op: Op, carried: CollectiveBytes, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Collective, Any]:
        pending = self._issue(op, carried)
        try:
            return pending, getattr(self.native, method)(*args, **kwargs)
        except BaseException:
            self._recorder.undo_issue(pending, carried.sent_bytes)
            raise

    def _issue(self, op: Op, carried: CollectiveBytes) -> Collective:
        return self._recorder.issue(
            op, self._name, self._group_size, carried.payload_bytes, carried.sent_bytes, carried.peer
        )

    def _run_on_current_stream(
        self,
        method: str,
        op: Op,
        carried: CollectiveBytes,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        poller: NcclPoller,
    ) -> Any:
        start, end = create_timing_event(), create_timing_event()
        start.record()
        pending, work = self._call(method, op, carried, args, kwargs)
        end.record()
        poller.watch_events(start, end, pending, computes=not on_side_stream())
        return work


def _metered(method: str, op: Op, payload: int, times_size: bool) -> Callable[..., Any]:
    one_to_one = method in ("send", "recv")  # not recv_anysource

    def collective(self: MeteredProcessGroup, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values()) if kwargs else args
        buffers = given[payload]
        if op == "all_to_all":
            carried = _exchanged(buffers, given[3] if method != "alltoall" else (), self.rank())
        else:
            num_bytes = _num_bytes(buffers) * (self._group_size if times_size else 1)
            carried = CollectiveBytes(num_bytes, peer=given[1] if one_to_one else None)
        # Of a group over both gloo and NCCL, the tensor says which of them carries it.
        poller = self._poller if self._poller is not None and _on_device(buffers) else None
        return self._run(method, op, carried, args, kwargs, poller)

    collective.__name__ = method
    return collective


def _barrier(self: MeteredProcessGroup, *args: Any, **kwargs: Any) -> Any:
    return self._run("barrier", "barrier", CollectiveBytes(0), args, kwargs, self._poller)


for _method, _how in COLLECTIVES.items():
    setattr(MeteredProcessGroup, _method, never_compiled(_metered(_method, *_how)))
setattr(MeteredProcessGroup, "barrier", never_compiled(_barrier))  # noqa: B010 - torch types it as overloads


def _exchanged(buffers: Any, splits: Sequence[int], rank: int) -> CollectiveBytes:
    """Of an all-to-all: a tensor for each rank, or one whose rows `splits` deals out; evenly without."""
    if not isinstance(buffers, torch.Tensor):
        return CollectiveBytes(_num_bytes(buffers), _num_bytes(buffers) - _num_bytes(buffers[rank]))
    if not splits:
        return CollectiveBytes(buffers.nbytes)
    return CollectiveBytes(buffers.nbytes, buffers.nbytes - buffers[: splits[rank]].nbytes)


def _num_bytes(buffers: Any) -> int:
    """Bytes of a tensor, or of tensors in lists of any depth. A sparse one's are those of its indices and values.

    Other layouts (compressed, nested, quantised) torch refuses before they get here.
    """
    if isinstance(buffers, torch.Tensor):
        return sparse_bytes(buffers) if buffers.is_sparse else buffers.nbytes
    return sum(map(_num_bytes, buffers))


def _on_device(buffers: Any) -> bool:
    if isinstance(buffers, torch.Tensor):
        return buffers.device.type != "cpu"
    return any(map(_on_device, buffers))


def _is_async(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the caller goes on before the end. Sends and receives carry no such choice: they may."""
    options = kwargs.get("opts", args[-1] if args else None)
    return bool(getattr(options, "asyncOp", True))


def patch_batch_isend_irecv() -> None:
    """Let `batch_isend_irecv` group a metered group's operations, as NCCL needs.

    torch asks `type(group) is ProcessGroup` and would otherwise issue them one by one, which can deadlock on
    NCCL when two ranks send to each other.
    """
    original = c10d.batch_isend_irecv
    if getattr(original, "coalesces_metered", False):
        return

    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        group = p2p_op_list[0].group or dist.group.WORLD
        if isinstance(group, MeteredProcessGroup) and group.batches(p2p_op_list[0].tensor.device):
            return together(p2p_op_list, group)
        return original(p2p_op_list)

    batch_isend_irecv.coalesces_metered = True  # type: ignore[attr-defined]  # marks the replacement
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv
