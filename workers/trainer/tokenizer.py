"""Encode documents as tokens in a file that all ranks map."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from workers.trainer.documents import (
    TextPiece,
    has_documents,
    has_rows,
    list_files,
    read_documents,
    read_rows,
    reject_token_file,
    report_read_errors,
)
from workers.trainer.errors import UserError, format_reason

CACHE_VERSION = 2
END_OF_TEXT = "<|endoftext|>"
MAX_TOKENIZER_BYTES = 2**28  # larger than any tokenizer, and small enough for memory
MAX_BATCH_CHARS = 2**19  # encoded together, about 100 MB
MAX_BATCH_PIECES = 1024


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
        """Return the tokens of each text.

        Raises:
            UserError: if the tokenizer cannot encode a text.
        """
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

    Raises:
        UserError: if the file is not a tokenizer.
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
    """Encode a file or folder. Each document ends with the separator if document ends are known.

    Raises:
        UserError: if a file, line, or row cannot be read.
    """
    between = encoder.between if has_documents(path) else b""
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
