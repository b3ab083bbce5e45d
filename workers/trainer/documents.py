"""Documents of any length as pieces of bounded length, cut where no tokenizer in use joins anything.

Text of any kind as documents. What cannot be read is told by field, file and line.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from workers.trainer.errors import UserError, reason

PIECE_CHARS = 2**16
# After a line end or before a space that stands alone: GPT-2's, GPT-4's and Llama 3's patterns split there as well,
# whatever is around it. Beside other white space they would not: they take runs of it together.
CUTS = (re.compile(r".*\S\n(?=\S)", re.DOTALL), re.compile(r".*\S(?= \S)", re.DOTALL))


class Piece(NamedTuple):
    """A part of a document. `last`: the document ends with it."""

    text: str
    last: bool


def pieces(blocks: Iterable[str]) -> Iterator[Piece]:
    """One document, however it came in blocks, in pieces of at most PIECE_CHARS characters."""
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) > PIECE_CHARS:
            end = _cut(rest)
            yield Piece(rest[:end], last=False)
            rest = rest[end:]
    yield Piece(rest, last=True)


def blocks(text: str) -> Iterator[str]:
    """A long text bit by bit, so that cutting it never copies all of the rest."""
    return (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))


def _cut(text: str) -> int:
    """Where to cut `text`, longer than a piece: looks at one character beyond it."""
    for pattern in CUTS:
        if found := pattern.match(text, 0, PIECE_CHARS + 1):
            return found.end()
    return PIECE_CHARS


JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
TOKENS = ".bin"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
LINE_BYTES = 2**28  # a line of JSONL is held in memory
ROWS = 32  # of parquet, held in memory together


def kind_of(path: Path) -> str:
    """A file's suffix, by which its format is known: case does not matter."""
    return path.suffix.lower()


def has_documents(path: Path) -> bool:
    """Whether there are documents one by one, so that their ends are known: rows, or the files of a folder."""
    return path.is_dir() or has_rows(path)


def has_rows(path: Path) -> bool:
    """Whether a file holds its documents in rows, JSONL or parquet."""
    return kind_of(path) in (*JSON_LINES, PARQUET)


def files_of(path: Path) -> Iterable[Path]:
    """A file itself, or a folder's files in a fixed order."""
    return text_files(path) if path.is_dir() else [path]


def text_files(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Regular files in a fixed order, hidden ones and symlinks left out.

    Raises:
        UserError: naming a folder below that cannot be listed.
    """
    for here, folders, files in os.walk(folder, onerror=_unreadable_folder):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("."))
        for name in sorted(files):
            path = Path(here, name)
            if name.endswith(suffix) and not name.startswith(".") and not path.is_symlink() and path.is_file():
                yield path


def documents(path: Path, column: str) -> Iterator[Piece]:
    """The texts of a file or folder: JSONL and parquet by `column`, all else as it stands.

    Raises:
        UserError: naming the file, and the line or row, that cannot be read.
    """
    for file in files_of(path):
        yield from rows(file, column) if has_rows(file) else plain(file)


def rows(path: Path, column: str) -> Iterator[Piece]:
    """The documents of a JSONL or parquet file.

    Raises:
        UserError: naming the line or row that cannot be read.
    """
    texts = _parquet(path, column) if kind_of(path) == PARQUET else _json_lines(path, column)
    with reading(path):
        for text in texts:
            yield from pieces(blocks(text))


def plain(path: Path) -> Iterator[Piece]:
    """A text file, one document.

    Raises:
        UserError: naming the line that is not UTF-8, or when it is a file of tokens.
    """
    refuse_tokens(path)
    with reading(path):
        yield from pieces(_decoded(path))


def refuse_tokens(path: Path) -> None:
    """Tokens among text, or to be encoded again, are a mistake that nothing would show."""
    if kind_of(path) == TOKENS:
        raise UserError(
            f"`train.data` has a folder with {path.name}, which has tokens instead of text. Use this file alone."
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say which file could not be read."""
    try:
        yield
    except OSError as error:
        raise UserError(f"`train.data`: cannot read {path.name}: {error.strerror or error}") from None


def _unreadable_folder(error: OSError) -> NoReturn:
    name = Path(os.fsdecode(error.filename)).name
    raise UserError(f"`train.data`: cannot list the folder {name}: {error.strerror or error}")


def _decoded(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    with path.open("rb") as file:
        for block in chain(iter(partial(file.read, PIECE_CHARS), b""), [b""]):
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                raise UserError(f"`train.data`: {path.name} line {line} is not UTF-8: {error.reason}") from None
            line += block.count(b"\n")
            yield text


def _json_lines(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, LINE_BYTES + 1), b""), 1):
            if len(line) > LINE_BYTES:
                raise UserError(f"`train.data`: {path.name} line {number} is longer than {LINE_BYTES:,} bytes")
            if line.strip():
                yield _text_of(line, column, f"{path.name} line {number}")


def _text_of(line: bytes, column: str, place: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"`train.data`: {place} is not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:
        raise UserError(f"`train.data`: {place} is not JSON: {error}") from None
    except RecursionError:
        raise UserError(f"`train.data`: {place} is JSON that is nested too deeply") from None
    if not isinstance(entry, dict):
        raise UserError(f"`train.column` is {column!r}, but {place} is a {_kind(entry)} instead of a JSON object.")
    if column not in entry:
        raise UserError(f"`train.column` is {column!r}, but {place} has {_listed(entry)}.")
    text = entry[column]
    if not isinstance(text, str):
        raise UserError(f"`train.column` is {column!r}, but {place} has a {_kind(text)} there instead of text.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"`train.data`: {place} has {half} in {column!r}, which is an incomplete character.") from None
    return text


def _kind(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _listed(names: Iterable[str]) -> str:
    """Names for one line of an error."""
    text = ", ".join(sorted(names)).encode(errors="backslashreplace").decode()
    return f"{text[:200]} ..." if len(text) > 200 else text or "nothing"


def _parquet(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as source:
        yield from _column(source, column, path)


def _column(source: IO[bytes], column: str, path: Path) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            schema = file.schema_arrow
            if schema.names.count(column) != 1:
                have = "several columns" if column in schema.names else "no column"
                raise UserError(
                    f"`train.column` is {column!r}, but {path.name} has {have} of that name: {_listed(schema.names)}."
                )
            _check_type(schema.field(column).type, column, path)
            first = 1
            for batch in file.iter_batches(batch_size=ROWS, columns=[column]):
                yield from _texts_of(batch.column(0), column, path, first)
                first += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"`train.data`: {path.name} cannot be read as parquet: {reason(error)}") from None


def _check_type(kind: Any, column: str, path: Path) -> None:
    from pyarrow import types

    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise UserError(f"`train.column` is {column!r}, which is {str(kind)[:100]} instead of text in {path.name}.")


def _texts_of(values: Any, column: str, path: Path, first: int) -> Iterator[str]:
    for row, value in enumerate(values, first):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            raise UserError(f"`train.data`: {path.name} row {row} is not UTF-8 in {column!r}: {error.reason}") from None
        if text is None:
            raise UserError(f"`train.column` is {column!r}, which is null in {path.name} row {row}.")
        yield text
