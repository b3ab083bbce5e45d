"""Documents as tokens: bytes, or what a tokenizer makes of them, in a file that all ranks map."""

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

from workers.trainer.documents import Piece, documents, files_of, has_documents, has_rows, reading, refuse_tokens, rows
from workers.trainer.errors import UserError, reason

CACHE_VERSION = 2
END_OF_TEXT = "<|endoftext|>"
TOKENIZER_BYTES = 2**28  # more than any tokenizer's JSON, less than what a text by mistake would fill memory with
BATCH_CHARS = 2**19  # encoded together: about 100 MB
BATCH_PIECES = 1024


class Encoder(NamedTuple):
    """Text to tokens: bytes without a tokenizer. `between` ends each document; `size`: largest token + 1."""

    tokenizer: Tokenizer | None
    name: str
    size: int
    dtype: np.dtype[Any]
    between: bytes
    digest: str

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Tokens of each text.

        Raises:
            UserError: when the tokenizer has none for it.
        """
        if self.tokenizer is None:
            return [list(text.encode()) for text in texts]
        try:
            return [e.ids for e in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        except Exception as error:  # the library raises plain Exceptions
            raise UserError(f"{self.name} cannot encode a text: {reason(error)}") from None


def byte_encoder() -> Encoder:
    return Encoder(None, "bytes", 256, np.dtype(np.uint8), b"\n", f"{CACHE_VERSION}/bytes")


def load_tokenizer(path: Path, name: str) -> Encoder:
    """Read a tokenizer's JSON file, as the `tokenizers` library writes it. `name` is the field and what it holds.

    Truncation, padding and dropout that the file asks for are switched off: no text is lost, none is made up,
    and the tokens of a text are the same on all hosts.

    Raises:
        UserError: when it is none.
    """
    content = _content(path, name)
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{name} is not tokenizers JSON: {reason(error)}") from None
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


def check_size(encoder: Encoder, vocab_size: int) -> None:
    """Refuse a tokenizer whose tokens the model has no place for."""
    if encoder.tokenizer is not None and encoder.size > vocab_size:
        raise UserError(f"{encoder.name} has {encoder.size} tokens, more than the vocab_size {vocab_size} of the model")


def write_tokens(path: Path, encoder: Encoder, column: str, out: IO[bytes]) -> None:
    """Encode a file or folder. Where there are documents one by one, each is followed by the encoder's `between`.

    Raises:
        UserError: naming the file, and the line or row, that cannot be read.
    """
    between = encoder.between if has_documents(path) else b""
    if encoder.tokenizer is None:
        _write_bytes(path, column, between, out)
    else:
        write_pieces(documents(path, column), encoder, between, out)


def write_pieces(found: Iterable[Piece], encoder: Encoder, between: bytes, out: IO[bytes]) -> None:
    """Encode pieces by a tokenizer, `between` after each document."""
    for batch in _batches(found):
        for piece, ids in zip(batch, encoder.encode([piece.text for piece in batch]), strict=True):
            out.write(np.array(ids, dtype=encoder.dtype).tobytes())
            if piece.last:
                out.write(between)


def cache_name(path: Path, encoder: Encoder, column: str) -> str:
    """A name that changes with the files, the column and the tokenizer."""
    digest = hashlib.sha256(f"{encoder.digest}/{column}".encode())
    for file in files_of(path):
        found = file.stat()
        digest.update(os.fsencode(f"/{file}/{found.st_size}/{found.st_mtime_ns}"))
    return f"{digest.hexdigest()[:32]}.u{8 * encoder.dtype.itemsize}"


def _write_bytes(path: Path, column: str, between: bytes, out: IO[bytes]) -> None:
    """Rows as UTF-8, all else as it stands, in whatever encoding."""
    for file in files_of(path):
        if has_rows(file):
            for piece in rows(file, column):
                out.write(piece.text.encode() + (between if piece.last else b""))
            continue
        refuse_tokens(file)
        with reading(file):
            source = file.open("rb")
        with source:
            shutil.copyfileobj(source, out)
        out.write(between)


def _batches(found: Iterable[Piece]) -> Iterator[list[Piece]]:
    """By characters: a tokenizer takes more than 100 bytes for each while it works."""
    batch: list[Piece] = []
    chars = 0
    for piece in found:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS or len(batch) == BATCH_PIECES:
            yield batch
            batch, chars = [], 0
    yield batch


def _content(path: Path, name: str) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a FIFO would wait for a writer for ever
            raise UserError(f"{name} is not a regular file")
        if found.st_size > TOKENIZER_BYTES:
            raise UserError(f"{name} has {found.st_size:,} bytes. Use at most {TOKENIZER_BYTES:,} bytes")
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from None
