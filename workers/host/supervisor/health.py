"""Health of the host and of the rank processes while an attempt runs.

The host: network, CPU, and the GPUs of the attempt's ranks. The ranks: whether a process is stopped, throttled, or
waits for a CPU, and the Python stack of a rank that sends no telemetry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import psutil

from contracts.telemetry.batches import Item
from contracts.telemetry.items import GaugeItem, ProcessItem
from workers.host.hardware import Gpus
from workers.host.processes import ProcessId, get_process_id

log = logging.getLogger(__name__)

GAUGE_INTERVAL_S: Final = 5.0
SILENT_AFTER_S: Final = 3.0  # a meter sends something every 2 s, also while its rank makes no progress
MIN_REPORT_INTERVAL_S: Final = 2.0  # per rank
STILL_FOR_S: Final = 3.0  # after a rank reports no progress
MIN_THROTTLED_FRACTION: Final = 0.05  # of the time, to report a rank that makes progress
MIN_CROWDED_FRACTION: Final = 0.05
MAX_STOP_CHECK_INTERVAL_S: Final = 0.3
STACK_TIMEOUT_S: Final = 4.0
STACK_INTERVAL_S: Final = 5.0  # between two stacks of a rank
STACK_RETRY_AFTER_S: Final = 60.0  # after a stack of any rank could not be read
MAX_STACK_BYTES: Final = 2**20
MAX_FRAMES: Final = 60
CLOCK_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
CGROUPS: Final = Path("/sys/fs/cgroup")
THROTTLED_UNITS: Final = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # of cgroup v2 and v1, in seconds

State = Literal["running", "sleeping", "disk", "stopped", "zombie", "gone"]
STATES: Final[dict[str, State]] = {
    "R": "running",
    "D": "disk",
    "T": "stopped",
    "t": "stopped",
    "Z": "zombie",
    "X": "zombie",
}


class GaugeSampler:
    """Measure the host. Rates are since the previous sample. `slots` maps ranks to GPUs."""

    def __init__(self, slots: dict[int, int], *, with_gpus: bool) -> None:
        self._slots, self._with_gpus = slots, with_gpus
        self._gpus: Gpus | None = None
        self._previous: tuple[float, int, int] | None = None  # time, bytes sent, bytes received

    def start(self, record: Callable[[list[GaugeItem]], None]) -> None:
        """Sample in a separate daemon thread, because a driver can hang. `record` runs in the current event loop."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop, record), name="host-gauge", daemon=True).start()

    def sample(self) -> list[GaugeItem]:
        return [self._sample_host(), *self._sample_gpus()]

    def _run(self, loop: asyncio.AbstractEventLoop, record: Callable[[list[GaugeItem]], None]) -> None:
        while True:
            try:
                loop.call_soon_threadsafe(record, self.sample())
            except RuntimeError:  # the event loop is closed
                return
            except Exception:
                log.exception("cannot measure the machine")
            time.sleep(GAUGE_INTERVAL_S)

    def _sample_host(self) -> GaugeItem:
        item = GaugeItem(kind="gauge", rank=-1, time=time.time())
        busy = psutil.cpu_percent(None) / 100 * (psutil.cpu_count() or 1)  # since the previous call of this thread
        counters = psutil.net_io_counters(pernic=True)
        nics = [counters[name] for name in _select_interfaces(counters)]
        now, sent, received = time.monotonic(), sum(n.bytes_sent for n in nics), sum(n.bytes_recv for n in nics)
        if self._previous is not None:
            previous, sent_before, received_before = self._previous
            passed_s = max(now - previous, 1e-3)
            item["cpu"] = busy
            item["sent_bytes_s"] = max(0, sent - sent_before) / passed_s  # negative if an interface was removed
            item["received_bytes_s"] = max(0, received - received_before) / passed_s
        self._previous = (now, sent, received)
        return item

    def _sample_gpus(self) -> list[GaugeItem]:
        """Return one item per rank."""
        if not self._with_gpus:
            return []
        if self._gpus is None:
            self._gpus = Gpus()
        usages, clocks = self._gpus.get_usage(), self._gpus.get_clocks_mhz()
        items = []
        for rank, slot in self._slots.items():
            if slot >= len(usages):
                continue
            item, usage = GaugeItem(kind="gauge", rank=rank, time=time.time()), usages[slot]
            if "busy_percent" in usage:
                item["gpu_percent"] = usage["busy_percent"]
            if "watts" in usage:
                item["gpu_power_w"] = usage["watts"]
            if "celsius" in usage:
                item["gpu_celsius"] = usage["celsius"]
            if (clock := clocks[slot]) is not None:
                item["gpu_clock_mhz"] = clock
            items.append(item)
        return items


