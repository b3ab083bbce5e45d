"""The hosts of one device while a pass goes through the queue: who takes which slots, who holds which host."""

from __future__ import annotations

from bisect import bisect_left, insort
from datetime import datetime
from typing import NamedTuple


class Waiting(NamedTuple):
    """A queued job, as far as placing it goes."""

    id: str
    name: str
    owner: int
    device: str
    num_slots: int
    wanted_host: str  # "" for any
    priority: int
    created: datetime
    kept: str = ""  # the host that the last plan kept for it


class HostState(NamedTuple):
    """A host as it is now."""

    name: str
    device: str
    slots: int
    free: tuple[int, ...]  # the slots that nothing holds, ascending
    drained: bool = False
    live: bool = True


class Share(NamedTuple):
    """What a gang gets of one host."""

    host: str
    slots: tuple[int, ...]


class Placement(NamedTuple):
    """A gang and what it gets, in the order of its ranks."""

    job: str
    shares: tuple[Share, ...]


class Pool:
    """The hosts of one device while a pass goes through the queue."""

    def __init__(self, device: str, hosts: list[HostState], trouble: str = "") -> None:
        self.device, self.trouble = device, trouble
        self.connected = any(host.live for host in hosts)
        self.hosts = {host.name: host for host in hosts}
        self.taking = {name: host for name, host in self.hosts.items() if host.live and not host.drained}
        self.largest = max((host.slots for host in self.taking.values()), default=0)
        self.free = {name: host.free for name, host in self.taking.items()}
        self.holders: dict[str, Waiting] = {}  # by host
        self.head: Waiting | None = None
        self.open = sorted((len(free), name) for name, free in self.free.items())  # hosts that nobody holds

    def take(self, job: Waiting) -> Placement | None:
        """Give the job its slots if a host that is open to it has room."""
        name = self._room(job)
        if name is None:
            return None
        self._close(name)
        slots, self.free[name] = self.free[name][: job.num_slots], self.free[name][job.num_slots :]
        insort(self.open, (len(self.free[name]), name))
        return Placement(job.id, (Share(name, slots),))

    def hold(self, job: Waiting) -> None:
        """Let a blocked job hold what it may."""
        name = self._to_hold(job)
        if name is None:
            return
        self.holders[name] = job
        self._close(name)
        if not job.wanted_host:
            self.head = job

    def fits(self, job: Waiting) -> bool:
        """Whether it could run on a host that takes jobs, were that host empty."""
        if not job.wanted_host:
            return job.num_slots <= self.largest
        host = self.taking.get(job.wanted_host)
        return host is not None and job.num_slots <= host.slots

    def _room(self, job: Waiting) -> str | None:
        if job.wanted_host:
            open_to_it = job.wanted_host in self.taking and job.wanted_host not in self.holders
            return job.wanted_host if open_to_it and len(self.free[job.wanted_host]) >= job.num_slots else None
        tightest = bisect_left(self.open, (job.num_slots, ""))
        return self.open[tightest][1] if tightest < len(self.open) else None

    def _to_hold(self, job: Waiting) -> str | None:
        if job.wanted_host:
            return job.wanted_host if job.wanted_host not in self.holders else None
        if self.head is not None:
            return None
        enough = {name: free for free, name in self.open if self.taking[name].slots >= job.num_slots}
        if job.kept in enough:
            return job.kept
        return min(enough, key=lambda name: (-enough[name], self.taking[name].slots, name), default=None)

    def _close(self, name: str) -> None:
        del self.open[bisect_left(self.open, (len(self.free[name]), name))]
