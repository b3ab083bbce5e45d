"""Start the meter in a process that a launcher of the user started. `workers.meter.hook` calls this module.

A process is a rank when it joins a process group, with the rank that it passes to torch or that its launcher sets. A
process without groups is rank 0, unless another process started it with `multiprocessing`. Two processes with one rank
are never both metered: a rank holds an abstract socket until it ends.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import parent_process
from types import ModuleType, TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist

from workers.meter.rank_exit import report_exception
from workers.meter.script_meter import ScriptMeter, start_meter
from workers.torch_private.groups import skip_dynamo

HOOK_MODULE = "meshboard_hook"
TELEMETRY_VARIABLE, RUN_VARIABLE, RANKS_VARIABLE = "MESHBOARD_TELEMETRY", "MESHBOARD_RUN_NAME", "MESHBOARD_RANKS"
# Variables of torchrun and of DeepSpeed's launcher.
LOCAL_RANKS_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")


class _Process:
    """The meter of this process, and the process that started it. A forked process inherits both."""

    meter: ScriptMeter | None = None
    pid = 0


def disable_hook() -> None:
    """Keep the hook from starting a second meter in this process."""
    hook: Any = sys.modules.get(HOOK_MODULE)
    if hook is not None:
        hook.HOOK.disable()
        claim_rank(_read_number("RANK") or 0)


def meter_group_member(args: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Meter this process before it calls `init_process_group` with these arguments."""
    try:
        values = inspect.signature(dist.init_process_group).bind_partial(*args, **named).arguments
    except TypeError:
        return  # torch raises it
    url = values.get("init_method")
    query = parse_qs(urlsplit(url).query) if isinstance(url, str) else {}

    def find(name: str) -> int | None:
        value = values.get(name)
        if isinstance(value, int) and value >= 0:
            return value
        in_url = query.get(name, [""])[0]
        return int(in_url) if in_url.isdecimal() else _read_number(name.upper())

    rank, world_size = find("rank"), find("world_size")
    if rank is not None and world_size is not None:
        _start(rank, world_size)


def meter_single_process() -> ModuleType | None:
    """Meter a process without process groups, and return its marks. Return None if it is not a rank."""
    if _Process.meter is None and (os.environ.get("RANK") or parent_process() is None):
        _start(_read_number("RANK") or 0, _read_number("WORLD_SIZE") or 1)
    return None if _Process.meter is None or _Process.pid != os.getpid() else _Process.meter.marks


def watch_first_backward() -> None:
    """Meter this process at its next backward pass."""
    original, is_first = torch.autograd.backward, True

    def backward(*args: Any, **named: Any) -> None:
        nonlocal is_first
        if not is_first:
            return original(*args, **named)
        is_first = False
        if torch.autograd.backward is watched:
            torch.autograd.backward = original
        meter_single_process()
        return torch.autograd.backward(*args, **named)

    watched = skip_dynamo(backward)
    torch.autograd.backward = watched


def claim_rank(rank: int) -> bool:
    """Claim a rank of this run until this process ends. Return False if another process has the rank."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0{os.environ.get(TELEMETRY_VARIABLE, '')[-80:]}:{rank}")
    except OSError:
        claim.close()
        return False
    os.register_at_fork(after_in_child=claim.close)
    _claims.append(claim)
    return True


_claims: list[socket.socket] = []


def _start(rank: int, world_size: int) -> None:
    if _Process.meter is not None:  # of this process, or of the rank that forked it
        return
    expected = _read_number(RANKS_VARIABLE)
    if expected is not None and expected != world_size and rank == 0:
        text = f"The command started {world_size} ranks, but `layout.dp` is {expected}."
        _print(f"{text} Set `layout.dp` to the number of ranks of the command to meter all ranks.")
    if expected is not None and rank >= expected:
        return
    if not claim_rank(rank):
        _print(f"process {os.getpid()} is not metered, because another process is rank {rank}.")
        return
    job, _, attempt = os.environ.get(RUN_VARIABLE, "local/1").partition("/")
    local_ranks = next(filter(None, map(_read_number, LOCAL_RANKS_VARIABLES)), None)
    meter = start_meter(
        rank,
        os.environ[TELEMETRY_VARIABLE],
        job,
        int(attempt),
        world_size=max(1, world_size),
        local_ranks=local_ranks,
    )
    _Process.meter, _Process.pid = meter, os.getpid()
    _report_uncaught(meter)


def _report_uncaught(meter: ScriptMeter) -> None:
    """Report an uncaught exception before the process ends, which a thread of the script may delay."""
    original = sys.excepthook

    def handle(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == _Process.pid and not issubclass(kind, KeyboardInterrupt):
            if meter.exporter is not None:
                meter.exporter.report_end()
            if not _has_error_file():
                report_exception(error)
        original(kind, error, trace)

    sys.excepthook = handle


def _has_error_file() -> bool:
    """Return whether torch's `record` has already written the error of this rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return not path or os.path.exists(path)


def _read_number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None


def _print(text: str) -> None:
    sys.stderr.write(f"meshboard: {text}\n")
