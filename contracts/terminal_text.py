"""Lines of a log as a terminal shows them, from bytes in any pieces and in limited memory.

Carriage returns, backspaces, and cursor movements change lines that are already written. A progress bar is one line
with its current state. Colors remain as escape sequences. Absolute cursor positions and screen clears are ignored,
because a log has no screen.
"""

from __future__ import annotations

import codecs
import re
from itertools import groupby
from typing import Final

from contracts.fields import ESCAPES

MAX_LINE_CHARS: Final = 4096  # of a line as it is shown, see contracts.fields.LogLine
HEAD_CHARS: Final = 3000  # shown of a longer line
TAIL_CHARS: Final = 1000
MAX_OPEN_ROWS: Final = 32  # lines that cursor movements can reach
MAX_REWRITES: Final = 64  # of one line in one piece of text; earlier ones are overwritten
MAX_ESCAPE_CHARS: Final = 256  # of an escape sequence that waits for its end
MAX_STYLE_CHARS: Final = 64

# A control that changes written text. A carriage return before a newline changes nothing.
_REWRITES = re.compile(r"\r(?!\n)|\x08|\x1b\[[0-9;?]*[ABCDEFGK]|\x1b\[0?J")
_VERTICAL = re.compile(r"\x1b\[[0-9;?]*[ABEFJ]")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x0c\x0e-\x1f]")  # other than tabs and carriage returns
_TOKEN = re.compile(r"[^\x00-\x08\x0a-\x1f]+|\x1b\[([0-?]*)[ -/]*([@-~])|" + ESCAPES.pattern + r"|[\x00-\x1f]")
_INCOMPLETE_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*)?\Z")


class _Row:
    """A line that can still change."""

    def __init__(self) -> None:
        self.cells: list[str] = []  # one character each, at most MAX_LINE_CHARS
        self.styles: list[str] | None = None  # color sequences of each cell, None without colors
        self.tail = ""  # last characters of a longer line
        self.length = 0
        self.has_escapes = False  # `cells` holds escape sequences as characters
        self.is_rewritten = False
        self.is_touched = True

    def append(self, text: str) -> None:
        """Append text without a control that changes written text."""
        if not text:
            return
        self.is_touched = True
        self.has_escapes = self.has_escapes or "\x1b" in text
        self.put(self.length, text, "")

    def put(self, column: int, text: str, style: str) -> None:
        """Overwrite the text at a column."""
        self.is_touched = True
        end = column + len(text)
        if end > MAX_LINE_CHARS and not self.tail:
            self.tail = ESCAPES.sub("", "".join(self.cells[-TAIL_CHARS:]))
        if column < MAX_LINE_CHARS:
            self.cells.extend(" " * (column - len(self.cells)))
            shown = text[: MAX_LINE_CHARS - column]
            self.cells[column : column + len(shown)] = shown
            self._put_style(column, len(shown), style)
        if end > MAX_LINE_CHARS:
            self.tail = (self.tail + ESCAPES.sub("", text))[-TAIL_CHARS:]
        self.length = max(self.length, end)

    def _put_style(self, column: int, width: int, style: str) -> None:
        if self.styles is None:
            if not style:
                return
            self.styles = []
        self.styles.extend([""] * (len(self.cells) - len(self.styles)))
        self.styles[column : column + width] = [style] * width

    def erase(self, start: int, end: int | None) -> None:
        """Erase cells. Without `end`, the line ends at `start`."""
        self.is_touched = True
        if end is not None and end < len(self.cells):
            self.put(start, " " * (end - start), "")
            return
        del self.cells[start:]
        if self.styles is not None:
            del self.styles[start:]
        self.length, self.tail = len(self.cells), ""

    def format(self) -> str:
        """Return the line with at most MAX_LINE_CHARS."""
        text = "".join(self.cells)
        if self.length > MAX_LINE_CHARS:
            head = _INCOMPLETE_ESCAPE.sub("", text[:HEAD_CHARS])
            left_out = self.length - HEAD_CHARS - TAIL_CHARS
            return f"{head} … [{self.length:,} characters in this line, {left_out:,} are not shown] … {self.tail}"
        if self.is_rewritten:
            text = text.rstrip(" ")
        if self.styles is None:
            return text
        styled = self._format_styles(len(text))
        return styled if len(styled) <= MAX_LINE_CHARS else text

    def _format_styles(self, width: int) -> str:
        assert self.styles is not None
        parts, column, last = [], 0, ""
        for style, run in groupby(self.styles[:width]):
            length = sum(1 for _ in run)
            parts.append(f"\x1b[0m{style}" if last else style)
            parts.append("".join(self.cells[column : column + length]))
            column, last = column + length, style
        parts.append(("\x1b[0m" if last else "") + "".join(self.cells[column:width]))
        return "".join(parts)


