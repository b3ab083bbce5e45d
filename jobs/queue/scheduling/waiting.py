"""Why a job waits, in words that are true, that stay the same while nothing that matters changes, and that name no job
but those of its own owner in its own project: whoever sees this job sees those. Hosts are open to a job if they take
jobs and are not kept for another.
"""

from __future__ import annotations

from jobs.queue.scheduling.pool import Pool
from jobs.queue.scheduling.states import HostState, Waiting

LONGEST = 500
NEAR = 10  # with fewer ahead, the text counts free slots and jobs; further behind it would change all the time
NAMED = 2  # hosts of a set; the others are counted


def reason(job: Waiting, pool: Pool, ahead: int, first: Waiting | None) -> str:
    """Why it was not placed. `ahead` jobs of its device go before it and fit hosts; `first` of them."""
    text = _never(job, pool) or (_pinned(job, pool) if job.wanted_host else _anywhere(job, pool, ahead, first))
    return text[:LONGEST]


def _never(job: Waiting, pool: Pool) -> str:
    """Why no hosts that are there could take it, or nothing."""
    if pool.fits(job):
        return ""
    if job.wanted_host:
        return _never_there(job, pool)
    device, which = pool.device, _which(job)
    asked = [host for host in pool.hosts.values() if host.is_asked_for_by(job)]
    heard = [host for host in asked if host.live]
    if not heard:
        none = f"no {device} host{which} is"
        return f"{none} heard: {pool.trouble}" if pool.trouble and asked else f"{none} connected"
    taking = [host for host in heard if host.takes_jobs]
    if not taking:
        why = {_closed(host) for host in heard}
        return f"every {device} host{which} {' or '.join(sorted(why))} and takes no new jobs"
    may = pool.ground(job).hosts
    if not may:
        return f"every {device} host{which} that takes jobs is reserved for another project"
    unit = min(job.units)
    largest = max(pool.taking[name].slots for name in may)
    is_all = len(may) == len([host for host in pool.hosts.values() if host.is_asked_for_by(job)])
    now = "" if is_all else " that takes jobs now"
    if _on_one(job, pool):
        return f"{_needs(job, pool)}; the largest{now} has {largest}"
    if unit > largest:
        group = f"but its tensor-parallel group of {unit} stays on one"
        return f"{_needs(job, pool)}, {group}; the largest{now} has {largest}"
    models = [[pool.taking[name].slots for name in names] for names in pool.ground(job).by_model]
    most = max(job.demand.most(sizes, unit) for sizes in models)
    return f"{_needs(job, pool)}; those of one model{now.replace('takes', 'take')} have {most} so"


def _never_there(job: Waiting, pool: Pool) -> str:
    wanted = f"{job.wanted_host}, the one host it asks for,"
    if not any(host.live for host in pool.hosts.values()):
        device = pool.device
        none = f"no {device} host is"
        return f"{none} heard: {pool.trouble}" if pool.trouble and pool.hosts else f"{none} connected"
    host = pool.hosts.get(job.wanted_host)
    if host is None:
        return f"{wanted} is no {pool.device} host that has joined"
    if not host.live:
        return f"{wanted} is not heard: {pool.trouble}" if pool.trouble else f"{wanted} is not connected"
    if not host.takes_jobs:
        return f"{wanted} {_closed(host)} and takes no new jobs"
    if not host.is_asked_for_by(job):
        return f"{wanted} is no host{_which(job)}"
    if host.is_reserved_from(job):
        return f"{wanted} is reserved for another project"
    return f"needs {_slots(job.num_slots)}; {wanted} has {host.slots}"


def _closed(host: HostState) -> str:
    return "is drained" if host.drained else f"is in pool {host.paused}, which is paused,"


def _which(job: Waiting) -> str:
    """' of pool big with labels a, b', or nothing."""
    pool = f" of pool {job.pool}" if job.pool else ""
    if not job.labels:
        return pool
    return f"{pool} with label{'s' if len(job.labels) > 1 else ''} {', '.join(sorted(job.labels))}"


def _on_one(job: Waiting, pool: Pool) -> bool:
    """Whether it can only be on one host: it asks for that, or there are no two of a model."""
    return job.max_hosts == 1 or all(len(names) < 2 for names in pool.ground(job).by_model)


def _needs(job: Waiting, pool: Pool) -> str:
    if _on_one(job, pool):
        return f"needs {_slots(job.num_slots)} on one {pool.device} host{_which(job)}"
    least = min(job.units)
    parts = f", {least} or a multiple of it on each" if least > 1 else ""
    most = f"at most {job.max_hosts} " if job.max_hosts else ""
    return f"needs {_slots(job.num_slots)} on {most}{pool.device} hosts{_which(job)}{parts}"


def _pinned(job: Waiting, pool: Pool) -> str:
    name = job.wanted_host
    needs = f"needs {_slots(job.num_slots)} on {name}, the one host it asks for; {_free(pool, (name,))}"
    holder = pool.holders[name]
    return f"{needs} and is kept for {'it' if holder is job else f'a job ahead that needs {_slots(holder.num_slots)}'}"


def _anywhere(job: Waiting, pool: Pool, ahead: int, first: Waiting | None) -> str:
    needs = _needs(job, pool)
    if names := pool.kept.get(job.id):
        return f"{needs}; {_free(pool, names)} and {'is' if len(names) == 1 else 'are'} kept for it"
    if ahead >= NEAR:
        none = "none open to it has as many free" if _on_one(job, pool) else "those open to it have fewer free"
        return f"{needs}; {none}; at least {_about(ahead)} jobs are ahead"
    if first is None:
        return f"{needs}; {_most_free(job, pool)}"
    name = f" ({first.name})" if (first.owner, first.project) == (job.owner, job.project) else ""
    before = f"1 job{name} is ahead and" if ahead == 1 else f"{ahead} jobs are ahead, the first{name}"
    return f"{needs}; {_most_free(job, pool)}; {before} needs {_slots(first.num_slots)}"


def _most_free(job: Waiting, pool: Pool) -> str:
    most = pool.most_open(job)
    if most is None:
        return "none is open to it now"
    if _on_one(job, pool):
        return f"of those open to it {_free(pool, (most,))}, the most"
    unit = pool.unit(job)
    assert unit is not None, "what no hosts could hold has another reason"
    return f"those of one model open to it have {pool.open_slots(job, unit)} free so"


def _free(pool: Pool, names: tuple[str, ...]) -> str:
    free = sum(len(pool.free[name]) for name in names)
    slots = sum(pool.taking[name].slots for name in names)
    told = ", ".join(names[:NAMED])
    if len(names) > NAMED:
        told += f" and {len(names) - NAMED} more"
    return f"{told} {'has' if len(names) == 1 else 'have'} {free} of {slots} free"


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"


def _about(count: int) -> int:
    """The largest of 10, 20, 50, 100, 200, ... that is not above the count."""
    step: int = 10 ** (len(str(count)) - 1)
    return max(step * factor for factor in (1, 2, 5) if step * factor <= count)
