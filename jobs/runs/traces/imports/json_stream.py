"""Read large JSON files one member at a time, and continue after broken or cut members.

The C scanner of the standard library parses each member of a list. After a syntax error, the reader continues at the
next member.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import count
from typing import IO, Any, Final

from jobs.runs.traces.imports.common import ImportProblemError
from jobs.runs.traces.imports.trace_files import TraceFile

CHUNK_BYTES: Final = 2**20
LOOKAHEAD_CHARS: Final = 2**18  # most members are shorter
MAX_MEMBER_CHARS: Final = 2**20  # bounds the memory of one member of a list
MAX_VALUE_CHARS: Final = 2**23  # bounds the memory of the other values, for example of the process groups
MAX_SYNTAX_ERRORS: Final = 100_000
MAX_MEMBERS = 2**24  # per list
MAX_BRACKETS = 2**24  # in all values that are skipped
MAX_NAMED_BROKEN: Final = 3
MAX_KEYS: Final = 1000
LISTS: Final = frozenset({"traceEvents", "entries"})
MEMBER_KEYS: Final = frozenset({"ph", "profiling_name"})  # in each event of a trace and each entry of a dump
VALUES: Final = frozenset({"distributedInfo", "baseTimeNanoseconds", "pg_config", "rank", "version"})

_DECODER = json.JSONDecoder(strict=False)  # kernel names can have control characters
_SPACE = re.compile(r"\s*")
_SEPARATOR = re.compile(r"[\s,]*")
_NEXT_MEMBER = re.compile(r"(?:,\s*|^[ \t]*)(?=\{)", re.MULTILINE)
_MEMBER_START = re.compile(r'\{\s*"(?:ph|cat|name|record_id|collective_seq_id)"')
_NEXT_KEY = re.compile(r'[,{]\s*(?="(?:traceEvents|entries|distributedInfo|baseTimeNanoseconds|pg_config)"\s*:)')
_BRACKET_OR_QUOTE = re.compile(r'[\[{\]}"]')
_REST_OF_TEXT = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class _IncompleteError(ValueError):
    """The text ends inside a value."""


class JsonReader:
    """Read the values of one JSON file, in any order of its keys. `keys`: the keys of the outermost object so far."""

    def __init__(self, source: TraceFile, file: IO[bytes]) -> None:
        self._source, self._file = source, file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._text, self._position, self._is_at_end = "", 0, False
        self._num_broken = self._num_errors = self._num_brackets = 0
        self.keys: set[str] = set()

    def read(self) -> Iterator[tuple[str, Any]]:
        """Yield (key, value), with one pair per member of a list in LISTS. A bare array is a list "traceEvents"."""
        start = self._peek()
        if start == "[":
            self.keys.add("traceEvents")
            yield from (("traceEvents", member) for member in self._read_list("traceEvents", can_lack_end=True))
        elif start == "{":
            self._position += 1
            yield from self._read_object()
        if self._num_broken > MAX_NAMED_BROKEN:
            further = self._num_broken - MAX_NAMED_BROKEN
            self._source.add_note(f"{further:,} further members are not valid JSON and left out")

    def _read_object(self) -> Iterator[tuple[str, Any]]:
        while True:
            self._count_bracket()
            self._skip(_SEPARATOR)
            if self._peek() == "}":
                return
            if not self._peek():
                return self._note_cut()
            key = "?"
            try:
                key = str(self._parse_value(MAX_VALUE_CHARS))[:60]
                self._skip_colon()
                if key in LISTS and self._peek() == "[":
                    self._add_key(key)
                    yield from ((key, member) for member in self._read_list(key, can_lack_end=False))
                elif key in VALUES:
                    self._add_key(key)
                    yield key, self._parse_value(MAX_VALUE_CHARS)
                else:
                    if key not in LISTS:
                        self._add_key(key)
                    self._skip_value()
            except ImportProblemError:
                raise
            except _IncompleteError:
                return self._note_cut()
            except ValueError as error:
                self._count_broken(f"the value of `{key}`", error)
                if not self._find(_NEXT_KEY):
                    return None

    def _skip_colon(self) -> None:
        if self._peek() != ":":
            raise ValueError("a colon is missing")
        self._position += 1

    def _add_key(self, key: str) -> None:
        if len(self.keys) < MAX_KEYS:
            self.keys.add(key)

    def _read_list(self, key: str, *, can_lack_end: bool) -> Iterator[Any]:
        self._position += 1
        for index in count():
            if index >= MAX_MEMBERS:
                raise ImportProblemError(self._source.name, key, f"The list has more than {MAX_MEMBERS:,} members.")
            self._skip(_SEPARATOR)
            end = self._peek()
            if end == "]":
                self._position += 1
                return
            if not end:
                return None if can_lack_end else self._note_cut()
            try:
                value = self._parse_value(MAX_MEMBER_CHARS)
            except ImportProblemError:
                raise
            except _IncompleteError:
                return self._note_cut()
            except ValueError as error:
                self._count_broken(f"{key}[{index}]", error)
                value = self._find_member()
                if value is None:
                    return self._note_cut()
            yield value

    def _find_member(self) -> dict[str, Any] | None:
        """Return the next member after a broken member, or None at the end. Nested objects are not members."""
        self._position += 1
        while self._find(_NEXT_MEMBER):
            start = self._position
            try:
                value = self._parse_value(MAX_MEMBER_CHARS)
            except ImportProblemError:
                raise
            except _IncompleteError:
                return None
            except ValueError:
                self._count_error()
                self._num_broken += _MEMBER_START.match(self._text, start) is not None
                self._position = start + 1
                continue
            if isinstance(value, dict) and not MEMBER_KEYS.isdisjoint(value):
                return value
        return None

    def _parse_value(self, max_chars: int) -> Any:
        """Parse the value at the position.

        Raises:
            _IncompleteError: The file ends inside the value.
            ValueError: The value is not JSON, is nested too deeply, or is too long.
        """
        self._skip(_SPACE)
        wanted = LOOKAHEAD_CHARS
        while True:
            self._fill(wanted)
            remaining = len(self._text) - self._position
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - 12
                if not is_cut:
                    raise
                if self._is_at_end:
                    raise _IncompleteError from error
                if remaining >= max_chars:
                    raise ValueError(f"the value is longer than {max_chars:,} characters") from error
            except RecursionError:
                raise ValueError("the value is nested too deeply") from None
            else:
                if end - self._position > max_chars:
                    self._position = end
                    raise ValueError(f"the value is longer than {max_chars:,} characters")
                if end < len(self._text) or self._is_at_end:
                    self._position = end
                    return value
            wanted = min(max_chars, max(wanted, remaining) * 4) + LOOKAHEAD_CHARS

    def _skip_value(self) -> None:
        """Skip a value. Containers are not stored, because some have millions of values."""
        if self._peek() not in ("[", "{"):
            self._parse_value(MAX_VALUE_CHARS)
            return
        depth = 0
        while True:
            match = _BRACKET_OR_QUOTE.search(self._text, self._position)
            if match is None:
                self._position = len(self._text)
                if not self._fill(1):
                    raise _IncompleteError
                continue
            self._position = match.end()
            self._count_bracket()
            if match[0] == '"':
                self._skip_rest_of_text()
                continue
            depth += 1 if match[0] in "[{" else -1
            if depth == 0:
                return

    def _count_bracket(self) -> None:
        self._num_brackets += 1
        if self._num_brackets > MAX_BRACKETS:
            message = f"The values of other keys have more than {MAX_BRACKETS:,} brackets and texts."
            raise ImportProblemError(self._source.name, "JSON", message)

    def _skip_rest_of_text(self) -> None:
        size = LOOKAHEAD_CHARS
        while (match := _REST_OF_TEXT.match(self._text, self._position)) is None:
            if self._is_at_end:
                raise _IncompleteError
            if size > MAX_VALUE_CHARS:
                raise ValueError("a text has no end")
            size *= 4
            self._fill(size)
        self._position = match.end()

    def _find(self, pattern: re.Pattern[str]) -> bool:
        """Move to the end of the next match of a pattern. Return False at the end of the file."""
        while True:
            match = pattern.search(self._text, self._position)
            if match is not None:
                self._position = match.end()
                return True
            if self._is_at_end:
                self._position = len(self._text)
                return False
            self._position = max(self._position, len(self._text) - 200)
            self._fill(LOOKAHEAD_CHARS)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        while True:
            match = pattern.match(self._text, self._position)
            assert match is not None
            self._position = match.end()
            if self._position < len(self._text) or not self._fill(1):
                return

    def _peek(self) -> str:
        self._skip(_SPACE)
        return self._text[self._position : self._position + 1]

    def _fill(self, num_chars: int) -> bool:
        """Read until `num_chars` follow the position. Return False if nothing follows."""
        while len(self._text) - self._position < num_chars and not self._is_at_end:
            data = self._file.read(CHUNK_BYTES)
            self._is_at_end = not data
            self._text = self._text[self._position :] + self._decode(data, final=not data)
            self._position = 0
        return self._position < len(self._text)

    def _note_cut(self) -> None:
        if not any("gzip" in note for note in self._source.notes):
            self._source.add_note("the file is cut off, so its last events are missing")

    def _count_broken(self, place: str, error: ValueError) -> None:
        self._num_broken += 1
        self._count_error()
        if self._num_broken <= MAX_NAMED_BROKEN:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            self._source.add_note(f"{place} is not valid JSON and left out ({reason[:100]})")

    def _count_error(self) -> None:
        self._num_errors += 1
        if self._num_errors > MAX_SYNTAX_ERRORS:
            message = f"The file has more than {MAX_SYNTAX_ERRORS:,} JSON errors. Export the trace again."
            raise ImportProblemError(self._source.name, "JSON", message)
