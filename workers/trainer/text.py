"""Text of any kind as documents, and documents as tokens in a file that all ranks map."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from workers.trainer.errors import UserError

CACHE_VERSION = 1
END_OF_TEXT = "<|endoftext|>"
BATCH = 256  # documents encoded together
BLOCK_CHARS = 2**20
JSON_LINES = (".jsonl", ".ndjson")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}


class Encoder(NamedTuple):
    """Text to tokens: bytes without a tokenizer. `between` ends each document of JSONL and parquet."""

    tokenizer: Tokenizer | None
    dtype: np.dtype[Any]
    between: list[int]
    digest: str

    def encode(self, texts: list[str]) -> list[np.ndarray[Any, np.dtype[Any]]]:
        """Tokens of each text."""
        if self.tokenizer is None:
            return [np.frombuffer(text.encode(), dtype=self.dtype) for text in texts]
        return [np.array(e.ids, dtype=self.dtype) for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]


def byte_encoder() -> Encoder:
    return Encoder(None, np.dtype(np.uint8), [ord("\n")], "bytes")


def load_tokenizer(path: Path, name: str) -> Encoder:
    """Read a tokenizer's JSON file, as the `tokenizers` library writes it.

    Raises:
        UserError: when it is none.
    """
    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except OSError as error:
        raise UserError(f"train.tokenizer: cannot read {name!r}: {error.strerror or error}") from None
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"train.tokenizer: {name!r} is no tokenizer's JSON: {str(error)[:200]}") from None
    end = tokenizer.token_to_id(END_OF_TEXT)
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    dtype = np.dtype(np.uint16 if largest < 2**16 else np.uint32)
    return Encoder(tokenizer, dtype, [] if end is None else [end], hashlib.sha256(content).hexdigest())


def documents(path: Path, column: str) -> Iterator[str]:
    """The texts of a file or folder: JSONL and parquet by `column`, all else as it stands.

    Raises:
        UserError: naming the file, and the line of JSONL, that cannot be read.
    """
    if path.is_dir():
        for file in text_files(path):
            yield from documents(file, column)
    elif path.suffix in JSON_LINES:
        yield from _json_lines(path, column)
    elif path.suffix == ".parquet":
        yield from _parquet(path, column)
    else:
        yield from _plain(path)


def has_documents(path: Path) -> bool:
    """Whether a file holds documents one by one, so that their ends are known."""
    return path.suffix in JSON_LINES or path.suffix == ".parquet"


def text_files(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Regular files in a fixed order, hidden ones and symlinks left out."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("."))
        for name in sorted(files):
            path = Path(here, name)
            if name.endswith(suffix) and not name.startswith(".") and not path.is_symlink() and path.is_file():
                yield path


def write_tokens(path: Path, encoder: Encoder, column: str, out: IO[bytes]) -> int:
    """Encode a file or folder document by document; gives how many tokens that were."""
    count = 0
    between = np.array(encoder.between if has_documents(path) else [], dtype=encoder.dtype)
    texts = documents(path, column)
    while batch := list(islice(texts, BATCH)):
        for tokens in encoder.encode(batch):
            out.write(tokens.tobytes())
            out.write(between.tobytes())
            count += len(tokens) + len(between)
    return count


def cache_name(path: Path, encoder: Encoder, column: str) -> str:
    """A name that changes with the files, the column and the tokenizer."""
    digest = hashlib.sha256(f"{CACHE_VERSION}/{encoder.digest}/{column}".encode())
    for file in _files(path):
        found = file.stat()
        digest.update(f"/{file}/{found.st_size}/{found.st_mtime_ns}".encode())
    return f"{digest.hexdigest()[:32]}.u{8 * encoder.dtype.itemsize}"


def _files(path: Path) -> Iterable[Path]:
    return text_files(path) if path.is_dir() else [path]


def _plain(path: Path) -> Iterator[str]:
    """Blocks that end with a line, so that no word is cut."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(BLOCK_CHARS):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise UserError(f"train.data: {path.name} is not UTF-8: {error.reason} at byte {error.start}") from None


def _json_lines(path: Path, column: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise UserError(f"train.data: {path.name} line {number} is not JSON: {error}") from None
            if not isinstance(entry, dict) or not isinstance(entry.get(column), str):
                have = ", ".join(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
                raise UserError(f"train.column: {path.name} line {number} has no text {column!r}; it has {have}")
            yield entry[column]


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if column not in file.schema_arrow.names:
            have = ", ".join(file.schema_arrow.names)
            raise UserError(f"train.column: {path.name} has no column {column!r}; it has {have}")
        for batch in file.iter_batches(batch_size=BATCH, columns=[column]):
            for value in batch.column(0).to_pylist():
                if not isinstance(value, str):
                    raise UserError(f"train.column: {path.name}'s {column!r} is no text: {value!r:.60}")
                yield value
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"train.data: {path.name} cannot be read as parquet: {str(error)[:200]}") from None
