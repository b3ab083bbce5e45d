"""Detect the format of uploaded trace files, and combine the files of all ranks into one trace."""

from __future__ import annotations

from collections import defaultdict
from typing import Final, Literal, NamedTuple

from contracts.telemetry.items import MAX_UNIX_S
from jobs.runs.diagnosis.findings import RunFinding
from jobs.runs.traces.imports import kineto, nccl_inspector, torch_traces, trace_files
from jobs.runs.traces.imports.common import MAX_EVENTS, MAX_LISTED_RANKS, FileEvents, ImportProblemError
from jobs.runs.traces.imports.json_stream import LISTS, JsonReader
from jobs.runs.traces.imports.pairing import pair_calls
from jobs.runs.traces.imports.recorded_hangs import find_recorded_hangs
from jobs.runs.traces.imports.trace_files import TraceFile
from jobs.runs.traces.trace_events import EventTrace

Format = Literal["flight recorder", "NCCL Inspector", "Kineto"]
LIST_FORMATS: Final[dict[str, Format]] = {"traceEvents": "Kineto", "entries": "flight recorder"}
MAX_SEARCHED_LINES = 1000  # for the first valid line of a log
MAX_NOTES = 50


class ImportResult(NamedTuple):
    """Hold a trace, the format of its files, notes for the user, and the hangs in flight recorder dumps."""

    format: Format
    trace: EventTrace
    notes: list[str]
    findings: list[RunFinding] = []


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
    notes: list[str] = []
    if trace_format == "NCCL Inspector":
        parts = nccl_inspector.read_nccl_inspector(sources)
    elif trace_format == "Kineto":
        parts, notes = pair_calls(_read_kineto_files(sources))
    else:
        parts, notes = _read_flight_recorders(sources)
    notes.extend(note for part in parts for note in part.notes)
    notes.extend(note for source in sources for note in source.notes)
    notes = sorted(set(notes))
    if not any(part.calls or part.spans for part in parts):
        reasons = f" Notes: {'; '.join(notes[:5])}." if notes else ""
        message = f"The files contain no events of collectives or compute.{reasons}"
        raise ImportProblemError(parts[0].file, "events", message)
    further = [f"{len(notes) - MAX_NOTES} further notes are not shown"] if len(notes) > MAX_NOTES else []
    trace = _combine(parts)
    findings = find_recorded_hangs([part.recording for part in parts if part.recording is not None])
    return ImportResult(trace_format, trace, notes[:MAX_NOTES] + further, findings)


def _read_kineto_files(sources: list[TraceFile]) -> list[FileEvents]:
    ranks = {name: rank for rank, name in enumerate(sorted(source.name for source in sources))}
    parts = []
    for source in sources:
        parts.append(kineto.read_kineto(source, ranks[source.name]))
        if sum(one.num_bytes for one in sources) > trace_files.MAX_IMPORT_DECOMPRESSED_BYTES:
            message = (
                f"The decompressed files have more than {trace_files.MAX_IMPORT_DECOMPRESSED_BYTES:,} bytes. "
                "Import fewer ranks."
            )
            raise ImportProblemError("import", "files", message)
    return parts


def _read_flight_recorders(sources: list[TraceFile]) -> tuple[list[FileEvents], list[str]]:
    """Return the dumps and notes. A damaged dump is left out if another dump can be read."""
    parts, problems = [], []
    for source in sources:
        try:
            parts.append(_read_flight_recorder(source))
        except ImportProblemError as problem:
            problems.append(problem)
    if not parts:
        raise problems[0]
    notes = [f"{one.file} is left out: {one.message.rstrip('.')}" for one in problems]
    return parts, notes + _compare_versions(parts)


def _compare_versions(parts: list[FileEvents]) -> list[str]:
    """Return a note if the dumps have different versions."""
    versions = sorted({part.recording.version for part in parts if part.recording is not None})
    if len(versions) < 2:
        return []
    return [f"the dumps have different versions ({', '.join(versions[:5])}), so ranks used different PyTorch versions"]


def _read_flight_recorder(source: TraceFile) -> FileEvents:
    if _is_pickle(source):
        return torch_traces.read_flight_recorder_pickle(source)
    return torch_traces.read_flight_recorder_json(source)


def _is_pickle(source: TraceFile) -> bool:
    with source.open() as file:
        start = file.read(1)
    if start == b"":
        raise ImportProblemError(source.name, "file", "The file is empty.")
    return start == b"\x80"


def _detect_format(source: TraceFile) -> Format:
    """Return the format from the content: a pickle, a list of events or entries, or the lines of a log."""
    if _is_pickle(source):
        return "flight recorder"
    with source.open() as file:
        reader = JsonReader(source, file)
        for key, _ in reader.read():
            if key in LISTS:
                break
    for key, name in LIST_FORMATS.items():
        if key in reader.keys:
            return name
    if nccl_inspector.is_inspector_log(source, MAX_SEARCHED_LINES):
        return "NCCL Inspector"
    message = (
        "The file format is unknown. Use a flight recorder dump (pickle or JSON), NCCL Inspector log, or Kineto trace."
    )
    if keys := ", ".join(sorted(reader.keys)[:10]):
        message = f"{message} The keys of the file are {keys[:200]!r}."
    raise ImportProblemError(source.name, "format", message)


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
