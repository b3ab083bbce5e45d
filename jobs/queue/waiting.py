"""Why a job waits, in words that are true, that stay the same while nothing that matters changes, and that name no job
but those of its own owner. A host is open to a job if it takes jobs and is not kept for another.
"""

from __future__ import annotations

from jobs.queue.pool import Pool, Waiting

LONGEST = 500
NEAR = 10  # with fewer ahead, the text counts free slots and jobs; further behind it would change all the time


def reason(job: Waiting, pool: Pool, ahead: int, first: Waiting | None) -> str:
    """Why it was not placed. `ahead` jobs of its device go before it and fit a host; `first` of them."""
    text = _never(job, pool) or (_pinned(job, pool) if job.wanted_host else _anywhere(job, pool, ahead, first))
    return text[:LONGEST]


def _never(job: Waiting, pool: Pool) -> str:
    """Why no host that is there could take it, or nothing."""
    device, needs = pool.device, f"needs {_slots(job.num_slots)}"
    if not pool.connected:
        return f"no {device} host is heard: {pool.trouble}" if _unheard(pool) else f"no {device} host is connected"
    if job.wanted_host:
        wanted = f"{job.wanted_host}, the one host it asks for,"
        host = pool.hosts.get(job.wanted_host)
        if host is None or not host.live:
            is_unheard = host is not None and pool.trouble
            return f"{wanted} is not heard: {pool.trouble}" if is_unheard else f"{wanted} is not connected"
        if host.drained:
            return f"{wanted} is drained and takes no new jobs"
        return "" if pool.fits(job) else f"{needs}; {wanted} has {host.slots}"
    if not pool.taking:
        return f"every {device} host is drained and takes no new jobs"
    if pool.fits(job):
        return ""
    which = "the largest" if len(pool.taking) == len(pool.hosts) else "the largest that takes jobs now"
    return f"{needs} on one {device} host; {which} has {pool.largest}"


def _unheard(pool: Pool) -> bool:
    """Whether there are hosts that may be well."""
    return bool(pool.trouble and pool.hosts)


def _pinned(job: Waiting, pool: Pool) -> str:
    holder = pool.holders[job.wanted_host]
    kept = "it" if holder is job else f"a job ahead that needs {_slots(holder.num_slots)}"
    free = _free(pool, job.wanted_host)
    return (
        f"needs {_slots(job.num_slots)} on {job.wanted_host}, the one host it asks for; {free} and is kept for {kept}"
    )


def _anywhere(job: Waiting, pool: Pool, ahead: int, first: Waiting | None) -> str:
    needs = f"needs {_slots(job.num_slots)} on one {pool.device} host"
    if pool.head is job:
        host = next(name for name, holder in pool.holders.items() if holder is job)
        return f"{needs}; {_free(pool, host)} and is kept for it"
    if ahead >= NEAR:
        return f"{needs}; none open to it has as many free; at least {_about(ahead)} jobs are ahead"
    assert first is not None, "the first blocked job of a device is its head"
    name = f" ({first.name})" if first.owner == job.owner else ""
    before = f"1 job{name} is ahead and" if ahead == 1 else f"{ahead} jobs are ahead, the first{name}"
    return f"{needs}; {_most_free(pool)}; {before} needs {_slots(first.num_slots)}"


def _most_free(pool: Pool) -> str:
    if not pool.open:
        return "none is open to it now"
    return f"of those open to it {_free(pool, pool.open[-1][1])}, the most"


def _free(pool: Pool, host: str) -> str:
    return f"{host} has {len(pool.free[host])} of {pool.taking[host].slots} free"


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def _about(count: int) -> int:
    """The largest of 10, 20, 50, 100, 200, ... that is not above the count."""
    step: int = 10 ** (len(str(count)) - 1)
    return max(step * factor for factor in (1, 2, 5) if step * factor <= count)