class TerminalText:
    """Convert the bytes of a log to lines. Lines that can still change are open."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete_escape = ""
        self._rows, self._row, self._column = [_Row()], 0, 0
        self._reach = 0  # largest upward movement, in lines
        self._style = ""
        self._lines: list[str] = []

    def feed(self, data: bytes, *, final: bool = False) -> list[str]:
        """Return the lines that are complete. With `final`, all lines."""
        text = self._incomplete_escape + self._decoder.decode(data, final).replace("\0", "")
        self._incomplete_escape = ""
        if not final and (found := _INCOMPLETE_ESCAPE.search(text, max(0, len(text) - MAX_ESCAPE_CHARS))):
            self._incomplete_escape, text = found[0], text[: found.start()]
        self._write(text)
        if final:
            self._finish()
        return self._take_lines()

    def skip(self, data: bytes) -> list[str]:
        """Leave out bytes of the log. Return the lines that are complete by this."""
        self._incomplete_escape, self._style = "", ""
        self._decoder.reset()
        if b"\n" in data:
            self._finish()
        elif b"\r" in data:
            self._column = 0
        else:
            width = len(data) - data.count(b"\0")
            self._get_row().length += width
            self._column += width
        return self._take_lines()

    def settle(self) -> list[str]:
        """Return lines above the cursor without a change since the last call. They do not change any more."""
        while self._row > 0 and not self._rows[0].is_touched:
            self._commit_first()
        for row in self._rows:
            row.is_touched = False
        return self._take_lines()

    @property
    def is_line_empty(self) -> bool:
        """Return whether the last line has no text yet."""
        return self._rows[-1].length == 0

    def get_open_lines(self) -> list[str]:
        """Return the lines that can still change, without empty lines at the end."""
        lines = [row.format() for row in self._rows]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def _is_at_end(self) -> bool:
        """Return whether text can only append to the last line."""
        row = self._rows[0]
        return len(self._rows) == 1 and self._column == row.length and not (row.is_rewritten or self._style)

    def _take_lines(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines

    def _commit_first(self) -> None:
        self._lines.append(self._rows.pop(0).format())
        self._row = max(0, self._row - 1)

    def _finish(self) -> None:
        self._lines += self.get_open_lines()
        self._rows, self._row, self._column, self._style = [_Row()], 0, 0, ""

    def _write_plain(self, text: str) -> None:
        """Write text that only appends to the last line."""
        first, *others = text.replace("\r\n", "\n").split("\n")
        row = self._rows[0]
        row.append(first)
        if others:
            self._lines.append(row.format())
            *complete, last = others
            self._lines += [line if len(line) <= MAX_LINE_CHARS else _format_line(line) for line in complete]
            row = self._rows[0] = _Row()
            row.append(last)
        self._column = row.length

    def _write(self, text: str) -> None:
        start = 0
        while start < len(text):
            if self._is_at_end():
                found = _REWRITES.search(text, start)
                plain = len(text) if found is None else text.rfind("\n", start, found.start()) + 1
                if plain > start:
                    self._write_plain(text[start:plain])
                    start = plain
                    continue
            end = text.find("\n", start)
            self._write_piece(text[start : len(text) if end < 0 else end])
            if end < 0:
                return
            self._newline()
            start = end + 1

    def _write_piece(self, piece: str) -> None:
        """Write text without a newline."""
        if piece.count("\r") > MAX_REWRITES:
            start = len(piece)
            for _ in range(MAX_REWRITES):
                start = piece.rfind("\r", 0, start)
            if _VERTICAL.search(piece, 0, start) is None:
                piece = piece[start:]
        row = self._get_row()
        if row.has_escapes:
            self._expand(row)
        if _CONTROLS.search(piece) is None:
            self._put_states(row, piece)
            return
        for token in _TOKEN.finditer(piece):
            self._apply(token)

    def _put_states(self, row: _Row, piece: str) -> None:
        """Write text whose only controls are carriage returns."""
        first, *states = piece.split("\r")
        if first:
            row.put(self._column, first, self._style)
            self._column += len(first)
        for state in states:
            row.is_rewritten = True
            row.put(0, state, self._style)
            self._column = len(state)

    def _apply(self, token: re.Match[str]) -> None:
        text = token[0]
        if text == "\r":
            self._column = 0
            self._get_row().is_rewritten = True
        elif text == "\b":
            self._column = max(0, self._column - 1)
            self._get_row().is_rewritten = True
        elif token[2] is not None:
            self._apply_sequence(text, token[1], token[2])
        elif text >= " " or text[0] == "\t":
            row = self._get_row()
            if row.has_escapes:
                self._expand(row)
            row.put(self._column, text, self._style)
            self._column += len(text)

    def _expand(self, row: _Row) -> None:
        """Interpret the escape sequences in a row. Its columns then equal those of a terminal."""
        text, style, column = "".join(row.cells), "", 0
        is_at_end = row is self._get_row() and self._column == row.length
        row.cells, row.has_escapes, row.length, row.tail = [], False, 0, ""
        for token in _TOKEN.finditer(text):
            if token[2] == "m":
                style = _add_style(style, token[0], token[1])
            elif token[2] is None and (token[0] >= " " or token[0][0] == "\t"):
                row.put(column, token[0], style)
                column += len(token[0])
        if is_at_end:
            self._column, self._style = column, style

    def _apply_sequence(self, text: str, parameters: str, final: str) -> None:
        if final == "m":
            self._style = _add_style(self._style, text, parameters)
            return
        first = parameters.split(";")[0]
        number = int(first[:9]) if first.isdecimal() else 0
        count = min(max(1, number), MAX_LINE_CHARS)
        match final:
            case "A" | "F":
                self._reach = min(MAX_OPEN_ROWS - 1, max(self._reach, count))
                self._row = max(0, self._row - count)
                self._get_row().is_rewritten = True
            case "B" | "E":
                self._row = min(len(self._rows) - 1, self._row + count)
            case "C":
                self._column = min(MAX_LINE_CHARS, self._column + count)
            case "D":
                self._column = max(0, self._column - count)
            case "G":
                self._column = count - 1
            case "K":
                self._erase_in_line(number)
            case "J" if number == 0:
                self._erase_in_line(0)
                for row in self._rows[self._row + 1 :]:
                    row.erase(0, None)
        if final in "EF":
            self._column = 0

    def _erase_in_line(self, mode: int) -> None:
        row = self._get_row()
        if row.has_escapes:
            self._expand(row)
        row.is_rewritten = True
        if mode == 0:
            row.erase(self._column, None)
        elif mode == 1:
            row.erase(0, self._column + 1)
        elif mode == 2:
            row.erase(0, None)

    def _get_row(self) -> _Row:
        return self._rows[self._row]

    def _newline(self) -> None:
        """Move the cursor to the next line. Lines that no cursor movement is expected to reach are complete."""
        self._row, self._column = self._row + 1, 0
        if self._row < len(self._rows):
            return
        ended = self._rows[-1]
        self._rows.append(_Row())
        is_reachable = ended.is_rewritten or (ended.length == 0 and len(self._rows) > 2)
        while len(self._rows) > (MAX_OPEN_ROWS if is_reachable else self._reach + 1):
            self._commit_first()


def shorten_line(text: str, max_chars: int) -> str:
    """Return a line with its middle left out if it is longer than `max_chars`."""
    if len(text) <= max_chars:
        return text
    head, tail = max_chars * 2 // 3, max_chars // 4
    return f"{text[:head]} … {text[-tail:]}"


def _format_line(text: str) -> str:
    row = _Row()
    row.append(text)
    return row.format()


def _add_style(style: str, sequence: str, parameters: str) -> str:
    """Return the color sequences after one more of them."""
    if parameters.strip("0;") == "":
        return ""
    style += sequence
    return style if len(style) <= MAX_STYLE_CHARS else sequence
