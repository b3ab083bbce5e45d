"""Specs whose every field is allowed, but not their product: too long to plan, or too large for any message."""

from __future__ import annotations

from planner.cost.estimate import stage_estimates
from planner.facts.kinds import KINDS
from planner.facts.layout import SCHEDULE_NAMES
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobSpec
from planner.facts.validation import Problem, SpecError

MOST_CHUNKS = 2**21  # whose times a schedule is made of: seconds of work at most, hundreds of times the published ones
# Of schedules that run all forwards first and never repeat themselves: each moment is walked for memory, 7 s of a core.
RISING, MOST_RISING = ("gpipe", "looped_bfs"), 2**17
LARGEST_BYTES = 2**63 - 1  # what msgpack and a database integer hold


def parse_plannable(data: object, *, slots: int | None = None) -> JobSpec:
    """Like `parse_spec`, for who plans what was asked for before it runs.

    Raises:
        SpecError: with every problem found, each naming its field and showing the arithmetic.
    """
    spec = parse_spec(data, slots=slots)
    if found := oversize(spec):
        raise SpecError(found)
    return spec


def oversize(spec: JobSpec) -> list[Problem]:
    """Return problems of a spec whose plan takes too long or whose messages are too large.

    Kinds without a planned step, such as scripts, have no such problem: their batch is not read.
    """
    if not KINDS[spec.kind].trains:
        return []
    pp, m, v = spec.layout.pp, spec.train.micro_batches, spec.layout.virtual_stages
    rises = pp > 1 and spec.layout.schedule in RISING
    most, of = (MOST_RISING, f" of {SCHEDULE_NAMES[spec.layout.schedule]}") if rises else (MOST_CHUNKS, "")
    if pp * m * v > most:
        product = f"pp {pp} x micro_batches {m} x virtual_stages {v} = {pp * m * v:,}"
        return [
            Problem(
                "train.micro_batches",
                f"`train.micro_batches` is {m}, so {product} actions per step. Use at most {most:,} actions{of}.",
            )
        ]
    stages = stage_estimates(spec)
    needed = max(stage["memory_bytes"] for stage in stages)
    sent = max((row["payload_bytes"] for stage in stages for row in stage["traffic"]), default=0)
    if max(needed, sent) <= LARGEST_BYTES:
        return []
    text = f"`model` needs {needed:.1e} bytes of memory and {sent:.1e} bytes of traffic per rank and step"
    return [Problem("model", f"{text}. Use at most {LARGEST_BYTES:.1e} bytes.")]
