"""Training data: text or tokens, and batches that depend on the seed and the step alone."""

from __future__ import annotations

import fcntl
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from planner.facts.spec import JobSpec, Sampling
from workers.disk import open_draft
from workers.trainer.documents import TOKENS, Piece, blocks, has_rows, kind_of, pieces, text_files
from workers.trainer.errors import UserError, brief
from workers.trainer.tokenizer import (
    Encoder,
    byte_encoder,
    cache_name,
    check_size,
    load_tokenizer,
    write_pieces,
    write_tokens,
)

STDLIB = "stdlib"
HELD_OUT_SHARE = 0.05
MAX_TEXT_BYTES = 32 * 2**20
EVAL_STREAM = 2**32  # keeps validation draws apart from those of any training step
EPOCH_STREAM = 2**33  # and the order of an epoch from both

Tokens = npt.NDArray[np.integer]


class Corpus:
    """A flat array of tokens, its end held out for validation."""

    def __init__(self, tokens: Tokens, vocab_size: int, seq_len: int, name: str, sampling: Sampling = "random") -> None:
        held_out = int(len(tokens) * HELD_OUT_SHARE)
        self.train, self.held_out = tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]
        self._vocab_size, self._name, self._sampling = vocab_size, name, sampling
        if held_out < seq_len + 1:
            need = int((seq_len + 1) / HELD_OUT_SHARE) + 1
            raise UserError(
                f"`train.data` is {name!r} with {len(tokens)} tokens, but about {need} are needed. "
                f"The held-out 5% needs one sequence of {seq_len} + 1 tokens."
            )

    def train_batch(self, seed: int, step: int, global_batch: int, rows: slice, seq_len: int) -> Tokens:
        """Rows of step `step`'s global batch, (rows, seq_len + 1): inputs and, one later, targets."""
        if self._sampling == "random":
            starts = _anywhere((seed, step), len(self.train), global_batch, seq_len)[rows]
        else:
            numbers = np.arange(step * global_batch, (step + 1) * global_batch)[rows]
            starts = _in_turn(seed, numbers, (len(self.train) - 1) // seq_len) * seq_len
        return self._cut(self.train, 0, starts, seq_len)

    def eval_batch(self, seed: int, global_batch: int, rows: slice, seq_len: int) -> Tokens:
        """The same held-out sequences every time, (rows, seq_len + 1)."""
        starts = _anywhere((seed, EVAL_STREAM), len(self.held_out), global_batch, seq_len)[rows]
        return self._cut(self.held_out, len(self.train), starts, seq_len)

    def _cut(self, tokens: Tokens, first: int, starts: Tokens, seq_len: int) -> Tokens:
        """`first`: where `tokens` start in the whole."""
        batch = np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
        largest = int(batch.max())
        if largest >= self._vocab_size:
            row, column = np.argwhere(batch == largest)[0]
            place = f"{self._name!r}, which has token {largest} at position {first + starts[row] + column:,}"
            raise UserError(f"`train.data` is {place}. Use tokens below the vocab_size {self._vocab_size}.")
        return batch


def _anywhere(key: tuple[int, int], num_tokens: int, global_batch: int, seq_len: int) -> Tokens:
    """Where the sequences of a global batch begin, drawn with replacement."""
    return np.random.default_rng(key).integers(0, num_tokens - seq_len, size=global_batch)


def _in_turn(seed: int, numbers: Tokens, parts: int) -> Tokens:
    """Which of the data's parts sequence number `numbers` of a run are: all of them once, shuffled, an epoch."""
    epochs, places = np.divmod(numbers, parts)
    return np.array([_shuffled(seed, int(e), parts)[p] for e, p in zip(epochs, places, strict=True)], dtype=np.int64)


@lru_cache(maxsize=2)  # a batch may lie in two epochs
def _shuffled(seed: int, epoch: int, parts: int) -> Tokens:
    return np.random.default_rng((seed, EPOCH_STREAM + epoch)).permutation(parts)


def corpus_of(spec: JobSpec, root: Path) -> Corpus:
    """The data a job asks for."""
    train, size = spec.train, spec.model.vocab_size
    column, tokenizer, sampling = train.column, train.tokenizer, train.sampling
    return load_corpus(train.data, root, size, train.seq_len, column=column, tokenizer=tokenizer, sampling=sampling)


def load_corpus(
    data: str,
    root: Path,
    vocab_size: int,
    seq_len: int,
    *,
    column: str = "text",
    tokenizer: str | None = None,
    sampling: Sampling = "random",
) -> Corpus:
    """Open `data`: "stdlib", or below `root` a text file, a directory of text, JSONL or parquet with a text `column`,
    or a `.bin` of uint16 tokens. Text is bytes, or encoded by `tokenizer`, a `tokenizers` JSON file below `root`.
    A row, and a file of a directory, is a document: a newline or the tokenizer's end of text follows each.

    Raises:
        UserError: outside the root, missing, unreadable or too short.
    """
    encoder = byte_encoder() if tokenizer is None else tokenizer_of(root, tokenizer)
    check_size(encoder, vocab_size)
    if data == STDLIB:
        tokens = _stdlib(root, encoder)
        return Corpus(tokens, vocab_size, seq_len, data, sampling)
    path = inside(root, data, "train.data")
    try:
        tokens = _open(path, data, root, encoder, column)
    except OSError as error:
        raise UserError(f"`train.data` is {data!r}, which cannot be read: {error.strerror or error}") from None
    return Corpus(tokens, vocab_size, seq_len, data, sampling)


def tokenizer_of(root: Path, tokenizer: str) -> Encoder:
    """The tokenizer of a job: `tokenizer` as train.tokenizer names it, below the data root.

    Raises:
        UserError: outside the root, missing, or none.
    """
    return load_tokenizer(inside(root, tokenizer, "train.tokenizer"), f"`train.tokenizer` {tokenizer!r}")


def _open(path: Path, data: str, root: Path, encoder: Encoder, column: str) -> Tokens:
    # Opening a FIFO would wait for a writer for ever, and a device is nobody's training data.
    if not path.is_dir() and not path.is_file():
        raise UserError(f"`train.data` is {data!r}. Use a regular file or a folder.")
    if path.is_file() and kind_of(path) == TOKENS:
        return _mapped(path, data, np.dtype(np.uint16))
    if path.is_file() and encoder.tokenizer is None and not has_rows(path):
        return _mapped(path, data, np.dtype(np.uint8))
    name = cache_name(path, encoder, column)
    return _cached(root, name, encoder.dtype, partial(write_tokens, path, encoder, column))


def _mapped(path: Path, data: str, kind: np.dtype[Any]) -> Tokens:
    size = path.stat().st_size
    if size % kind.itemsize:
        raise UserError(f"`train.data` is {data!r} with {size} bytes, which is not a multiple of 2 (uint16).")
    return np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, kind)


