"""Write the reason that a job waits.

A reason changes only if its facts change. It names another job only if that job has the same owner and project,
because users who see one of them see both. A host is available if it takes jobs and is not kept for another job.

Writes why jobs wait, of thousands at once.
"""

from __future__ import annotations

from jobs.queue.scheduling.slot_allocator import SlotAllocator
from jobs.queue.scheduling.states import HostState, QueuedJob

LONGEST = 500
NEAR = 10  # with fewer ahead, the text counts free slots and jobs; further behind it would change all the time
NAMED = 2  # hosts of a set; the others are counted


def explain_wait(job: QueuedJob, pool: SlotAllocator, ahead: int, first: QueuedJob | None) -> str:
    """Return why the job was not placed.

    Args:
        job: The waiting job.
        pool: Hosts of its device.
        ahead: Number of jobs of its device that are ahead and fit hosts.
        first: First of the jobs ahead.
    """
    text = _never(job, pool) or (_pinned(job, pool) if job.wanted_host else _anywhere(job, pool, ahead, first))
    return text[:LONGEST]


def put_fact_first(text: str) -> str:
    """Return a reason with its first sentence last, if that sentence only repeats what the job needs.

    A narrow column of a table shows only the first words.
    """
    needs, end, facts = text.partition(". ")
    return f"{facts} {needs}." if end and needs.startswith("The job needs ") else text


def _never(job: QueuedJob, pool: SlotAllocator) -> str:
    """Return why no connected host could ever take the job, or an empty text."""
    if pool.fits(job):
        return ""
    if job.wanted_host:
        return _never_there(job, pool)
    which = _which(job)
    asked = [host for host in pool.hosts.values() if host.matches(job)]
    heard = [host for host in asked if host.live]
    if not heard:
        return _not_connected(f"No {_device(pool)} host{which}", pool.trouble if asked else "", "is")
    taking = [host for host in heard if host.takes_jobs]
    if not taking:
        why = {_closed(host) for host in heard}
        return f"Every {_device(pool)} host{which} is {' or '.join(sorted(why))}."
    may = pool.ground(job).hosts
    if not may:
        return f"Every available {_device(pool)} host{which} is reserved for another project."
    unit = min(job.units)
    largest = max(pool.taking[name].slots for name in may)
    is_all = len(may) == len(asked)
    largest_has = f"The largest {'' if is_all else 'available '}host has {_slots(largest)}."
    if _on_one(job, pool):
        return f"{_needs(job, pool)} {largest_has}"
    if unit > largest:
        return f"{_needs(job, pool)} Each tensor-parallel group of {unit} ranks needs one host. {largest_has}"
    models = [[pool.taking[name].slots for name in names] for names in pool.ground(job).by_model]
    most = max(job.demand.get_max_slots(sizes, unit) for sizes in models)
    which = "Hosts" if is_all else "Available hosts"
    return f"{_needs(job, pool)} {which} of the same hardware model have {most} usable slots."


def _never_there(job: QueuedJob, pool: SlotAllocator) -> str:
    wanted = f"The required host {job.wanted_host}"
    if not any(host.live for host in pool.hosts.values()):
        return _not_connected(f"No {_device(pool)} host", pool.trouble if pool.hosts else "", "is")
    host = pool.hosts.get(job.wanted_host)
    if host is None:
        return f"{wanted} is not a {_device(pool)} host of this board."
    if not host.live:
        return _not_connected(wanted, pool.trouble, "is not")
    if not host.takes_jobs:
        return f"{wanted} is {_closed(host)}."
    if not host.matches(job):
        return f"{wanted} does not belong to the requested hosts{_which(job)}."
    if host.is_reserved_for_others(job):
        return f"{wanted} is reserved for another project."
    return f"The job needs {_slots(job.num_slots, pool)}. {wanted} has {_slots(host.slots)}."


def _not_connected(subject: str, trouble: str, verb: str) -> str:
    """Return that the hosts have no contact. `trouble` is the cause if the board itself has a problem."""
    return (
        f"{subject} {verb} in contact with the board, because {trouble}." if trouble else f"{subject} {verb} connected."
    )


