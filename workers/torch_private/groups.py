"""Process groups that replace other groups.

`Backend.register_backend` with the extended API accepts a creator that returns a `ProcessGroup`.
`_new_process_group_helper` of `distributed_c10d` creates every group, and the dicts of `_world` register it.
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


# Native groups of deleted wrappers, until the next wrapper is created. The last owner of a gloo backend waits for
# its threads, which may wait for the GIL. Python releases it without the GIL, but DDP's reducer releases it with
# the GIL and would deadlock, so it must not be the last owner.
_released_groups: list[Any] = []


class WrappedGroup(dist.ProcessGroup):
    """Wrap the backends of a native group.

    Torch handles everything except collectives: devices, timeouts, sequence numbers, and shutdown. Subclasses forward
    collectives to `native`.
    """

    def __init__(self, native: Any, devices: Sequence[torch.device]) -> None:
        super().__init__(native.rank(), native.size())  # type: ignore[call-arg]  # constructor for subclasses
        self.native = native
        _released_groups.clear()
        weakref.finalize(self, _released_groups.append, native).atexit = False
        backends = {device: native._get_backend(device) for device in devices}
        for device, backend in backends.items():
            name = backend.name() if backend.name() in NATIVE.values() else "gloo"
            _set_backend(self, device, name, backend)
        self.is_nccl = any(backend.name() == "nccl" for backend in backends.values())
        if self.is_nccl:
            native._enable_collectives_timing()

    def named(self, name: GroupName) -> None:
        """Handle the name that torch assigns to the group."""

    def described(self, description: str) -> None:
        """Handle the description that torch assigns to the group."""

    def batches(self, device: torch.device) -> bool:
        """Return whether a batch on a device is one work. Gloo sends each message separately."""
        return bool(self._get_backend(device).supports_coalescing)

    def begin_batch(self) -> None:
        """Start a batch, which is one work."""

    def end_batch(self, work: Any) -> Any:
        """Return the work of a batch for the caller. `work` is None if the backend returns none."""
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
        self.native._start_coalescing(device)  # raises on gloo
        self.begin_batch()

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        return self.native.split_group(*args, **kwargs)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self.end_batch(self.native._end_coalescing(device))


def skip_dynamo(function: F) -> F:
    """Let the compiler call a function without tracing it. `torch.compiler.disable` would import the compiler."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    plain: Any = function
    strategy = frames._FrameExecStrategy(skip, skip)
    frames.set_code_exec_strategy(plain.__code__, strategy)  # for calls from uncompiled code
    plain._torchdynamo_disable = True  # for calls from compiled code
    return function


def make_native_group(options: Any, backend_options: Any, device: str) -> Any:
    """Create the native group that torch would create, over gloo ("cpu") or NCCL ("cuda")."""
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
    _set_backend(group, torch.device(device), NATIVE[device], backend)
    return group


def make_fake_group(options: Any) -> Any:
    """Create a group that sends nothing."""
    backend = FakeProcessGroup._create_internal(options.group_rank, options.group_size)
    group = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    _set_backend(group, torch.device("cpu"), "gloo", backend)
    return group


def _set_backend(group: Any, device: torch.device, name: str, backend: Any) -> None:
    kind = c10d.Backend.backend_type_map[name]
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)


def connect(group: dist.ProcessGroup) -> None:
    """Create the NCCL communicator of a group. All members call this together.

    Otherwise members would wait for each other at the first use. In a connected group, messages wait for one another in
    order, so groups for messages stay unconnected.
    """
    if isinstance(group, WrappedGroup) and group.is_nccl:
        device = torch.device("cuda", torch.cuda.current_device())
        group.native._get_backend(device).eager_connect_single_device(device)


def connect_pair(group: dist.ProcessGroup, peer: int, *, sends: bool) -> None:
    """Create the NCCL communicator of this rank and `peer` (rank in the group).

    Both call this. Torch creates it only at the first message, so one element is sent, uncounted.
    """
    if isinstance(group, WrappedGroup) and group.is_nccl:
        element = torch.zeros(1, device="cuda")
        pass_on = group.native.send if sends else group.native.recv
        pass_on([element], peer, 0).wait()


def replace_new_groups(replace: Callable[[dist.ProcessGroup, list[int]], dist.ProcessGroup]) -> None:
    """Replace each new group by the result of `replace(group, global ranks)`."""
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def helper(group_size: int, group_rank: int, global_ranks_in_group: list[int], *args: Any, **kwargs: Any) -> Any:
        group, store = original(group_size, group_rank, global_ranks_in_group, *args, **kwargs)
        if not isinstance(group, dist.ProcessGroup):
            return group, store
        replacement = replace(group, global_ranks_in_group or list(range(group_size)))
        if replacement is not group:
            _replace_group(group, replacement)
        return replacement, store

    c10d._new_process_group_helper = helper
    split = c10d.split_group

    @functools.wraps(split)
    def split_group(*args: Any, **kwargs: Any) -> Any:
        group = split(*args, **kwargs)
        if not isinstance(group, dist.ProcessGroup):
            return group
        replacement = replace(group, dist.get_process_group_ranks(group))
        if replacement is not group:
            _replace_group(group, replacement)
        return replacement

    for module in (c10d, dist, device_mesh):
        setattr(module, split.__name__, split_group)


def _replace_group(native: dist.ProcessGroup, replacement: Any) -> None:
    """Register a group in place of a native group, bound to the same device."""
    world: Any = c10d._world
    replacement.bound_device_id = native.bound_device_id
    name = world.pg_names[native]
    replacement._set_group_name(name)
    replacement._set_group_desc(native.group_desc)
    for entered in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag, world.pg_group_ranks):
        if native in entered:
            entered[replacement] = entered.pop(native)
    for groups in world.tags_to_pg.values():
        groups[:] = [replacement if group is native else group for group in groups]
    _unregister_process_group(name)
    _register_process_group(name, replacement)


def get_group_name(group: dist.ProcessGroup) -> str:
    """Return the registered name of a group."""
    return cast(str, c10d._world.pg_names[group])


def list_devices(group: Any, backends: Sequence[str]) -> list[torch.device]:
    """Return the devices for which a group has one of some backends."""
    return [device for device in group._device_types if group._get_backend(device).name() in backends]


def get_backend_names(group: dist.ProcessGroup) -> set[str]:
    """Return the backends that a group was created with ("cpu:gloo,cuda:nccl")."""
    backends = c10d._world.pg_backend_config[group].split(",")
    return {each.rpartition(":")[2] for each in backends}


def batch_p2p(operations: list[dist.P2POp], group: dist.ProcessGroup) -> list[dist.Work]:
    """Issue sends and receives as one batch. Torch does this only for native groups."""
    c10d._check_p2p_op_list(operations)
    with c10d._coalescing_manager(group, operations[0].tensor.device, async_ops=True) as manager:
        for operation in operations:
            peer = "group_dst" if operation.op is dist.isend else "group_src"
            operation.op(operation.tensor, group=operation.group, tag=operation.tag, **{peer: operation.group_peer})
    return cast(list[dist.Work], manager.works)


def list_axis_groups(mesh: DeviceMesh) -> list[tuple[str, str]]:
    """Return (axis, group name) of a mesh with named axes."""
    return list(zip(mesh.mesh_dim_names or (), getattr(mesh, "_dim_group_names", ()), strict=False))


def get_duration_s(work: Any) -> float:
    """Return the duration of a finished NCCL work."""
    return cast(float, work._get_duration()) / 1000


def get_sparse_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of indices and values of a sparse tensor."""
    return tensor._indices().nbytes + tensor._values().nbytes