def _select_interfaces(names: Iterable[str], interfaces: Path = Path("/sys/class/net")) -> list[str]:
    """Return hardware interfaces if there are any. Bonds, bridges, and VLANs would count the same bytes again."""
    lowest = [name for name in names if name != "lo" and not any((interfaces / name).glob("lower_*"))]
    return [name for name in lowest if (interfaces / name / "device").exists()] or lowest


class ProcessUsage(NamedTuple):
    """Time that a process has used so far, in seconds.

    `delays`: the time that each thread was ready to run without a CPU, by thread id. The main thread is the first.
    """

    at: float
    cpu: float
    throttled: float
    delays: dict[int, float]


class RankProcess:
    """The process of one rank, and its last reports. Times are monotonic seconds."""

    def __init__(self, identity: ProcessId) -> None:
        self.identity = identity
        self.last_contact = time.monotonic()
        self.still_until = 0.0
        self.last_report = 0.0
        self.usage: ProcessUsage | None = None
        self.stack: list[str] = []
        self.next_stack = 0.0
        self.was_stopped = False  # since the last report


class StackUnavailableError(Exception):
    """A stack that cannot be read from outside the process."""


class RankMonitor:
    """Check the processes of ranks that have sent telemetry. `record` gets the items."""

    def __init__(self, record: Callable[[ProcessItem], None]) -> None:
        self._record = record
        self._ranks: dict[int, RankProcess] = {}
        self._no_stacks_until = 0.0

    def record_contact(self, rank: int, pid: int) -> None:
        """Note that the meter of a rank sent something from this process."""
        known = self._ranks.get(rank)
        if known is not None and known.identity.pid == pid:
            known.last_contact = time.monotonic()
            return
        identity = get_process_id(pid)
        if identity is not None:
            self._ranks[rank] = RankProcess(identity)

    def add(self, item: Item) -> None:
        """Note a rank's own report that it makes no progress."""
        if item["kind"] == "standing" and item["rank"] in self._ranks:
            self._ranks[item["rank"]].still_until = time.monotonic() + STILL_FOR_S if item["still"] else 0.0

    async def check_stopped(self) -> None:
        """Note stopped processes, after a random pause. A process that is stopped at regular times is found too."""
        await asyncio.sleep(random.uniform(0.0, MAX_STOP_CHECK_INTERVAL_S))
        for rank in self._ranks.values():
            state, _ = _read_stat(rank.identity)
            rank.was_stopped |= state == "stopped"

    async def check(self) -> None:
        """Report ranks that need attention, and read the stack of the rank that is silent longest."""
        await self._read_next_stack(time.monotonic())
        now = time.monotonic()  # reading a stack can take seconds
        for number, rank in sorted(self._ranks.items()):
            state, usage = _read_usage(rank.identity)
            previous, rank.usage = rank.usage, usage
            silent_s = now - rank.last_contact
            if silent_s < SILENT_AFTER_S:
                rank.stack = []
            if previous is None or now - rank.last_report < MIN_REPORT_INTERVAL_S:
                continue
            if rank.was_stopped and state in ("running", "sleeping", "disk"):
                state = "stopped"
            cpu, throttled, crowded = compute_rates(previous, usage)
            is_alive = state in ("running", "sleeping", "disk")
            is_moving = silent_s < SILENT_AFTER_S and now > rank.still_until and is_alive
            if is_moving and throttled < MIN_THROTTLED_FRACTION and crowded < MIN_CROWDED_FRACTION:
                continue
            rank.last_report, rank.was_stopped = now, False
            self._record(
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

    async def _read_next_stack(self, now: float) -> None:
        silent = [r for r in self._ranks.values() if now - r.last_contact >= SILENT_AFTER_S and now >= r.next_stack]
        if not silent or now < self._no_stacks_until:
            return
        rank = min(silent, key=lambda one: one.last_contact)
        rank.next_stack = now + STACK_INTERVAL_S
        pid = rank.identity.pid
        if get_process_id(pid) != rank.identity:
            return
        try:
            rank.stack = await read_stack(pid)
        except StackUnavailableError as error:
            log.info("cannot read the stack of process %d: %s", pid, error)
            self._no_stacks_until = now + STACK_RETRY_AFTER_S


async def read_stack(pid: int) -> list[str]:
    """Return the frames of the main thread, outermost first. py-spy reads them without stopping the process.

    Raises:
        StackUnavailableError: py-spy is missing, lacks permission, or takes too long.
    """
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        raise StackUnavailableError("py-spy is not installed")
    process = await asyncio.create_subprocess_exec(
        *(program, "dump", "--pid", str(pid), "--json", "--nonblocking"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(STACK_TIMEOUT_S):
            dump = await process.stdout.read(MAX_STACK_BYTES)
            while len(dump) < MAX_STACK_BYTES and (more := await process.stdout.read(MAX_STACK_BYTES - len(dump))):
                dump += more
    except TimeoutError:
        raise StackUnavailableError(f"py-spy took longer than {STACK_TIMEOUT_S:.0f} s") from None
    finally:
        # Killing a process that is ending would collect its status before asyncio, which then logs a warning.
        if not process.stdout.at_eof():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
    return parse_main_stack(dump)


def parse_main_stack(dump: bytes) -> list[str]:
    """Return the main thread's frames in the output of py-spy. Raises StackUnavailableError."""
    try:
        threads: list[dict[str, Any]] = json.loads(dump)
        main = next((thread for thread in threads if thread["thread_name"] == "MainThread"), threads[0])
        frames = [f"{one['filename'][-300:]}:{one['line']} in {one['name'][:300]}" for one in main["frames"]]
    except (ValueError, TypeError, KeyError, IndexError):
        raise StackUnavailableError("py-spy returned no stack") from None
    return [frame.replace("\0", "") for frame in frames[:MAX_FRAMES]][::-1]


def compute_rates(before: ProcessUsage, after: ProcessUsage) -> tuple[float, float, float]:
    """Return the rates of CPU time, throttled time, and waiting time between two samples.

    Training runs in the main thread, or in the thread of autograd, on which the main thread waits. So the waiting time
    is that of the main thread and of the other thread that waited longest. Kernels count throttled time once per CPU,
    so the rate is limited to 1.
    """
    passed_s = max(after.at - before.at, 1e-3)
    cpu, throttled = max(0.0, after.cpu - before.cpu), max(0.0, after.throttled - before.throttled)
    delays = {thread: max(0.0, s - before.delays.get(thread, 0.0)) for thread, s in after.delays.items()}
    main_s, *others = delays.values() or (0.0,)
    crowded = main_s + max(others, default=0.0)
    return cpu / passed_s, min(1.0, throttled / passed_s), min(1.0, crowded / passed_s)


def read_run_delays_s(pid: int) -> dict[int, float]:
    """Return the seconds that each thread was ready to run without a CPU, the main thread first.

    Threads are left out if they have ended, or if the kernel does not count the time.
    """
    delays = {}
    with contextlib.suppress(OSError):
        for thread in sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: (thread != pid, thread)):
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text()
                delays[thread] = int(text.split()[1]) * 1e-9
    return delays


def read_throttled_s(pid: int, root: Path = CGROUPS, proc: Path = Path("/proc")) -> float:
    """Return the seconds that a CPU quota stopped the process's control group or one of its parents.

    Supports cgroup v1 and v2. Returns 0 if neither reports the time.
    """
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return 0.0
    return max((_read_group_throttled_s(group) for line in lines for group in _find_groups(line, root)), default=0.0)


def _find_groups(line: str, root: Path) -> Iterator[Path]:
    """Yield the groups that can have a CPU quota, from a line "number:controllers:path" of /proc/PID/cgroup.

    Version 2 names no controllers, and is at the root. Each hierarchy of version 1 is below its controllers' names.
    """
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    top = root / controllers
    group = top / path.lstrip("/")
    yield from (group, *(parent for parent in group.parents if parent.is_relative_to(top)))


def _read_group_throttled_s(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        for line in (group / "cpu.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in THROTTLED_UNITS:
                return int(value) * THROTTLED_UNITS[name]
    return 0.0


def _read_usage(identity: ProcessId) -> tuple[State, ProcessUsage]:
    now = time.monotonic()
    state, cpu = _read_stat(identity)
    if state == "gone":
        return state, ProcessUsage(now, 0.0, 0.0, {})
    return state, ProcessUsage(now, cpu, read_throttled_s(identity.pid), read_run_delays_s(identity.pid))


def _read_stat(identity: ProcessId) -> tuple[State, float]:
    """Return the state of a process, and its CPU time in seconds."""
    try:
        fields = Path(f"/proc/{identity.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone", 0.0
    if int(fields[19]) != identity.started:
        return "gone", 0.0
    return STATES.get(fields[0], "sleeping"), (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S
