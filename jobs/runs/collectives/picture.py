"""Draw a collective: the tensors of each rank before and after, colored by the rank of each value."""

from __future__ import annotations

from typing import Any, NamedTuple

from jobs.runs.collectives.stages import CollectiveSettings, GroupValues, simulate_collective
from planner.facts.collectives import LabStep

BOX, HEIGHT, ROW = 46, 30, 42  # units of the viewBox
LABEL, ARROW, TOP = 64, 72, 26
TRACK = 420  # width of the time axis of a barrier
NUM_COLORS = 16
COMBINED = "combined"
REDUCING = ("reduce", "all_reduce", "reduce_scatter")


class Box(NamedTuple):
    """Draw one element. `origin`: index in the group of the rank that sent the value, or COMBINED."""

    x: int
    text: str
    title: str
    origin: str


class PictureRow(NamedTuple):
    """Show one rank in the picture and in its table."""

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
    rows: list[PictureRow]
    legend: list[tuple[str, str]]  # (origin, words)


class BarrierSpan(NamedTuple):
    """Show the time of a rank in a barrier, in microseconds and in the picture."""

    rank: int
    y: int
    x: float
    width: float
    came_us: float
    left_us: float


class MiniBox(NamedTuple):
    """Draw a box of a small picture, without text."""

    x: int
    y: int
    width: int
    origin: str


class MiniPicture(NamedTuple):
    """Show a collective in a list."""

    width: int
    height: int
    boxes: list[MiniBox]


MINI_BOX, MINI_PITCH, MINI_ROW, MINI_GAP = 10, 12, 13, 18
MINI_TRACK = 100  # width of the time axis of a barrier


def make_mini_picture(settings: CollectiveSettings, step: LabStep) -> MiniPicture:
    """Return the small picture of a collective: boxes before at the left, boxes after at the right."""
    height = len(step.holdings) * MINI_ROW - (MINI_ROW - MINI_BOX)
    if step.primitive == "barrier":
        scale = MINI_TRACK / TRACK
        bars = [
            MiniBox(round((span.x - LABEL) * scale), place * MINI_ROW, round(span.width * scale), str(place))
            for place, span in enumerate(get_barrier_spans(step))
        ]
        return MiniPicture(MINI_TRACK, height, bars)
    rows = make_picture(settings, step).rows
    after_x = max(len(row.before) for row in rows) * MINI_PITCH + MINI_GAP
    boxes = [
        MiniBox(start + i * MINI_PITCH, place * MINI_ROW, MINI_BOX, box.origin)
        for place, row in enumerate(rows)
        for start, drawn in ((0, row.before), (after_x, row.after))
        for i, box in enumerate(drawn)
    ]
    return MiniPicture(after_x + max(len(row.after) for row in rows) * MINI_PITCH, height, boxes)


def make_picture(settings: CollectiveSettings, step: LabStep) -> Picture:
    """Return the picture of the tensors of each rank before and after."""
    longest = max((len(h.before or ()) for h in step.holdings), default=0)
    after_x = LABEL + max(1, longest) * BOX + ARROW
    rows = []
    for place, holding in enumerate(step.holdings):
        before = _make_boxes(LABEL, holding.before, [str(place % NUM_COLORS)] * len(holding.before or ()), holding.rank)
        origins = [_find_origin(settings, step, place, i) for i in range(len(holding.after or ()))]
        after = _make_boxes(after_x, holding.after, origins, holding.rank)
        texts = _format_values(holding.before), _format_values(holding.after)
        rows.append(PictureRow(holding.rank, TOP + place * ROW, before, after, *texts))
    widest = max((len(row.after) for row in rows), default=0)
    legend = [(str(place % NUM_COLORS), f"from rank {h.rank}") for place, h in enumerate(step.holdings)]
    if any(box.origin == COMBINED for row in rows for box in row.after):
        legend.append((COMBINED, "combined from several ranks"))
    return Picture(after_x + max(1, widest) * BOX + 2, TOP + len(rows) * ROW, after_x, rows, legend)


