"""A trace of torch.profiler (Kineto's Chrome JSON): collectives, compute, and steps where the profiler knew of them.

On a GPU the collectives are the communication kernels, with the group that torch noted on them. On gloo they are the
annotations of its threads, which do not say of which group they are.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import ijson

from jobs.runs.traces.arrivals import PAIRED
from jobs.runs.traces.imports.parts import (
    MOST_EVENTS,
    ImportProblemError,
    Part,
    Source,
    axis_of,
    element_bytes,
    op_of,
    rank_in,
    ranks_of,
    whole,
    word,
)
from jobs.runs.traces.shapes import Call, Span

KEYS = frozenset({"schemaVersion", "traceEvents", "deviceProperties", "displayTimeUnit", "distributedInfo", "trace_id"})
STEP = re.compile(r"ProfilerStep#([0-9]{1,9})")
LIBRARY = re.compile(r"(gloo|nccl|mpi|ucc|xccl):(.+)")
APART_US = 20.0  # idle between two operators that is no gap yet
KERNELS = {"kernel", "gpu_memcpy", "gpu_memset"}
NAME = "Collective name"
ARGS = (
    NAME,
    "Process Group Name",
    "Process Group Ranks",
    "Process Group Description",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
)


class _Event(NamedTuple):
    name: str
    began: float  # microseconds, of the trace
    ended: float
    thread: str
    args: dict[str, Any]


class _Found(NamedTuple):
    """By kind, in no order."""

    kernels: list[_Event]
    launched: list[_Event]  # noted on the CPU as a collective was issued
    annotated: list[_Event]  # by the library's own threads
    operators: list[_Event]
    on_gpu: list[_Event]
    steps: list[tuple[float, int]]


def read(source: Source) -> Part:
    with source.open() as file:
        head = _head(file)
    told = head.get("distributedInfo")
    info: dict[str, Any] = told if isinstance(told, dict) else {}
    rank = whole(info["rank"], source.name, "distributedInfo.rank", 65_535) if "rank" in info else rank_in(source.name)
    if rank is None:
        raise ImportProblemError(
            source.name,
            "distributedInfo.rank",
            "The rank of this trace is unknown. End the file name with the rank number.",
        )
    base_ns = head.get("baseTimeNanoseconds") or 0
    base = whole(base_ns, source.name, "baseTimeNanoseconds") / 1e9
    with source.open() as file:
        found = _collect(source.name, file)
    found.steps.sort()
    made = _Maker(source.name, rank, base, _groups(source.name, info), found.steps)
    collectives = found.kernels or found.launched or found.annotated
    notes = []
    if collectives is found.annotated and collectives:
        notes.append("the trace has no process groups, so Meshboard assumes that every collective includes all ranks")
    if not collectives:
        notes.append("the trace has no collectives")
    return Part(source.name, made.calls(collectives), made.spans(found), notes)


def _head(file: IO[bytes]) -> dict[str, Any]:
    """The small fields before the events: those behind them are not needed."""
    found: dict[str, Any] = {}
    builder, key = None, ""
    for prefix, event, value in ijson.parse(file, use_float=True):
        if prefix == "" and event == "map_key":
            key = value
            if key == "traceEvents":
                return found
            builder = ijson.ObjectBuilder()
        elif builder is not None and key and (prefix == key or prefix.startswith(f"{key}.")):
            builder.event(event, value)
            if prefix == key and event not in ("start_map", "start_array", "map_key"):
                found[key] = builder.value
    return found


def _collect(file: str, opened: IO[bytes]) -> _Found:
    found = _Found([], [], [], [], [], [])
    count = 0
    for place, event in enumerate(ijson.items(opened, "traceEvents.item", use_float=True)):
        if not isinstance(event, dict):
            raise ImportProblemError(file, f"traceEvents[{place}]", "The event in the trace is not a JSON object.")
        if event.get("ph") != "X":
            continue
        count += _sort_in(found, file, place, event)
        if count > MOST_EVENTS:
            raise ImportProblemError(file, "traceEvents", f"The file has more than {MOST_EVENTS:,} events.")
    return found


def _sort_in(found: _Found, file: str, place: int, event: dict[str, Any]) -> bool:
    name, category = str(event.get("name", ""))[:200], event.get("cat")
    began, took = event.get("ts"), event.get("dur", 0)
    for field, value in (("ts", began), ("dur", took)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e16:
            raise ImportProblemError(
                file,
                f"traceEvents[{place}].{field}",
                f"The time is {str(value)[:60]!r}, which is not a number of microseconds.",
            )
    assert isinstance(began, int | float)
    args = event.get("args")
    args = {key: args[key] for key in ARGS if key in args} if isinstance(args, dict) and NAME in args else {}
    made = _Event(name, began, began + took, f"{event.get('pid')}/{event.get('tid')}", args)
    step = STEP.fullmatch(name)
    if step and category == "user_annotation":
        found.steps.append((made.began, int(step[1])))
    elif category in KERNELS:
        (found.kernels if NAME in args else found.on_gpu).append(made)
    elif NAME in args:
        found.launched.append(made)
    elif category == "user_annotation" and LIBRARY.fullmatch(name):
        found.annotated.append(made)
    elif category == "cpu_op" and not name.startswith("c10d::"):
        found.operators.append(made)
    else:
        return False
    return True


def _groups(file: str, info: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    told = info.get("pg_config")
    rows = told if isinstance(told, list) else []
    return {
        str(row.get("pg_name")): ranks_of(row.get("ranks"), file, "distributedInfo.pg_config.ranks")
        for row in rows
        if isinstance(row, dict)
    }


class _Maker:
    """Calls and spans of one rank. `base`: unix seconds at which the trace's microseconds are 0."""

    def __init__(
        self, file: str, rank: int, base: float, groups: dict[str, tuple[int, ...]], steps: list[tuple[float, int]]
    ) -> None:
        self._file, self._rank, self._base, self._groups = file, rank, base, groups
        self._starts, self._numbers = [began for began, _ in steps], [number for _, number in steps]

    def _step(self, began: float) -> int:
        place = bisect.bisect_right(self._starts, began) - 1
        return self._numbers[place] if place >= 0 else 0

    def _time(self, microseconds: float) -> float:
        return self._base + microseconds / 1e6

    def calls(self, events: list[_Event]) -> list[Call]:
        return list(self._calls(sorted(events, key=lambda event: event.began)))

    def _calls(self, events: list[_Event]) -> Iterator[Call]:
        counted: Counter[tuple[int, str, str]] = Counter()
        for event in events:
            op = op_of(str(event.args.get(NAME) or event.name))
            if op in ("wait", "init"):
                continue
            args, step = event.args, self._step(event.began)
            fields = ("Process Group Name", "Process Group Description")
            group, description = (word(args.get(field), self._file, f"args.{field}") for field in fields)
            told = ranks_of(args.get("Process Group Ranks", ""), self._file, "args.Process Group Ranks")
            axis = axis_of(group, description) if args else "collectives"
            # Sends are not alike on all ranks, and threads of a library, which name no group, end in any order.
            apart = "" if args and op not in PAIRED else op
            counted[step, group, apart] += 1
            yield Call(
                step=step,
                rank=self._rank,
                axis=axis,
                ranks=told or self._groups.get(group, ()),
                nth=0 if args else _place(op),
                sequence=counted[step, group, apart],
                op=op,
                issued=self._time(event.began),
                blocked_s=0.0,
                ended=self._time(event.ended),
                payload_bytes=_payload(args),
                peer=-1,
            )

    def spans(self, found: _Found) -> list[Span]:
        """Compute, joined over gaps that nobody would see: of the GPU, else of the thread that ran most operators."""
        events = found.on_gpu
        if not events and found.operators:
            threads: dict[str, list[_Event]] = defaultdict(list)
            for event in found.operators:
                threads[event.thread].append(event)
            events = max(threads.values(), key=len)
        made: list[Span] = []
        for began, ended in _joined(events):
            made.append(Span(self._step(began), self._rank, "compute", -1, -1, self._time(began), self._time(ended)))
        return made


def _joined(events: list[_Event]) -> Iterator[tuple[float, float]]:
    began, ended = 0.0, -1.0
    for event in sorted(events, key=lambda event: event.began):
        if ended >= began and event.began <= ended + APART_US:
            ended = max(ended, event.ended)
            continue
        if ended >= began:
            yield began, ended
        began, ended = event.began, event.ended
    if ended >= began:
        yield began, ended


def _place(op: str) -> int:
    """A number of its own for what a library names, the same on every rank."""
    return int.from_bytes(op.encode()[:6], "big")


def _payload(args: dict[str, Any]) -> int:
    """The full buffer: of what went in and what came out the larger."""
    counts = [args.get(name) for name in ("In msg nelems", "Out msg nelems")]
    most = max((count for count in counts if isinstance(count, int) and 0 <= count < 2**48), default=0)
    return most * element_bytes(args.get("dtype", ""))
