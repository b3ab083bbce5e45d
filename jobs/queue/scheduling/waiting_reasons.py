"""Explain why a job waits.

A reason changes only if its facts change. It names another job only if that job has the same owner and project,
because users who see one of them see both. A host is available if it takes jobs and is not kept for another job.
"""

from __future__ import annotations

from jobs.queue.scheduling.slot_allocator import SlotAllocator
from jobs.queue.scheduling.states import HostState, QueuedJob

MAX_EXACT_JOBS_AHEAD = 10  # behind more jobs, exact numbers would change in each pass
MAX_LISTED_HOSTS = 2


def explain_wait(job: QueuedJob, allocator: SlotAllocator, ahead: int, first: QueuedJob | None) -> str:
    """Return why the job was not placed.

    Args:
        ahead: Number of jobs for the device that are ahead and fit hosts.
        first: First of the jobs ahead.
    """
    if not allocator.can_fit(job):
        return _explain_impossible_host(job, allocator) if job.wanted_host else _explain_impossible(job, allocator)
    if job.wanted_host:
        return _explain_blocked_host(job, allocator)
    return _explain_blocked(job, allocator, ahead, first)


def put_fact_first(text: str) -> str:
    """Return a reason with its first sentence last, if that sentence only repeats what the job needs.

    A narrow column of a table shows only the first words.
    """
    needs, end, facts = text.partition(". ")
    return f"{facts} {needs}." if end and needs.startswith("The job needs ") else text


def _explain_impossible(job: QueuedJob, allocator: SlotAllocator) -> str:
    """Return why no connected host could ever take the job."""
    which = _format_conditions(job)
    matching = [host for host in allocator.hosts.values() if host.matches(job)]
    connected = [host for host in matching if host.live]
    if not connected:
        return _format_no_contact(
            f"No {_format_device(allocator)} host{which}", allocator.trouble if matching else "", "is"
        )
    taking = [host for host in connected if host.takes_jobs]
    if not taking:
        why = {_format_closed(host) for host in connected}
        return f"Every {_format_device(allocator)} host{which} is {' or '.join(sorted(why))}."
    eligible = allocator.get_eligible(job).names
    if not eligible:
        return f"Every available {_format_device(allocator)} host{which} is reserved for another project."
    unit = min(job.units)
    largest = max(allocator.taking[name].slots for name in eligible)
    is_all = len(eligible) == len(matching)
    largest_has = f"The largest {'' if is_all else 'available '}host has {_format_slots(largest)}."
    if _needs_one_host(job, allocator):
        return f"{_format_needs(job, allocator)} {largest_has}"
    if unit > largest:
        return (
            f"{_format_needs(job, allocator)} Each tensor-parallel group of {unit} ranks needs one host. {largest_has}"
        )
    models = [[allocator.taking[name].slots for name in names] for names in allocator.get_eligible(job).by_model]
    most = max(job.demand.get_max_slots(sizes, unit) for sizes in models)
    which = "Hosts" if is_all else "Available hosts"
    return f"{_format_needs(job, allocator)} {which} of the same hardware model have {most} usable slots."


def _explain_impossible_host(job: QueuedJob, allocator: SlotAllocator) -> str:
    wanted = f"The required host {job.wanted_host}"
    if not any(host.live for host in allocator.hosts.values()):
        return _format_no_contact(
            f"No {_format_device(allocator)} host", allocator.trouble if allocator.hosts else "", "is"
        )
    host = allocator.hosts.get(job.wanted_host)
    if host is None:
        return f"{wanted} is not a {_format_device(allocator)} host of this board."
    if not host.live:
        return _format_no_contact(wanted, allocator.trouble, "is not")
    if not host.takes_jobs:
        return f"{wanted} is {_format_closed(host)}."
    if not host.matches(job):
        return f"{wanted} does not belong to the requested hosts{_format_conditions(job)}."
    if host.is_reserved_for_others(job):
        return f"{wanted} is reserved for another project."
    return f"The job needs {_format_slots(job.num_slots, allocator)}. {wanted} has {_format_slots(host.slots)}."


def _format_no_contact(subject: str, trouble: str, verb: str) -> str:
    """Return that the hosts have no contact. `trouble` is the cause if the board itself has a problem."""
    return (
        f"{subject} {verb} in contact with the board, because {trouble}." if trouble else f"{subject} {verb} connected."
    )


def _format_closed(host: HostState) -> str:
    if host.drained:
        return "drained"
    return f"in the paused pool {host.paused}" if host.paused else "closed, because launches on the host would fail"


