"""Who holds what before and after, as boxes: the tensors a run captured, and where each value came from."""

from __future__ import annotations

from typing import Any, NamedTuple

from jobs.lab.stages import Rows, moving
from planner.facts.lab import LabHolding, LabResult, LabStep

BOX, HEIGHT, ROW = 46, 30, 42  # of the viewBox; the page scales it
LABEL, ARROW, TOP = 64, 72, 26
TRACK = 420  # a barrier's time line
COLOURS = 16
COMBINED = "combined"
REDUCING = ("reduce", "all_reduce", "reduce_scatter")


class Box(NamedTuple):
    """One element. `origin` is the place in the group it came from, or COMBINED."""

    x: int
    text: str
    title: str
    origin: str


class Row(NamedTuple):
    """A rank's line of the picture and of the table beside it."""

    rank: int
    y: int
    before: list[Box]
    after: list[Box]
    before_text: str
    after_text: str


class Picture(NamedTuple):
    width: int
    height: int
    after_x: int
    rows: list[Row]
    legend: list[tuple[str, str]]  # (origin, words)


class Span(NamedTuple):
    """When a rank came to a barrier and when it left, in microseconds and in the picture."""

    rank: int
    y: int
    x: float
    width: float
    came_us: float
    left_us: float


def tensors(result: LabResult, step: LabStep) -> Picture:
    """Boxes of every rank's tensors."""
    longest = max((len(h.before or ()) for h in step.holdings), default=0)
    after_x = LABEL + max(1, longest) * BOX + ARROW
    rows = []
    for place, holding in enumerate(step.holdings):
        before = _boxes(LABEL, holding.before, [str(place % COLOURS)] * len(holding.before or ()), holding.rank)
        origins = [_origin(result, step, holding, i) for i in range(len(holding.after or ()))]
        after = _boxes(after_x, holding.after, origins, holding.rank)
        texts = _text(holding.before), _text(holding.after)
        rows.append(Row(holding.rank, TOP + place * ROW, before, after, *texts))
    widest = max((len(row.after) for row in rows), default=0)
    legend = [(str(place % COLOURS), f"of rank {h.rank}") for place, h in enumerate(step.holdings)]
    if any(box.origin == COMBINED for row in rows for box in row.after):
        legend.append((COMBINED, "combined of several ranks"))
    return Picture(after_x + max(1, widest) * BOX + 2, TOP + len(rows) * ROW, after_x, rows, legend)


def film(result: LabResult, step: LabStep) -> dict[str, Any] | None:
    """What js/lab/film.js plays, None where there is nothing to see moving."""
    told = _moments(step) if step.primitive == "barrier" else _stages(result, step)
    return told and {"kind": step.primitive, "ranks": [holding.rank for holding in step.holdings], **told}


def _stages(result: LabResult, step: LabStep) -> dict[str, Any] | None:
    found = moving(result, step)
    if found is None:
        return None

    def drawn(rows: Rows) -> list[list[list[str] | None]]:
        return [
            [None if value is None else [_value(value), _whose(result, step, place, value)] for value in row]
            for place, row in enumerate(rows)
        ]

    given = any(stage.given for stage in found.stages)
    return {
        "algorithm": found.algorithm,
        "agrees": found.agrees,
        "given": drawn([list(holding.before or ()) for holding in step.holdings]) if given else None,
        "start": drawn(found.start),
        "stages": [
            {
                "words": stage.words,
                "given": stage.given,
                "moves": [[m.source, m.target, m.source_index, m.target_index] for m in stage.moves],
                "rows": drawn(stage.rows),
            }
            for stage in found.stages
        ],
    }


def _whose(result: LabResult, step: LabStep, place: int, value: float) -> str:
    """The place in the group whose value it is, or COMBINED: of a sum under way a rank's own alone is told apart."""
    if step.primitive in REDUCING and result.reduce_op == "sum":
        return str(place % COLOURS) if value in (step.holdings[place].before or ()) else COMBINED
    holders = [other for other in step.holdings if value in (other.before or ())]
    return str(step.holdings.index(holders[0]) % COLOURS) if holders else COMBINED


def _moments(step: LabStep) -> dict[str, Any]:
    """A barrier's comings and goings in the order of time."""
    known = spans(step)
    moments = [(span.came_us, True, span.rank) for span in known] + [(span.left_us, False, span.rank) for span in known]
    stages, inside = [], 0
    for at, comes, rank in sorted(moments, key=lambda moment: (moment[0], not moment[1])):
        inside += 1 if comes else -1
        waiting = f"{inside} of {len(known)} inside" if inside else "all have gone on"
        stages.append(
            {"words": f"rank {rank} {'comes' if comes else 'goes on'} after {at:.1f} µs: {waiting}", "at": at}
        )
    return {"spans": [[span.came_us, span.left_us] for span in known], "stages": stages}


def spans(step: LabStep) -> list[Span]:
    """A barrier's ranks on a time line, the first one's coming at its start."""
    known = [(h.rank, (h.before or (0.0,))[0], (h.after or (0.0,))[0]) for h in step.holdings]
    scale = TRACK / (max(left for _, _, left in known) or 1)  # a host may say that it took no time
    return [
        Span(rank, place * ROW, LABEL + came * scale, max(1.0, (left - came) * scale), came, left)
        for place, (rank, came, left) in enumerate(known)
    ]


def _boxes(x: int, values: tuple[float, ...] | None, origins: list[str], rank: int) -> list[Box]:
    return [
        Box(x + i * BOX, _value(value), f"element {i} on rank {rank}: {_value(value)}", origin)
        for i, (value, origin) in enumerate(zip(values or (), origins, strict=True))
    ]


def _origin(result: LabResult, step: LabStep, holding: LabHolding, index: int) -> str:
    """Whose value this is. What a sum left alone is the rank's own; every other value of a sum is combined."""
    assert holding.after is not None
    value, before = holding.after[index], holding.before or ()
    if step.primitive in REDUCING and result.reduce_op == "sum":
        holders = [holding] if index < len(before) and before[index] == value else []
    else:
        holders = [other for other in step.holdings if value in (other.before or ())]
    return str(step.holdings.index(holders[0]) % COLOURS) if holders else COMBINED


def _text(values: tuple[float, ...] | None) -> str:
    return "nothing" if values is None else ", ".join(map(_value, values))


def _value(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:g}"
