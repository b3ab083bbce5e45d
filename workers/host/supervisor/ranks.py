"""The processes of an attempt's ranks as their host sees them: of one that stands still, and of one that fell silent
because it was stopped, or something in it holds the interpreter, where its Python stands."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from contracts.telemetry.batches import Item
from contracts.telemetry.health import ProcessItem
from workers.host.processes import ProcessId, process_id

log = logging.getLogger(__name__)

SILENT_S: Final = 3.0  # a meter says something every 2 s at least, while its rank stands still
AGAIN_S: Final = 2.0
STANDS_S: Final = 3.0  # after it said so
THROTTLED: Final = 0.05  # seconds a second, from which on it is told of a rank that moves
CROWDED: Final = 0.05
GLANCE_S: Final = 0.3  # between two glances, at most
DUMP_S: Final = 4.0  # for reading a stack, then it is left
NEXT_DUMP_S: Final = 5.0  # of the same rank
REFUSED_S: Final = 60.0  # after one that could not be read, before any is tried again
DUMP_BYTES: Final = 2**20
MOST_FRAMES: Final = 60
TICKS: Final = os.sysconf("SC_CLK_TCK")
CGROUPS: Final = Path("/sys/fs/cgroup")
THROTTLED_UNITS: Final = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # as cgroup v2 and v1 call it

State = Literal["running", "sleeping", "disk", "stopped", "zombie", "gone"]
STATES: Final[dict[str, State]] = {
    "R": "running",
    "D": "disk",
    "T": "stopped",
    "t": "stopped",
    "Z": "zombie",
    "X": "zombie",
}


class Taken(NamedTuple):
    """What a process has taken so far, seconds."""

    at: float
    cpu: float
    throttled: float
    crowded: float


class Rank:
    """One rank's process, and what is known of it."""

    def __init__(self, identity: ProcessId) -> None:
        self.identity = identity
        self.heard = time.monotonic()
        self.stands = 0.0  # until then
        self.told = 0.0
        self.before: Taken | None = None
        self.stack: list[str] = []
        self.next_dump = 0.0
        self.was_stopped = False  # at a glance since it was told of last


class Ranks:
    """Those that ever spoke. `tell` is given what there is to tell."""

    def __init__(self, tell: Callable[[ProcessItem], None]) -> None:
        self._tell = tell
        self._ranks: dict[int, Rank] = {}
        self._refused_until = 0.0

    def heard(self, rank: int, pid: int) -> None:
        """A rank's meter said something, from this process."""
        known = self._ranks.get(rank)
        if known is not None and known.identity.pid == pid:
            known.heard = time.monotonic()
            return
        identity = process_id(pid)
        if identity is not None:
            self._ranks[rank] = Rank(identity)

    def take(self, item: Item) -> None:
        """A checked item of a rank."""
        if item["kind"] == "standing" and item["rank"] in self._ranks:
            self._ranks[item["rank"]].stands = time.monotonic() + STANDS_S if item["still"] else 0.0

    async def glance(self) -> None:
        """Again and again, never at equal times: who stops a process and lets it go in a beat of his own could do it
        between any two looks that keep a beat too."""
        await asyncio.sleep(random.uniform(0.0, GLANCE_S))
        for rank in self._ranks.values():
            state, _ = _stat(rank.identity)
            rank.was_stopped |= state == "stopped"

    async def look(self) -> None:
        """Each second: at all of them, and into the one that has been silent longest."""
        await self._dump_one(time.monotonic())
        now = time.monotonic()  # reading a stack may take seconds, in which others speak
        for number, rank in sorted(self._ranks.items()):
            state, taken = _look_at(rank.identity)
            before, rank.before = rank.before, taken
            silent_s = now - rank.heard
            if silent_s < SILENT_S:
                rank.stack = []
            if before is None or now - rank.told < AGAIN_S:
                continue
            if rank.was_stopped and state in ("running", "sleeping", "disk"):
                state = "stopped"
            cpu, throttled, crowded = rates(before, taken)
            moves = silent_s < SILENT_S and now > rank.stands
            if moves and throttled < THROTTLED and crowded < CROWDED and state != "stopped":
                continue
            rank.told, rank.was_stopped = now, False
            self._tell(
                ProcessItem(
                    kind="process",
                    rank=number,
                    pid=rank.identity.pid,
                    time=time.time(),
                    state=state,
                    cpu=cpu,
                    throttled=throttled,
                    crowded=crowded,
                    stack=rank.stack,
                    silent_s=silent_s,
                )
            )

    async def _dump_one(self, now: float) -> None:
        silent = [rank for rank in self._ranks.values() if now - rank.heard >= SILENT_S and now >= rank.next_dump]
        if not silent or now < self._refused_until:
            return
        rank = min(silent, key=lambda one: one.heard)
        rank.next_dump = now + NEXT_DUMP_S
        if process_id(rank.identity.pid) != rank.identity:
            return
        try:
            rank.stack = await stack_of(rank.identity.pid)
        except CannotReadError as error:
            log.info("cannot read the stack of process %d: %s", rank.identity.pid, error)
            self._refused_until = now + REFUSED_S


