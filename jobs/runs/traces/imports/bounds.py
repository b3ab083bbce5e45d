"""JSON that somebody sent, looked through before anything is made of it: a file's size bounds neither how deep it goes
nor what its values weigh in memory."""

from __future__ import annotations

import ijson

from jobs.runs.traces.imports.parts import MOST_EVENTS, ImportProblemError, Source

DEEPEST = 32
MOST_VALUES = 100_000  # of one event, or of all else under one key
LISTS = frozenset({"traceEvents", "entries"})  # of which one event at a time is made
MOST_LISTED = 8 * MOST_EVENTS


def first_key(source: Source) -> str | None:
    """Of the object that the file is; None where it is none."""
    with source.open() as file:
        try:
            events = ijson.basic_parse(file, use_float=True)
            return str(next(events)[1]) if next(events)[0] == "start_map" else None
        except (ijson.JSONError, UnicodeDecodeError, StopIteration):
            return None


def looked_through(source: Source) -> dict[str, str]:
    """How each key's value of the file's object begins: "start_array", "start_map", "number" and so on.

    Raises:
        ImportProblemError: too deep, or too many values.
        ijson.JSONError, UnicodeDecodeError: it is no JSON.
    """
    found: dict[str, str] = {}
    key, depth, values, listed = "", 0, 0, 0
    with source.open() as file:
        for event, value in ijson.basic_parse(file, use_float=True):
            if depth == 1:
                if event == "map_key":
                    key, values = value, 0
                    continue
                found.setdefault(key, event)
            if event in ("start_map", "start_array"):
                depth += 1
                if depth > DEEPEST:
                    raise ImportProblemError(
                        source.name, key[:60] or "JSON", f"The JSON is nested deeper than {DEEPEST} levels."
                    )
            elif event in ("end_map", "end_array"):
                depth -= 1
            if depth == 2 and key in LISTS:
                values, listed = 0, listed + 1
                if listed > MOST_LISTED:
                    raise ImportProblemError(source.name, key, f"The file has more than {MOST_LISTED:,} events.")
            values += 1
            if values > MOST_VALUES:
                words = f"The JSON has more than {MOST_VALUES:,} values."
                raise ImportProblemError(source.name, key[:60] or "JSON", words)
    return found
