"""Whether some host's memory holds the buffers of a lab, which has no estimate."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.planning.there import There
from planner.facts.collectives import FULL_BUFFERS, compute_lab_sizes, count_full_buffers, get_lab_ranks
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, format_count

GIB = 2**30


def lab_memory_problems(spec: JobSpec, there: Sequence[There]) -> list[Problem]:
    """Why no host can run it, with the arithmetic; nothing while none is known that has its slots and tells its memory.

    Ranks share a machine's memory, and have a GPU each. `there`: `hosts_there`.
    """
    if spec.lab is None:  # another kind, or the usual sizes, which are small
        return []
    ranks, each = len(get_lab_ranks(spec)), spec.resources.device == "cuda"
    size = max(compute_lab_sizes(spec.lab, ranks), default=0)
    many = {name: 1 if each else count_full_buffers(name, ranks) for name in spec.lab.primitives}
    fullest = max(many, key=lambda name: many[name] * FULL_BUFFERS[name])
    needed = many[fullest] * FULL_BUFFERS[fullest] * size
    largest = _largest(spec, there, each)
    if largest is None or needed <= largest[0]:
        return []
    memory, where = largest
    shared = "" if each else f"{format_count(many[fullest], 'rank')} x "
    held = f"{shared}{format_count(FULL_BUFFERS[fullest], 'full buffer')} of {fullest} x {size:,} B"
    text = (
        f"The benchmark needs {needed / GIB:,.1f} GiB ({held}), "
        f"but {where} has {memory / GIB:,.1f} GiB. Use a smaller `lab.max_bytes`."
    )
    return [Problem("lab.max_bytes", text)]


def _largest(spec: JobSpec, there: Sequence[There], each: bool) -> tuple[int, str] | None:
    """The most memory that the lab could have, and whose; None where that is not known of all that could run it."""
    wanted, slots = spec.resources.host, spec.layout.world_size
    able = [
        host
        for host in there
        if host.device == spec.resources.device and host.slots >= slots and wanted in (None, host.name)
    ]
    if not able or not all(host.memory_bytes for host in able):
        return None
    most = max(able, key=lambda host: host.memory_bytes * (1 if each else host.slots))
    return most.memory_bytes * (1 if each else most.slots), f"a GPU of {most.name}" if each else most.name
