"""Files of a run that we did not launch, one or several of a rank each: which format, and one trace of them all."""

from __future__ import annotations

import gzip
import io
import zlib
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import ijson

from contracts.telemetry.vocabulary import MAX_UNIX_S
from jobs.runs.traces.imports import flight, inspector, kineto
from jobs.runs.traces.imports.bounds import first_key, looked_through
from jobs.runs.traces.imports.parts import MOST_EVENTS, MOST_NAMED, ImportProblemError, Part, Source
from jobs.runs.traces.shapes import Call, Trace

Format = Literal["flight recorder", "NCCL Inspector", "Kineto"]
MOST_UNPACKED = 256 * 2**20  # bytes of a file


class Read(NamedTuple):
    """A trace, what it came from, and what is to be said of it."""

    format: Format
    trace: Trace
    notes: list[str]


class _Bounded(io.RawIOBase):
    """A file that unpacks to no more than MOST_UNPACKED."""

    def __init__(self, name: str, inner: IO[bytes]) -> None:
        self._name, self._inner, self._left = name, inner, MOST_UNPACKED

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            part = self._inner.read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise ImportProblemError(self._name, "gzip", f"The file cannot be decompressed: {error}") from error
        self._left -= len(part)
        if self._left < 0:
            raise ImportProblemError(
                self._name, "gzip", f"The decompressed file has more than {MOST_UNPACKED:,} bytes."
            )
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._inner.close()
        super().close()


def opened(name: str, path: Path) -> IO[bytes]:
    """The file, unpacked where it is a gzip, and never more of it than MOST_UNPACKED."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    inner: Any = gzip.GzipFile(path) if packed else path.open("rb")
    return io.BufferedReader(_Bounded(name, inner))


def source(name: str, path: Path) -> Source:
    return Source(name, path, partial(opened, name, path))


def read(sources: list[Source]) -> Read:
    """One trace of all files.

    Raises:
        ImportProblemError: naming file and field.
    """
    if not sources:
        raise ImportProblemError("import", "files", "The import contains no files.")
    formats = {one.name: _format(one) for one in sources}
    first = formats[sources[0].name][0]
    for one in sources:
        if formats[one.name][0] != first:
            raise ImportProblemError(
                one.name,
                "format",
                f"The format is {formats[one.name][0]}, but {sources[0].name} has the format {first}. Use one format.",
            )
    parts = _parts(first, sources, formats)
    return Read(first, _together(parts), sorted({note for part in parts for note in part.notes}))


def _parts(chosen: Format, sources: list[Source], formats: dict[str, tuple[Format, bool]]) -> list[Part]:
    if chosen == "NCCL Inspector":
        return inspector.read(sources)
    found: list[Part] = []
    for one in sources:
        if formats[one.name][1]:
            found.append(flight.read_pickle(one))
            continue
        try:
            begins = looked_through(one)
            found.append(kineto.read(one) if chosen == "Kineto" else flight.read_json(one, begins))
        except (ijson.JSONError, UnicodeDecodeError) as error:  # the second where a text is no Unicode
            raise ImportProblemError(one.name, "JSON", str(error)[:200]) from error
    return found


def _format(one: Source) -> tuple[Format, bool]:
    """The format, and whether it is a pickle: told by the first byte and the first key."""
    with one.open() as file:
        start = file.read(1)
    if start == b"":
        raise ImportProblemError(one.name, "file", "The file is empty.")
    if start == b"\x80":
        return "flight recorder", True
    first = first_key(one)
    for known, name in ((kineto.KEYS, "Kineto"), (flight.KEYS, "flight recorder"), (inspector.KEYS, "NCCL Inspector")):
        if first in known:
            return name, False  # type: ignore[return-value]
    words = (
        "The file format is unknown. Use a flight recorder dump (pickle or JSON), NCCL Inspector log, or Kineto trace."
    )
    raise ImportProblemError(
        one.name, "format", f"{words} The first key in the file is {str(first)[:60]!r}." if first else words
    )


def _together(parts: list[Part]) -> Trace:
    """One trace; a file for each rank, and groups that a file could not tell have all ranks that issued on them."""
    seen: dict[int, str] = {}
    for part in parts:
        for rank in {event.rank for event in part.calls} | {span.rank for span in part.spans}:
            if seen.setdefault(rank, part.file) != part.file:
                raise ImportProblemError(
                    part.file,
                    "rank",
                    f"This file is from rank {rank}, like the file {seen[rank]}. Use one file per rank.",
                )
    calls = [call for part in parts for call in part.calls]
    spans = [span for part in parts for span in part.spans]
    if len(calls) + len(spans) > MOST_EVENTS:
        raise ImportProblemError(
            "import",
            "events",
            f"The import has {len(calls) + len(spans):,} events, and the maximum is {MOST_EVENTS:,}.",
        )
    if not calls and not spans:
        raise ImportProblemError(parts[0].file, "events", "The files contain no events of collectives or compute.")
    for part in parts:
        _in_time(part)
    users: dict[tuple[str, int], set[int]] = defaultdict(set)
    for call in calls:
        users[call.axis, call.nth].add(call.rank)
    named = sum(len(call.ranks or users[call.axis, call.nth]) for call in calls)
    if named > MOST_NAMED:
        raise ImportProblemError(
            "import",
            "ranks",
            f"The process groups of {len(calls):,} collectives list {named:,} ranks. The maximum is {MOST_NAMED:,}.",
        )
    full = [call if call.ranks else _with(call, users[call.axis, call.nth]) for call in calls]
    return Trace(sorted(full, key=lambda call: call.issued), sorted(spans, key=lambda span: span.began))


def _in_time(part: Part) -> None:
    times = [(call.issued, call.ended) for call in part.calls] + [(span.began, span.ended) for span in part.spans]
    for began, ended in times:
        if not 0 <= began <= max(began, ended or 0) < MAX_UNIX_S:
            words = f"An event at Unix time {began:.3g} s is outside the supported range."
            raise ImportProblemError(part.file, "time", words)


def _with(call: Call, ranks: set[int]) -> Call:
    return call._replace(ranks=tuple(sorted(ranks)))
