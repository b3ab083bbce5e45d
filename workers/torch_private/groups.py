"""Process groups that stand in another's place.

`Backend.register_backend` with the extended API takes a creator that returns a `ProcessGroup`; torch then uses it in
place of its own. `distributed_c10d._new_process_group_helper` makes every group, and `_world`'s dicts hold it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, _register_process_group, _unregister_process_group
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

NATIVE = {"cpu": "gloo", "cuda": "nccl"}
Store: TypeAlias = c10d.Store
GroupName: TypeAlias = c10d.GroupName
fake_store = FakeStore
F = TypeVar("F", bound=Callable[..., Any])


# Plain groups whose wrapper is gone, until the next wrapper is made. Whoever lets go of a gloo backend last waits for
# its threads, and those may be waiting for the GIL to call Python back. Python lets go without the GIL; DDP's reducer
# lets go with it, and would hang for ever: so it must not be the last.
_outlived: list[Any] = []


class WrappedGroup(dist.ProcessGroup):
    """Has the backends of a plain group: what is not a collective (devices, timeouts, sequence numbers, shutdown) torch
    answers itself. Subclasses forward collectives to `native`, and hear of names and of batches of sends."""

    def __init__(self, native: Any, devices: Sequence[torch.device]) -> None:
        super().__init__(native.rank(), native.size())  # type: ignore[call-arg]  # the one subclasses may call
        self.native = native
        _outlived.clear()
        weakref.finalize(self, _outlived.append, native).atexit = False
        backends = {device: native._get_backend(device) for device in devices}
        for device, backend in backends.items():
            name = backend.name() if backend.name() in NATIVE.values() else "gloo"
            _give_backend(self, device, name, backend)
        self.is_nccl = any(backend.name() == "nccl" for backend in backends.values())
        if self.is_nccl:
            native._enable_collectives_timing()

    def named(self, name: GroupName) -> None:
        """The group has been given its name."""

    def described(self, words: str) -> None:
        """Somebody said what the group is."""

    def batches(self, device: torch.device) -> bool:
        """Whether what is sent from there can be one work. Gloo takes each by itself."""
        return bool(self._get_backend(device).supports_coalescing)

    def batch_begins(self) -> None:
        """What comes until `batch_ends` is one work."""

    def batch_ends(self, work: Any) -> Any:
        """What its caller waits for. `work` is None where the backend gives none."""
        return work

    def _set_group_name(self, name: GroupName) -> None:
        super()._set_group_name(name)
        self.native._set_group_name(name)
        self.named(name)

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self.native._set_group_desc(desc)
        self.described(desc)

    def _start_coalescing(self, device: torch.device) -> None:
        self.native._start_coalescing(device)  # gloo refuses
        self.batch_begins()

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        return self.native.split_group(*args, **kwargs)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.batch_ends(self.native._end_coalescing(device))


def never_compiled(function: F) -> F:
    """Let the compiler run it as it does what torch has in C++. `torch.compiler.disable` would import the compiler."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    plain: Any = function
    frames.set_code_exec_strategy(
        plain.__code__, frames._FrameExecStrategy(skip, skip)
    )  # called by what is not compiled
    plain._torchdynamo_disable = True  # called by what is
    return function


def native_group(options: Any, backend_options: Any, device: str) -> Any:
    """The plain group torch would have made, over gloo ("cpu") or NCCL ("cuda")."""
    group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    if device == "cuda":
        backend_options = backend_options or dist.ProcessGroupNCCL.Options()
        backend_options._timeout = options.timeout
        backend_options.global_ranks_in_group = options.global_ranks_in_group
        backend_options.group_name = options.group_id
        backend: Any = dist.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, backend_options)
    else:
        backend = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        backend.options.global_ranks_in_group = options.global_ranks_in_group
        backend.options.group_name = options.group_id
    backend._set_sequence_number_for_group()
    _give_backend(group, torch.device(device), NATIVE[device], backend)
    return group


def stand_in_group(options: Any) -> Any:
    """A plain group that sends nothing: torch's own stand-in answers what is not a collective."""
    backend = FakeProcessGroup._create_internal(options.group_rank, options.group_size)
    group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    _give_backend(group, torch.device("cpu"), "gloo", backend)
    return group


def _give_backend(group: Any, device: torch.device, name: str, backend: Any) -> None:
    kind = c10d.Backend.backend_type_map[name]
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)


