"""Read text files, JSONL, and Parquet as documents, and encode them as tokens.

Errors name the field, the file, and the line or row. Pieces have a bounded length, and end where no common tokenizer
merges characters.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np
from tokenizers import Tokenizer

from workers.trainer.errors import UserError, format_reason

MAX_PIECE_CHARS = 2**16
# The patterns of GPT-2, GPT-4, and Llama 3 always split after a line end and before a single space.
# They keep runs of white space together.
CUTS = (re.compile(r".*\S\n(?=\S)", re.DOTALL), re.compile(r".*\S(?= \S)", re.DOTALL))
JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
TOKENS = ".bin"
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
MAX_LINE_BYTES = 2**28  # One JSONL line is in memory.
BATCH_ROWS = 32  # rows of Parquet in memory
CACHE_VERSION = 2
END_OF_TEXT = "<|endoftext|>"
MAX_TOKENIZER_BYTES = 2**28  # larger than any tokenizer, and small enough for memory
MAX_BATCH_CHARS = 2**19  # encoded together, about 100 MB
MAX_BATCH_PIECES = 1024


class TextPiece(NamedTuple):
    """Store a piece of a document. `last` is true for its last piece."""

    text: str
    last: bool


def split_document(blocks: Iterable[str]) -> Iterator[TextPiece]:
    """Split a document into pieces of at most PIECE_CHARS characters."""
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) > MAX_PIECE_CHARS:
            cuts = (pattern.match(rest, 0, MAX_PIECE_CHARS + 1) for pattern in CUTS)
            end = next((found.end() for found in cuts if found), MAX_PIECE_CHARS)
            yield TextPiece(rest[:end], last=False)
            rest = rest[end:]
    yield TextPiece(rest, last=True)


def iter_blocks(text: str) -> Iterator[str]:
    """Split a long text into blocks, so that `split_document` never copies the whole rest."""
    return (text[start : start + MAX_PIECE_CHARS] for start in range(0, len(text), MAX_PIECE_CHARS))


def get_suffix(path: Path) -> str:
    """Return the lowercase suffix of a file, which determines its format."""
    return path.suffix.lower()


def has_rows(path: Path) -> bool:
    """Return whether a file has one document per row (JSONL or Parquet)."""
    return get_suffix(path) in (*JSON_LINES, PARQUET)


def list_files(path: Path) -> Iterable[Path]:
    """Return a file, or the files of a folder in a fixed order."""
    return walk_text_files(path) if path.is_dir() else [path]


def walk_text_files(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Yield regular files in a fixed order, without hidden files and symlinks. Raises UserError."""

    def raise_error(error: OSError) -> NoReturn:
        name = Path(os.fsdecode(error.filename)).name
        raise UserError(f"`train.data`: cannot list the folder {name}: {error.strerror or error}")

    for here, folders, files in os.walk(folder, onerror=raise_error):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("."))
        for name in sorted(files):
            path = Path(here, name)
            if name.endswith(suffix) and not name.startswith(".") and not path.is_symlink() and path.is_file():
                yield path


def read_documents(path: Path, column: str) -> Iterator[TextPiece]:
    """Yield the text of a file or folder in pieces. JSONL and Parquet are read by `column`. Raises UserError."""
    for file in list_files(path):
        yield from read_rows(file, column) if has_rows(file) else read_text(file)


def read_rows(path: Path, column: str) -> Iterator[TextPiece]:
    """Yield the documents of a JSONL or Parquet file. Raises UserError."""
    texts = _read_parquet(path, column) if get_suffix(path) == PARQUET else _read_json_lines(path, column)
    with report_read_errors(path):
        for text in texts:
            yield from split_document(iter_blocks(text))


def read_text(path: Path) -> Iterator[TextPiece]:
    """Yield a text file as one document. Raises UserError."""
    reject_token_file(path)
    with report_read_errors(path):
        yield from split_document(_decode(path))