class CannotReadError(Exception):
    """Where a process stands cannot be seen from outside."""


async def stack_of(pid: int) -> list[str]:
    """Of the main thread, outermost first, read by py-spy without stopping the process.

    Raises:
        CannotReadError: there is no py-spy, or no right to, or it took too long.
    """
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        raise CannotReadError("py-spy is not installed")
    process = await asyncio.create_subprocess_exec(
        *(program, "dump", "--pid", str(pid), "--json", "--nonblocking"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(DUMP_S):
            told = await process.stdout.read(DUMP_BYTES)
            while len(told) < DUMP_BYTES and (more := await process.stdout.read(DUMP_BYTES - len(told))):
                told += more
    except TimeoutError:
        raise CannotReadError(f"py-spy took longer than {DUMP_S:.0f} s") from None
    finally:
        if not process.stdout.at_eof():  # to kill one that is ending collects it before asyncio can, which complains
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
    return main_stack(told)


def main_stack(told: bytes) -> list[str]:
    """The main thread's frames in what py-spy said. Raises CannotReadError."""
    try:
        threads: list[dict[str, Any]] = json.loads(told)
        main = next((one for one in threads if one["thread_name"] == "MainThread"), threads[0])
        frames = [f"{one['filename'][-300:]}:{one['line']} in {one['name'][:300]}" for one in main["frames"]]
    except (ValueError, TypeError, KeyError, IndexError):
        raise CannotReadError("py-spy returned no stack") from None
    return [frame.replace("\0", "") for frame in frames[:MOST_FRAMES]][::-1]


def _look_at(identity: ProcessId) -> tuple[State, Taken]:
    """Its state, and what it has taken. Of one that is gone nothing."""
    now = time.monotonic()
    state, cpu = _stat(identity)
    if state == "gone":
        return state, Taken(now, 0.0, 0.0, 0.0)
    return state, Taken(now, cpu, throttled_s(identity.pid), crowded_s(identity.pid))


def _stat(identity: ProcessId) -> tuple[State, float]:
    """Its state, and the seconds of a processor that it has taken."""
    try:
        fields = Path(f"/proc/{identity.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone", 0.0
    if int(fields[19]) != identity.started:
        return "gone", 0.0
    return STATES.get(fields[0], "sleeping"), (int(fields[11]) + int(fields[12])) / TICKS


def rates(before: Taken, after: Taken) -> tuple[float, float, float]:
    """Seconds of processor time, of waiting for a quota and for others in each second between two looks. Kernels count
    a quota's once for each processor that it keeps the process from: it waits no longer than all of the time."""
    passed_s = max(after.at - before.at, 1e-3)
    cpu, throttled, crowded = (max(0.0, b - a) / passed_s for a, b in zip(before[1:], after[1:], strict=True))
    return cpu, min(1.0, throttled), min(1.0, crowded)


def crowded_s(pid: int) -> float:
    """Seconds that the process' main thread was ready to run and had no processor so far; 0 where the kernel does not
    tell. Of a training process that is the thread that trains."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    return 0.0


def throttled_s(pid: int, root: Path = CGROUPS, proc: Path = Path("/proc")) -> float:
    """Seconds that a quota kept the process' control group, or one above it, waiting so far, by cgroup v2 or v1; 0
    where neither tells."""
    try:
        told = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return 0.0
    return max((_throttled_here(group) for line in told for group in _groups(line, root)), default=0.0)


def _groups(line: str, root: Path) -> Iterator[Path]:
    """Of a line of /proc/PID/cgroup, "number:controllers:path", the groups that may have a CPU quota: its own and those
    above it. Version 2 names no controllers and lies at the root; each hierarchy of version 1 lies below its names."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    top = root / controllers
    own = top / path.lstrip("/")
    yield from (own, *(above for above in own.parents if above.is_relative_to(top)))


def _throttled_here(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "cpu.stat").read_text().splitlines():
            name, _, told = line.partition(" ")
            if name in THROTTLED_UNITS:
                return int(told) * THROTTLED_UNITS[name]
    return 0.0
