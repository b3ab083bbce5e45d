"""Detect the format of uploaded trace files, and combine the files of all ranks into one trace."""

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
from jobs.runs.traces.events import CollectiveCall, EventTrace
from jobs.runs.traces.imports import flight_recorder, kineto, nccl_inspector
from jobs.runs.traces.imports.common import (
    MAX_EVENTS,
    MAX_LISTED_RANKS,
    FileEvents,
    ImportProblemError,
    TraceFile,
    check_json_bounds,
    read_first_key,
)

Format = Literal["flight recorder", "NCCL Inspector", "Kineto"]
MAX_DECOMPRESSED_BYTES = 256 * 2**20  # per file


class ImportResult(NamedTuple):
    """Hold a trace, the format of its files, and notes for the user."""

    format: Format
    trace: EventTrace
    notes: list[str]


class _BoundedFile(io.RawIOBase):
    """Limit a decompressed file to MAX_DECOMPRESSED_BYTES."""

    def __init__(self, name: str, inner: IO[bytes]) -> None:
        self._name, self._inner, self._bytes_left = name, inner, MAX_DECOMPRESSED_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        try:
            part = self._inner.read(len(buffer))
        except (OSError, EOFError, zlib.error) as error:
            raise ImportProblemError(self._name, "gzip", f"The file cannot be decompressed: {error}") from error
        self._bytes_left -= len(part)
        if self._bytes_left < 0:
            raise ImportProblemError(
                self._name, "gzip", f"The decompressed file has more than {MAX_DECOMPRESSED_BYTES:,} bytes."
            )
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._inner.close()
        super().close()


def open_decompressed(name: str, path: Path) -> IO[bytes]:
    """Open a file, decompressed if it is gzip, and limited to MAX_DECOMPRESSED_BYTES."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    inner: Any = gzip.GzipFile(path) if is_gzip else path.open("rb")
    return io.BufferedReader(_BoundedFile(name, inner))


def make_trace_file(name: str, path: Path) -> TraceFile:
    return TraceFile(name, path, partial(open_decompressed, name, path))


def read_traces(sources: list[TraceFile]) -> ImportResult:
    """Read all files into one trace.

    Raises:
        ImportProblemError: A file cannot be read. Holds the file and the field.
    """
    if not sources:
        raise ImportProblemError("import", "files", "The import contains no files.")
    formats = {one.name: _detect_format(one) for one in sources}
    first = formats[sources[0].name][0]
    for one in sources:
        if formats[one.name][0] != first:
            raise ImportProblemError(
                one.name,
                "format",
                f"The format is {formats[one.name][0]}, but {sources[0].name} has the format {first}. Use one format.",
            )
    parts = _read_files(first, sources, formats)
    return ImportResult(first, _combine(parts), sorted({note for part in parts for note in part.notes}))


def _read_files(
    trace_format: Format, sources: list[TraceFile], formats: dict[str, tuple[Format, bool]]
) -> list[FileEvents]:
    if trace_format == "NCCL Inspector":
        return nccl_inspector.read_nccl_inspector(sources)
    parts: list[FileEvents] = []
    for source in sources:
        if formats[source.name][1]:
            parts.append(flight_recorder.read_flight_recorder_pickle(source))
            continue
        try:
            first_events = check_json_bounds(source)
            parts.append(
                kineto.read_kineto(source)
                if trace_format == "Kineto"
                else flight_recorder.read_flight_recorder_json(source, first_events)
            )
        except (ijson.JSONError, UnicodeDecodeError) as error:
            raise ImportProblemError(source.name, "JSON", str(error)[:200]) from error
    return parts


def _detect_format(source: TraceFile) -> tuple[Format, bool]:
    """Return the format from the first byte and the first key, and True if the file is a pickle."""
    with source.open() as file:
        start = file.read(1)
    if start == b"":
        raise ImportProblemError(source.name, "file", "The file is empty.")
    if start == b"\x80":
        return "flight recorder", True
    first = read_first_key(source)
    for keys, name in (
        (kineto.KEYS, "Kineto"),
        (flight_recorder.KEYS, "flight recorder"),
        (nccl_inspector.KEYS, "NCCL Inspector"),
    ):
        if first in keys:
            return name, False  # type: ignore[return-value]
    message = (
        "The file format is unknown. Use a flight recorder dump (pickle or JSON), NCCL Inspector log, or Kineto trace."
    )
    raise ImportProblemError(
        source.name, "format", f"{message} The first key in the file is {str(first)[:60]!r}." if first else message
    )


def _combine(parts: list[FileEvents]) -> EventTrace:
    """Combine files of different ranks. A group of unknown ranks gets all ranks that used it."""
    file_by_rank: dict[int, str] = {}
    for part in parts:
        for rank in {event.rank for event in part.calls} | {span.rank for span in part.spans}:
            if file_by_rank.setdefault(rank, part.file) != part.file:
                raise ImportProblemError(
                    part.file,
                    "rank",
                    f"This file is from rank {rank}, like the file {file_by_rank[rank]}. Use one file per rank.",
                )
    calls = [call for part in parts for call in part.calls]
    spans = [span for part in parts for span in part.spans]
    if len(calls) + len(spans) > MAX_EVENTS:
        raise ImportProblemError(
            "import",
            "events",
            f"The import has {len(calls) + len(spans):,} events, and the maximum is {MAX_EVENTS:,}.",
        )
    if not calls and not spans:
        raise ImportProblemError(parts[0].file, "events", "The files contain no events of collectives or compute.")
    for part in parts:
        _check_times(part)
    ranks_by_group: dict[tuple[str, int], set[int]] = defaultdict(set)
    for call in calls:
        ranks_by_group[call.axis, call.nth].add(call.rank)
    num_listed = sum(len(call.ranks or ranks_by_group[call.axis, call.nth]) for call in calls)
    if num_listed > MAX_LISTED_RANKS:
        raise ImportProblemError(
            "import",
            "ranks",
            f"The process groups of {len(calls):,} collectives list {num_listed:,} ranks. "
            f"The maximum is {MAX_LISTED_RANKS:,}.",
        )
    complete_calls = [
        call if call.ranks else call._replace(ranks=tuple(sorted(ranks_by_group[call.axis, call.nth])))
        for call in calls
    ]
    return EventTrace(sorted(complete_calls, key=lambda call: call.issued), sorted(spans, key=lambda span: span.began))


def _check_times(part: FileEvents) -> None:
    times = [(call.issued, call.ended) for call in part.calls] + [(span.began, span.ended) for span in part.spans]
    for began, ended in times:
        if not 0 <= began <= max(began, ended or 0) < MAX_UNIX_S:
            words = f"An event at Unix time {began:.3g} s is outside the supported range."
            raise ImportProblemError(part.file, "time", words)


def _with(call: CollectiveCall, ranks: set[int]) -> CollectiveCall:
    return call._replace(ranks=tuple(sorted(ranks)))