def _format_device(allocator: SlotAllocator) -> str:
    return allocator.device.upper()


def _format_conditions(job: QueuedJob) -> str:
    """Return the pool and labels of the job, such as " of pool big with labels a, b", or an empty text."""
    pool = f" of pool {job.pool}" if job.pool else ""
    if not job.labels:
        return pool
    return f"{pool} with label{'s' if len(job.labels) > 1 else ''} {', '.join(sorted(job.labels))}"


def _needs_one_host(job: QueuedJob, allocator: SlotAllocator) -> bool:
    """Return whether the job needs one host: by its spec, or because no two hosts have the same model."""
    return job.max_hosts == 1 or all(len(names) < 2 for names in allocator.get_eligible(job).by_model)


def _format_needs(job: QueuedJob, allocator: SlotAllocator) -> str:
    slots = _format_slots(job.num_slots, allocator)
    if _needs_one_host(job, allocator):
        return f"The job needs {slots} on one host{_format_conditions(job)}."
    least = min(job.units)
    parts = f", in multiples of {least} per host" if least > 1 else ""
    most = f"at most {job.max_hosts} " if job.max_hosts else ""
    return f"The job needs {slots} on {most}hosts{_format_conditions(job)}{parts}."


def _explain_blocked_host(job: QueuedJob, allocator: SlotAllocator) -> str:
    name = job.wanted_host
    slots, free = _format_slots(job.num_slots, allocator), _format_free(allocator, (name,))
    needs = f"The job needs {slots} on the required host. {free}"
    holder = allocator.holders[name]
    return needs if holder is job else f"{needs} A job ahead needs {_format_slots(holder.num_slots)} on this host."


def _explain_blocked(job: QueuedJob, allocator: SlotAllocator, ahead: int, first: QueuedJob | None) -> str:
    needs = _format_needs(job, allocator)
    if names := allocator.head_hosts.get(job.id):
        return f"{needs} {_format_free(allocator, names)}"
    if ahead >= MAX_EXACT_JOBS_AHEAD:
        one = "No available host has enough free slots."
        none = one if _needs_one_host(job, allocator) else "Available hosts have too few free slots."
        return f"{needs} {none} At least {_round_down_count(ahead)} jobs are ahead."
    if first is None:
        return f"{needs} {_format_most_free(job, allocator)}"
    is_visible = (first.owner, first.project) == (job.owner, job.project)
    first_needs = f"needs {_format_slots(first.num_slots)}."
    if ahead == 1:
        one = f'Job "{first.name}"' if is_visible else "1 job"
        before = f"{one} is ahead and {first_needs}"
    else:
        name = f', "{first.name}",' if is_visible else ""
        before = f"{ahead} jobs are ahead. The first{name} {first_needs}"
    return f"{needs} {_format_most_free(job, allocator)} {before}"


def _format_most_free(job: QueuedJob, allocator: SlotAllocator) -> str:
    most = allocator.find_most_open(job)
    if most is None:
        return "Each matching host is kept for a job ahead."
    if _needs_one_host(job, allocator):
        return f"Host {most} has the most free slots: {len(allocator.free[most])} of {allocator.taking[most].slots}."
    unit = allocator.get_unit(job)
    assert unit is not None, "explain_wait() already reported jobs that fit no hosts"
    return (
        f"Available hosts of the same hardware model have {_format_slots(allocator.count_open_slots(job, unit))} free."
    )


def _format_free(allocator: SlotAllocator, names: tuple[str, ...]) -> str:
    free = sum(len(allocator.free[name]) for name in names)
    slots = sum(allocator.taking[name].slots for name in names)
    listed = ", ".join(names[:MAX_LISTED_HOSTS])
    if len(names) > MAX_LISTED_HOSTS:
        listed += f" and {len(names) - MAX_LISTED_HOSTS} more"
    subject = f"Host {listed} has" if len(names) == 1 else f"Hosts {listed} have"
    return f"{subject} {free} of {slots} slots free."


def _format_slots(count: int, allocator: SlotAllocator | None = None) -> str:
    """Return the count with its unit, such as "4 slots", or "4 CPU slots" with an allocator."""
    device = f"{_format_device(allocator)} " if allocator else ""
    return f"{count} {device}{'slot' if count == 1 else 'slots'}"


def _round_down_count(count: int) -> int:
    """Return the largest of 10, 20, 50, 100, 200, ... that is at most the count."""
    step: int = 10 ** (len(str(count)) - 1)
    return max(step * factor for factor in (1, 2, 5) if step * factor <= count)