def make_film(settings: CollectiveSettings, step: LabStep, *, timed: bool = True) -> dict[str, Any] | None:
    """Return the stages that js/lab/film.js plays, or None if no element moves. `timed`: show times of a barrier."""
    stages = _make_barrier_stages(step, timed) if step.primitive == "barrier" else _make_stages(settings, step)
    return stages and {"kind": step.primitive, "ranks": [holding.rank for holding in step.holdings], **stages}


def _make_stages(settings: CollectiveSettings, step: LabStep) -> dict[str, Any] | None:
    found = simulate_collective(settings, step)
    if found is None:
        return None

    def draw(rows: GroupValues) -> list[list[list[str] | None]]:
        return [
            [
                None if value is None else [_format_value(value), _find_sender(settings, step, place, value)]
                for value in row
            ]
            for place, row in enumerate(rows)
        ]

    has_input = any(stage.from_input for stage in found.stages)
    return {
        "algorithm": found.algorithm,
        "agrees": found.agrees,
        "given": draw([list(holding.before or ()) for holding in step.holdings]) if has_input else None,
        "start": draw(found.start),
        "stages": [
            {
                "words": stage.words,
                "given": stage.from_input,
                "moves": [move[:4] for move in stage.moves],
                "rows": draw(stage.rows),
            }
            for stage in found.stages
        ],
    }


def _find_sender(settings: CollectiveSettings, step: LabStep, place: int, value: float) -> str:
    """Return the index of the rank that a value came from, or COMBINED for a partial or full sum."""
    if step.primitive in REDUCING and settings.reduce_op == "sum":
        return str(place % NUM_COLORS) if value in (step.holdings[place].before or ()) else COMBINED
    return _find_holder(step, value)


def _find_holder(step: LabStep, value: float) -> str:
    holders = (place for place, other in enumerate(step.holdings) if value in (other.before or ()))
    return next((str(place % NUM_COLORS) for place in holders), COMBINED)


def _make_barrier_stages(step: LabStep, timed: bool) -> dict[str, Any]:
    """Return the arrivals at a barrier and the departures, by time."""
    spans = get_barrier_spans(step)
    moments = [(span.came_us, True, span.rank) for span in spans] + [(span.left_us, False, span.rank) for span in spans]
    stages, inside = [], 0
    for at, arrives, rank in sorted(moments, key=lambda moment: (moment[0], not moment[1])):
        inside += 1 if arrives else -1
        waiting = f"{inside} of {len(spans)} ranks wait at the barrier." if inside else "All ranks have left."
        when = f" at {at:.1f} µs" if timed else ""
        stages.append({"words": f"Rank {rank} {'arrives' if arrives else 'leaves'}{when}. {waiting}", "at": at})
    return {"spans": [[span.came_us, span.left_us] for span in spans], "stages": stages}


def get_barrier_spans(step: LabStep) -> list[BarrierSpan]:
    """Return the time of each rank in a barrier. The axis starts when the first rank arrives."""
    known = [(h.rank, (h.before or (0.0,))[0], (h.after or (0.0,))[0]) for h in step.holdings]
    scale = TRACK / (max(left for _, _, left in known) or 1)  # a host may report no time at all
    return [
        BarrierSpan(rank, place * ROW, LABEL + came * scale, max(1.0, (left - came) * scale), came, left)
        for place, (rank, came, left) in enumerate(known)
    ]


def _make_boxes(x: int, values: tuple[float, ...] | None, origins: list[str], rank: int) -> list[Box]:
    return [
        Box(x + i * BOX, _format_value(value), f"element {i} on rank {rank}: {_format_value(value)}", origin)
        for i, (value, origin) in enumerate(zip(values or (), origins, strict=True))
    ]


def _find_origin(settings: CollectiveSettings, step: LabStep, place: int, index: int) -> str:
    """Return the origin of a value. In a sum, a value that did not change is from its own rank."""
    holding = step.holdings[place]
    assert holding.after is not None
    value, before = holding.after[index], holding.before or ()
    if step.primitive in REDUCING and settings.reduce_op == "sum":
        return str(place % NUM_COLORS) if index < len(before) and before[index] == value else COMBINED
    return _find_holder(step, value)


def _format_values(values: tuple[float, ...] | None) -> str:
    return "nothing" if values is None else ", ".join(map(_format_value, values))


def _format_value(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:g}"