def _closed(host: HostState) -> str:
    return "drained" if host.drained else f"in the paused pool {host.paused}"


def _device(pool: SlotAllocator) -> str:
    return pool.device.upper()


def _which(job: QueuedJob) -> str:
    """Return the pool and labels of the job, such as " of pool big with labels a, b", or an empty text."""
    pool = f" of pool {job.pool}" if job.pool else ""
    if not job.labels:
        return pool
    return f"{pool} with label{'s' if len(job.labels) > 1 else ''} {', '.join(sorted(job.labels))}"


def _on_one(job: QueuedJob, pool: SlotAllocator) -> bool:
    """Return whether the job needs one host: by its spec, or because no two hosts have the same model."""
    return job.max_hosts == 1 or all(len(names) < 2 for names in pool.ground(job).by_model)


def _needs(job: QueuedJob, pool: SlotAllocator) -> str:
    slots = _slots(job.num_slots, pool)
    if _on_one(job, pool):
        return f"The job needs {slots} on one host{_which(job)}."
    least = min(job.units)
    parts = f", in multiples of {least} per host" if least > 1 else ""
    most = f"at most {job.max_hosts} " if job.max_hosts else ""
    return f"The job needs {slots} on {most}hosts{_which(job)}{parts}."


def _pinned(job: QueuedJob, pool: SlotAllocator) -> str:
    name = job.wanted_host
    needs = f"The job needs {_slots(job.num_slots, pool)} on the required host. {_free(pool, (name,))}"
    holder = pool.holders[name]
    return needs if holder is job else f"{needs} A job ahead needs {_slots(holder.num_slots)} on this host."


def _anywhere(job: QueuedJob, pool: SlotAllocator, ahead: int, first: QueuedJob | None) -> str:
    needs = _needs(job, pool)
    if names := pool.head_hosts.get(job.id):
        return f"{needs} {_free(pool, names)}"
    if ahead >= NEAR:
        one = "No available host has enough free slots."
        none = one if _on_one(job, pool) else "Available hosts have too few free slots."
        return f"{needs} {none} At least {_about(ahead)} jobs are ahead."
    if first is None:
        return f"{needs} {_most_free(job, pool)}"
    named = (first.owner, first.project) == (job.owner, job.project)
    first_needs = f"needs {_slots(first.num_slots)}."
    if ahead == 1:
        one = f'Job "{first.name}"' if named else "1 job"
        before = f"{one} is ahead and {first_needs}"
    else:
        name = f', "{first.name}",' if named else ""
        before = f"{ahead} jobs are ahead. The first{name} {first_needs}"
    return f"{needs} {_most_free(job, pool)} {before}"


def _most_free(job: QueuedJob, pool: SlotAllocator) -> str:
    most = pool.most_open(job)
    if most is None:
        return "Each matching host is kept for a job ahead."
    if _on_one(job, pool):
        return f"Host {most} has the most free slots: {len(pool.free[most])} of {pool.taking[most].slots}."
    unit = pool.unit(job)
    assert unit is not None, "_never() already reported jobs that fit no hosts"
    return f"Available hosts of the same hardware model have {_slots(pool.open_slots(job, unit))} free."


def _free(pool: SlotAllocator, names: tuple[str, ...]) -> str:
    free = sum(len(pool.free[name]) for name in names)
    slots = sum(pool.taking[name].slots for name in names)
    listed = ", ".join(names[:NAMED])
    if len(names) > NAMED:
        listed += f" and {len(names) - NAMED} more"
    subject = f"Host {listed} has" if len(names) == 1 else f"Hosts {listed} have"
    return f"{subject} {free} of {slots} slots free."


def _slots(count: int, pool: SlotAllocator | None = None) -> str:
    """Return the count with its unit, such as "4 slots", or "4 CPU slots" with a pool."""
    device = f"{_device(pool)} " if pool else ""
    return f"{count} {device}{'slot' if count == 1 else 'slots'}"


def _about(count: int) -> int:
    """The largest of 10, 20, 50, 100, 200, ... that is not above the count."""
    step: int = 10 ** (len(str(count)) - 1)
    return max(step * factor for factor in (1, 2, 5) if step * factor <= count)