def connect(group: dist.ProcessGroup) -> None:
    """Make NCCL's communicator of a group, all members at once; gloo's is there.

    At its first use each member would wait for the others with all that it is to do next. Messages of a group that is
    connected wait for one another in the order of their calls, whoever they go to: one of messages is better not.
    """
    if isinstance(group, WrappedGroup) and group.is_nccl:
        device = torch.device("cuda", torch.cuda.current_device())
        group.native._get_backend(device).eager_connect_single_device(device)


def connect_pair(group: dist.ProcessGroup, peer: int, *, sends: bool) -> None:
    """Make NCCL's communicator of this rank and `peer`, by rank in the group, which its messages have for themselves.

    The other calls it as well. torch makes one at the first message and not before, so an element passes, uncounted.
    """
    if isinstance(group, WrappedGroup) and group.is_nccl:
        element = torch.zeros(1, device="cuda")
        pass_on = group.native.send if sends else group.native.recv
        pass_on([element], peer, 0).wait()


def on_each_new_group(replace: Callable[[dist.ProcessGroup, list[int]], dist.ProcessGroup]) -> None:
    """From now on `replace(group, global ranks)` says which group takes the place of one that torch has just made."""
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def helper(group_size: int, group_rank: int, global_ranks_in_group: list[int], *args: Any, **kwargs: Any) -> Any:
        group, store = original(group_size, group_rank, global_ranks_in_group, *args, **kwargs)
        if not isinstance(group, dist.ProcessGroup):
            return group, store
        other = replace(group, global_ranks_in_group or list(range(group_size)))
        if other is not group:
            _put_in_place(group, other)
        return other, store

    c10d._new_process_group_helper = helper
    split = c10d.split_group

    @functools.wraps(split)
    def split_group(*args: Any, **kwargs: Any) -> Any:
        group = split(*args, **kwargs)
        if not isinstance(group, dist.ProcessGroup):
            return group
        other = replace(group, dist.get_process_group_ranks(group))
        if other is not group:
            _put_in_place(group, other)
        return other

    for module in (c10d, dist, device_mesh):
        setattr(module, split.__name__, split_group)


def _put_in_place(native: dist.ProcessGroup, other: Any) -> None:
    """Wherever torch has entered it, and bound to the device that it is bound to: others are split from it then."""
    world: Any = c10d._world
    other.bound_device_id = native.bound_device_id
    name = world.pg_names[native]
    other._set_group_name(name)
    other._set_group_desc(native.group_desc)
    for entered in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag, world.pg_group_ranks):
        if native in entered:
            entered[other] = entered.pop(native)
    for groups in world.tags_to_pg.values():
        groups[:] = [other if group is native else group for group in groups]
    _unregister_process_group(name)
    _register_process_group(name, other)


def name_of(group: dist.ProcessGroup) -> str:
    """The name under which torch has entered a group."""
    return cast(str, c10d._world.pg_names[group])


def devices_over(group: Any, backends: Sequence[str]) -> list[torch.device]:
    """Devices for which a group has one of some backends."""
    return [device for device in group._device_types if group._get_backend(device).name() in backends]


def backends_of(group: dist.ProcessGroup) -> set[str]:
    """Those that it was asked for with, by name: "cpu:gloo,cuda:nccl"."""
    asked = c10d._world.pg_backend_config[group].split(",")
    return {each.rpartition(":")[2] for each in asked}


def together(operations: list[dist.P2POp], group: dist.ProcessGroup) -> list[dist.Work]:
    """Issue sends and receives as one batch, which torch's own does for a plain group alone."""
    c10d._check_p2p_op_list(operations)
    with c10d._coalescing_manager(group, operations[0].tensor.device, async_ops=True) as manager:
        for operation in operations:
            peer = "group_dst" if operation.op is dist.isend else "group_src"
            operation.op(operation.tensor, group=operation.group, tag=operation.tag, **{peer: operation.group_peer})
    return cast(list[dist.Work], manager.works)


def axis_groups(mesh: DeviceMesh) -> list[tuple[str, str]]:
    """(axis, name of its group) of a mesh whose axes have names."""
    return list(zip(mesh.mesh_dim_names or (), getattr(mesh, "_dim_group_names", ()), strict=False))


def duration_s(work: Any) -> float:
    """Of a work that NCCL has timed and that is over."""
    return cast(float, work._get_duration()) / 1000


def sparse_bytes(tensor: torch.Tensor) -> int:
    """Of the indices and values of a sparse tensor, coalesced or not."""
    return tensor._indices().nbytes + tensor._values().nbytes
