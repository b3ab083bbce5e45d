"""Detect the format of uploaded trace files, and combine the files of all ranks into one trace."""

from __future__ import annotations

import gzip
import io
import zlib
from collections import defaultdict
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import ijson

from contracts.telemetry.items import MAX_UNIX_S
from jobs.runs.traces.imports import nccl_inspector, torch_traces
from jobs.runs.traces.imports.common import (
    MAX_EVENTS,
    MAX_LISTED_RANKS,
    FileEvents,
    ImportProblemError,
    TraceFile,
    check_json_bounds,
    read_first_key,
)
from jobs.runs.traces.traced_steps import EventTrace

Format = Literal["flight recorder", "NCCL Inspector", "Kineto"]
FORMAT_KEYS: dict[Format, frozenset[str]] = {
    "Kineto": torch_traces.KINETO_KEYS,
    "flight recorder": torch_traces.FLIGHT_RECORDER_KEYS,
    "NCCL Inspector": nccl_inspector.KEYS,
}
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
            message = f"The decompressed file has more than {MAX_DECOMPRESSED_BYTES:,} bytes."
            raise ImportProblemError(self._name, "gzip", message)
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._inner.close()
        super().close()


def make_trace_file(name: str, path: Path) -> TraceFile:
    """Describe a file that opens decompressed if it is gzip, and limited to MAX_DECOMPRESSED_BYTES."""

    def open_file() -> IO[bytes]:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        inner: Any = gzip.GzipFile(path) if is_gzip else path.open("rb")
        return io.BufferedReader(_BoundedFile(name, inner))

    return TraceFile(name, path, open_file)


def read_traces(sources: list[TraceFile]) -> ImportResult:
    """Read all files into one trace."""
    if not sources:
        raise ImportProblemError("import", "files", "The import contains no files.")
    formats = [_detect_format(source) for source in sources]
    trace_format = formats[0]
    for source, other in zip(sources, formats, strict=True):
        if other != trace_format:
            message = f"The format is {other}, but {sources[0].name} has the format {trace_format}. Use one format."
            raise ImportProblemError(source.name, "format", message)
    if trace_format == "NCCL Inspector":
        parts = nccl_inspector.read_nccl_inspector(sources)
    else:
        parts = [_read_torch_trace(trace_format, source) for source in sources]
    return ImportResult(trace_format, _combine(parts), sorted({note for part in parts for note in part.notes}))


def _read_torch_trace(trace_format: Format, source: TraceFile) -> FileEvents:
    if _is_pickle(source):
        return torch_traces.read_flight_recorder_pickle(source)
    try:
        first_events = check_json_bounds(source)
        if trace_format == "Kineto":
            return torch_traces.read_kineto(source)
        return torch_traces.read_flight_recorder_json(source, first_events)
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise ImportProblemError(source.name, "JSON", str(error)[:200]) from error


def _is_pickle(source: TraceFile) -> bool:
    with source.open() as file:
        start = file.read(1)
    if start == b"":
        raise ImportProblemError(source.name, "file", "The file is empty.")
    return start == b"\x80"


def _detect_format(source: TraceFile) -> Format:
    """Return the format from the first byte and the first key."""
    if _is_pickle(source):
        return "flight recorder"
    first = read_first_key(source)
    for name, keys in FORMAT_KEYS.items():
        if first in keys:
            return name
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
        for rank in {call.rank for call in part.calls} | {span.rank for span in part.spans}:
            if file_by_rank.setdefault(rank, part.file) != part.file:
                message = f"This file is from rank {rank}, like the file {file_by_rank[rank]}. Use one file per rank."
                raise ImportProblemError(part.file, "rank", message)
    calls = [call for part in parts for call in part.calls]
    spans = [span for part in parts for span in part.spans]
    if len(calls) + len(spans) > MAX_EVENTS:
        message = f"The import has {len(calls) + len(spans):,} events, and the maximum is {MAX_EVENTS:,}."
        raise ImportProblemError("import", "events", message)
    if not calls and not spans:
        raise ImportProblemError(parts[0].file, "events", "The files contain no events of collectives or compute.")
    for part in parts:
        _check_times(part)
    ranks_by_group: dict[tuple[str, int], set[int]] = defaultdict(set)
    for call in calls:
        ranks_by_group[call.axis, call.nth].add(call.rank)
    num_listed = sum(len(call.ranks or ranks_by_group[call.axis, call.nth]) for call in calls)
    if num_listed > MAX_LISTED_RANKS:
        message = (
            f"The process groups of {len(calls):,} collectives list {num_listed:,} ranks. "
            f"The maximum is {MAX_LISTED_RANKS:,}."
        )
        raise ImportProblemError("import", "ranks", message)
    complete_calls = [
        call if call.ranks else call._replace(ranks=tuple(sorted(ranks_by_group[call.axis, call.nth])))
        for call in calls
    ]
    return EventTrace(sorted(complete_calls, key=lambda call: call.issued), sorted(spans, key=lambda span: span.began))


def _check_times(part: FileEvents) -> None:
    times = [(call.issued, call.ended) for call in part.calls] + [(span.began, span.ended) for span in part.spans]
    for began, ended in times:
        if not 0 <= began <= max(began, ended or 0) < MAX_UNIX_S:
            message = f"An event at Unix time {began:.3g} s is outside the supported range."
            raise ImportProblemError(part.file, "time", message)