def inside(root: Path, name: str, field: str) -> Path:
    """Where `name` lies below `root`. Resolves symlinks too: what counts is where the bytes lie.

    Raises:
        UserError: outside the root, missing, or no name for a file.
    """
    base = root.resolve()
    try:
        path = (base / name).resolve()
        there = path.exists()
    except OSError as error:
        raise UserError(f"`{field}` is {brief(name)}, which cannot be read: {error.strerror}") from None
    except (ValueError, RuntimeError):  # a NUL, half a character, links in a circle
        raise UserError(f"`{field}` is {brief(name)}, which is not a valid file name.") from None
    if not path.is_relative_to(base):
        raise UserError(f"`{field}` is {brief(name)}, which is outside the data root.")
    if not there:
        raise UserError(f"`{field}` is {brief(name)}, which does not exist below the data root.")
    return path


def _stdlib(root: Path, encoder: Encoder) -> Tokens:
    """The source of Python's standard library as one text, up to MAX_TEXT_BYTES."""
    folder = Path(sysconfig.get_paths()["stdlib"])

    def sources() -> Iterator[bytes]:
        left = MAX_TEXT_BYTES
        for path in text_files(folder, suffix=".py"):
            part = path.read_bytes()[:left]
            yield part
            left -= len(part)
            if not left:
                return

    def parts() -> Iterator[Piece]:
        for source in sources():
            yield from pieces(blocks(source.decode(errors="replace")))

    def gather(out: IO[bytes]) -> None:
        if encoder.tokenizer is None:
            out.writelines(sources())
        else:
            write_pieces(parts(), encoder, b"", out)

    version = platform.python_version()
    name = f"stdlib-{version}.u8" if encoder.tokenizer is None else f"stdlib-{version}-{encoder.digest[:16]}"
    return _cached(root, name, encoder.dtype, gather)


def _cached(root: Path, name: str, dtype: np.dtype[Any], write: Callable[[IO[bytes]], None]) -> Tokens:
    """Make a file of tokens once that all ranks map; the first to come writes it, by rename.

    Each user has such files apart: what another user's processes wrote is not trusted to be what it should.
    """
    folder = root / ".cache" / str(os.geteuid())
    target = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                with open_draft(target) as draft, draft.open("wb") as out:
                    write(out)
    except OSError as error:
        if not target.exists():
            raise UserError(
                f"Cannot write {name} for `train.data` to .cache/{folder.name} ({error.strerror or error}). "
                "Make the data root writable for one run, or copy the file there."
            ) from None
    return np.memmap(target, dtype=dtype, mode="r") if target.stat().st_size else np.empty(0, dtype)
