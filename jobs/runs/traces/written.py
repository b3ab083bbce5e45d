"""What a slice of a trace says, alike in every format."""

from __future__ import annotations

from jobs.runs.traces.arrivals import Arrival
from jobs.runs.traces.shapes import Call, Span

Said = dict[str, int | float | str]


def title(event: Call | Span) -> str:
    """'forward 3' of micro-batch 3, 'all_reduce'."""
    if isinstance(event, Call):
        return event.op
    return event.work if event.micro_batch < 0 else f"{event.work} {event.micro_batch}"


def said(event: Call | Span, arrival: Arrival | None) -> Said:
    """Figures of an event. Microseconds and payload bytes, as the names tell."""
    if isinstance(event, Span):
        return {"step": event.step, "chunk": event.chunk, "micro_batch": event.micro_batch}
    told: Said = {
        "step": event.step,
        "axis": event.axis,
        "ranks": ", ".join(map(str, event.ranks)),
        "sequence": event.sequence,
        "payload_bytes": event.payload_bytes,
        "exposed_us": round(event.blocked_s * 1e6, 3),
    }
    if event.peer >= 0:
        told["peer"] = event.peer
    if event.ended is None:
        told["end"] = "not recorded"
    if arrival is not None:
        whole = arrival.time if event.ended is None else min(arrival.time, event.ended)
        told |= {"waited_us": round(max(0.0, whole - event.issued) * 1e6, 3), "last_rank": arrival.rank}
    return told