def reject_token_file(path: Path) -> None:
    """Raise a `UserError` for a token file among text files."""
    if get_suffix(path) == TOKENS:
        raise UserError(
            f"`train.data` has a folder with {path.name}, which has tokens instead of text. Use this file alone."
        )


@contextmanager
def report_read_errors(path: Path) -> Iterator[None]:
    """Convert an `OSError` to a `UserError` that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"`train.data`: cannot read {path.name}: {error.strerror or error}") from None


def _decode(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    with path.open("rb") as file:
        for block in chain(iter(partial(file.read, MAX_PIECE_CHARS), b""), [b""]):
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                raise UserError(f"`train.data`: {path.name} line {line} is not UTF-8: {error.reason}") from None
            line += block.count(b"\n")
            yield text


def _read_json_lines(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > MAX_LINE_BYTES:
                raise UserError(f"`train.data`: {path.name} line {number} is longer than {MAX_LINE_BYTES:,} bytes")
            if line.strip():
                yield _parse_json_text(line, column, f"{path.name} line {number}")


def _parse_json_text(line: bytes, column: str, place: str) -> str:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"`train.data`: {place} is not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:
        raise UserError(f"`train.data`: {place} is not JSON: {error}") from None
    except RecursionError:
        raise UserError(f"`train.data`: {place} is JSON that is nested too deeply") from None
    if not isinstance(entry, dict):
        raise UserError(
            f"`train.column` is {column!r}, but {place} is a {_get_json_type(entry)} instead of a JSON object."
        )
    if column not in entry:
        raise UserError(f"`train.column` is {column!r}, but {place} has {_format_names(entry)}.")
    text = entry[column]
    if not isinstance(text, str):
        raise UserError(
            f"`train.column` is {column!r}, but {place} has a {_get_json_type(text)} there instead of text."
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(f"`train.data`: {place} has {half} in {column!r}, which is an incomplete character.") from None
    return text


def _get_json_type(value: object) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")


def _format_names(names: Iterable[str]) -> str:
    """Join names for an error message."""
    text = ", ".join(sorted(names)).encode(errors="backslashreplace").decode()
    return f"{text[:200]} ..." if len(text) > 200 else text or "nothing"


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as source:
        yield from _read_column(source, column, path)


def _read_column(source: IO[bytes], column: str, path: Path) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source) as file:
            schema = file.schema_arrow
            if schema.names.count(column) != 1:
                have = "several columns" if column in schema.names else "no column"
                names = _format_names(schema.names)
                raise UserError(f"`train.column` is {column!r}, but {path.name} has {have} of that name: {names}.")
            _check_column_type(schema.field(column).type, column, path)
            first = 1
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[column]):
                yield from _iter_column_texts(batch.column(0), column, path, first)
                first += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"`train.data`: {path.name} cannot be read as parquet: {format_reason(error)}") from None


def _check_column_type(kind: Any, column: str, path: Path) -> None:
    from pyarrow import types

    value = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)):
        raise UserError(f"`train.column` is {column!r}, which is {str(kind)[:100]} instead of text in {path.name}.")


def _iter_column_texts(values: Any, column: str, path: Path, first: int) -> Iterator[str]:
    for row, value in enumerate(values, first):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            raise UserError(f"`train.data`: {path.name} row {row} is not UTF-8 in {column!r}: {error.reason}") from None
        if text is None:
            raise UserError(f"`train.column` is {column!r}, which is null in {path.name} row {row}.")
        yield text


class Encoder(NamedTuple):
    """Encode text as tokens, or as bytes without a tokenizer.

    `separator` ends each document. `size` is the largest token plus 1.
    """

    tokenizer: Tokenizer | None
    name: str
    size: int
    dtype: np.dtype[Any]
    between: bytes
    digest: str

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text. Raises UserError."""
        if self.tokenizer is None:
            return [list(text.encode()) for text in texts]
        try:
            return [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # The library raises plain `Exception`.
            raise UserError(f"{self.name} cannot encode a text: {format_reason(error)}") from None


def make_byte_encoder() -> Encoder:
    return Encoder(None, "bytes", 256, np.dtype(np.uint8), b"\n", f"{CACHE_VERSION}/bytes")


def load_tokenizer(path: Path, name: str) -> Encoder:
    """Load a JSON file of the `tokenizers` library. `name` names the field and value in errors.

    Truncation, padding, and dropout are disabled, so that the tokens of a text are the same on all hosts.
    Raises UserError.
    """
    content = _read_tokenizer(path, name)
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # The library raises plain `Exception`.
        raise UserError(f"{name} is not tokenizers JSON: {format_reason(error)}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    dtype = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
    end = tokenizer.token_to_id(END_OF_TEXT)
    between = b"" if end is None else np.array([end], dtype=dtype).tobytes()
    digest = hashlib.sha256(f"{CACHE_VERSION}/".encode() + content).hexdigest()
    return Encoder(tokenizer, name, size, dtype, between, digest)


def check_vocab_size(encoder: Encoder, vocab_size: int) -> None:
    """Raise a `UserError` if the tokenizer has more tokens than the model."""
    if encoder.tokenizer is not None and encoder.size > vocab_size:
        raise UserError(f"{encoder.name} has {encoder.size} tokens, more than the vocab_size {vocab_size} of the model")


def write_tokens(path: Path, encoder: Encoder, column: str, out: IO[bytes]) -> None:
    """Encode a file or folder. Each document ends with the separator if document ends are known. Raises UserError."""
    between = encoder.between if path.is_dir() or has_rows(path) else b""
    if encoder.tokenizer is None:
        _write_bytes(path, column, between, out)
    else:
        write_pieces(read_documents(path, column), encoder, between, out)


def write_pieces(found: Iterable[TextPiece], encoder: Encoder, between: bytes, out: IO[bytes]) -> None:
    """Encode pieces with a tokenizer, and write `separator` after each document."""
    for batch in _batch_pieces(found):
        for piece, ids in zip(batch, encoder.encode([piece.text for piece in batch]), strict=True):
            out.write(np.array(ids, dtype=encoder.dtype).tobytes())
            if piece.last:
                out.write(between)


def get_cache_name(path: Path, encoder: Encoder, column: str) -> str:
    """Return a file name that changes with the files, the column, and the tokenizer."""
    digest = hashlib.sha256(f"{encoder.digest}/{column}".encode())
    for file in list_files(path):
        found = file.stat()
        digest.update(os.fsencode(f"/{file}/{found.st_size}/{found.st_mtime_ns}"))
    return f"{digest.hexdigest()[:32]}.u{8 * encoder.dtype.itemsize}"


def _write_bytes(path: Path, column: str, between: bytes, out: IO[bytes]) -> None:
    """Write rows as UTF-8, and copy other files unchanged."""
    for file in list_files(path):
        if has_rows(file):
            for piece in read_rows(file, column):
                out.write(piece.text.encode() + (between if piece.last else b""))
            continue
        reject_token_file(file)
        with report_read_errors(file):
            source = file.open("rb")
        with source:
            shutil.copyfileobj(source, out)
        out.write(between)


def _batch_pieces(found: Iterable[TextPiece]) -> Iterator[list[TextPiece]]:
    """Group pieces by characters. A tokenizer needs more than 100 bytes per character."""
    batch: list[TextPiece] = []
    chars = 0
    for piece in found:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= MAX_BATCH_CHARS or len(batch) == MAX_BATCH_PIECES:
            yield batch
            batch, chars = [], 0
    yield batch


def _read_tokenizer(path: Path, name: str) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # Opening a FIFO would block forever.
            raise UserError(f"{name} is not a regular file")
        if found.st_size > MAX_TOKENIZER_BYTES:
            raise UserError(f"{name} has {found.st_size:,} bytes. Use at most {MAX_TOKENIZER_BYTES:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from None
