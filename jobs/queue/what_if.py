"""Answer what would start now with more slots, a resumed pool, or another priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jobs.core.text import is_storable, parse_whole_number
from jobs.models import Pool
from jobs.queue.scheduling.forecast import started_if
from jobs.queue.scheduling.placement import decide
from jobs.queue.scheduling.states import HostState
from jobs.queue.staff_actions import HIGHEST, LOWEST
from jobs.queue.view import View
from planner.facts.validation import Problem, SpecError

NAMES = ("slots", "pool", "job", "priority")


MOST_SLOTS = 65536


class Question(NamedTuple):
    """Of each what is not asked is empty; a job is asked of together with its priority."""

    slots: int = 0  # of a host that joins each model
    pool: str = ""  # that is paused, and would go on
    job: str = ""
    priority: int = 0


def asked(given: Mapping[str, str], seen: View) -> Question:
    """What a query asks; what stands there empty was not given.

    Raises:
        SpecError: naming every part that makes no sense, or that nothing was asked.
    """
    told = {name: given[name].strip() for name in NAMES if given.get(name, "").strip()}
    slots = parse_whole_number(told.get("slots", "0"), 0, MOST_SLOTS)
    priority = _priority(told.get("priority", "0"))
    pool, job = told.get("pool", ""), told.get("job", "")
    problems = []
    if slots is None:
        problems.append(Problem("slots", f"`slots` is invalid. Use a whole number from 0 to {MOST_SLOTS}."))
    if priority is None:
        problems.append(Problem("priority", f"`priority` is invalid. Use a whole number from {LOWEST} to {HIGHEST}."))
    if pool and not (is_storable(pool) and Pool.objects.filter(name=pool).exists()):
        problems.append(Problem("pool", "The pool does not exist."))
    if job and job not in {queued.job.id for queued in seen.queue}:
        problems.append(Problem("job", "The job does not exist, or is not queued."))
    if ("job" in told) != ("priority" in told):
        missing, other = ("priority", "job") if "job" in told else ("job", "priority")
        problems.append(Problem(missing, f"`{missing}` is missing. Set `{missing}` and `{other}` together."))
    if not told:
        problems.append(
            Problem("slots", "The request changes nothing. Set `slots`, `pool`, or `job` together with `priority`.")
        )
    if problems or slots is None or priority is None:
        raise SpecError(problems)
    return Question(slots, pool, job, priority)


def would_start(seen: View, question: Question) -> list[str]:
    """Jobs that would start now if it were so; those that start anyway are left out."""
    free = [queued.job for queued in seen.queue if not queued.bar]
    now = decide(free, seen.hosts, quotas=seen.quotas)
    hosts = [host._replace(paused="" if host.paused == question.pool else host.paused) for host in seen.hosts]
    if question.slots:
        models = {(host.device, host.device_name): host for host in hosts}
        indices = tuple(range(question.slots))
        hosts += [
            HostState(f"one more {name or device}", device, question.slots, indices, device_name=name)
            for device, name in models
        ]
    priority = question.priority
    changed = [
        each._replace(priority=priority, standing=each.standing - each.priority + priority)
        if each.id == question.job
        else each
        for each in free
    ]
    return started_if(changed, hosts, seen.quotas, otherwise=now)


def _priority(text: str) -> int | None:
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    number = parse_whole_number(digits, 0, HIGHEST)
    return None if number is None else sign * number
