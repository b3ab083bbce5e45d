"""Training data as tokens. Batches depend only on the seed and the step."""

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
from workers.trainer.documents import (
    TOKENS,
    Encoder,
    TextPiece,
    check_vocab_size,
    get_cache_name,
    get_suffix,
    has_rows,
    iter_blocks,
    load_tokenizer,
    make_byte_encoder,
    split_document,
    walk_text_files,
    write_pieces,
    write_tokens,
)
from workers.trainer.errors import UserError, abbreviate

STDLIB = "stdlib"
HELD_OUT_SHARE = 0.05
MAX_TEXT_BYTES = 32 * 2**20
EVAL_STREAM = 2**32  # separates validation draws from draws of training steps
EPOCH_STREAM = 2**33  # separates epoch orders from both

Tokens = npt.NDArray[np.integer]


class TokenDataset:
    """Draw batches from a flat array of tokens. The last 5% is held out for validation."""

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
        """Return `rows` of the global batch of a step, (rows, seq_len + 1): inputs, and targets shifted by one."""
        if self._sampling == "random":
            starts = _draw_starts((seed, step), len(self.train), global_batch, seq_len)[rows]
        else:
            numbers = np.arange(step * global_batch, (step + 1) * global_batch)[rows]
            num_parts = (len(self.train) - 1) // seq_len
            epochs, places = np.divmod(numbers, num_parts)  # each epoch is a new permutation
            parts = [_permute_epoch(seed, int(e), num_parts)[p] for e, p in zip(epochs, places, strict=True)]
            starts = np.array(parts, dtype=np.int64) * seq_len
        return self._cut(self.train, 0, starts, seq_len)

    def eval_batch(self, seed: int, global_batch: int, rows: slice, seq_len: int) -> Tokens:
        """Return the same held-out sequences every time, (rows, seq_len + 1)."""
        starts = _draw_starts((seed, EVAL_STREAM), len(self.held_out), global_batch, seq_len)[rows]
        return self._cut(self.held_out, len(self.train), starts, seq_len)

    def _cut(self, tokens: Tokens, first: int, starts: Tokens, seq_len: int) -> Tokens:
        """Copy sequences from `tokens`, which begin at position `first` of the data."""
        batch = np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
        largest = int(batch.max())
        if largest >= self._vocab_size:
            row, column = np.argwhere(batch == largest)[0]
            place = f"{self._name!r}, which has token {largest} at position {first + starts[row] + column:,}"
            raise UserError(f"`train.data` is {place}. Use tokens below the vocab_size {self._vocab_size}.")
        return batch


def _draw_starts(key: tuple[int, int], num_tokens: int, global_batch: int, seq_len: int) -> Tokens:
    """Draw the start positions of a global batch with replacement."""
    return np.random.default_rng(key).integers(0, num_tokens - seq_len, size=global_batch)


@lru_cache(maxsize=2)  # A batch can span two epochs.
def _permute_epoch(seed: int, epoch: int, parts: int) -> Tokens:
    return np.random.default_rng((seed, EPOCH_STREAM + epoch)).permutation(parts)


def load_job_dataset(spec: JobSpec, root: Path) -> TokenDataset:
    """Load the training data of a job."""
    train, size = spec.train, spec.model.vocab_size
    column, tokenizer, sampling = train.column, train.tokenizer, train.sampling
    return load_dataset(train.data, root, size, train.seq_len, column=column, tokenizer=tokenizer, sampling=sampling)


def load_dataset(
    data: str,
    root: Path,
    vocab_size: int,
    seq_len: int,
    *,
    column: str = "text",
    tokenizer: str | None = None,
    sampling: Sampling = "random",
) -> TokenDataset:
    """Load `data`: "stdlib", or a path below `root`.

    A path is a text file, a JSONL or Parquet file with a text `column`, a folder of such files, or a `.bin` file of
    uint16 tokens. Text is encoded by `tokenizer` (a `tokenizers` JSON file below `root`), or as bytes. After each row,
    and each file of a folder, comes a newline or the end-of-text token. Raises UserError.
    """
    encoder = make_byte_encoder() if tokenizer is None else load_job_tokenizer(root, tokenizer)
    check_vocab_size(encoder, vocab_size)
    if data == STDLIB:
        tokens = _load_stdlib(root, encoder)
        return TokenDataset(tokens, vocab_size, seq_len, data, sampling)
    path = resolve_below(root, data, "train.data")
    try:
        tokens = _open(path, data, root, encoder, column)
    except OSError as error:
        raise UserError(f"`train.data` is {data!r}, which cannot be read: {error.strerror or error}") from None
    return TokenDataset(tokens, vocab_size, seq_len, data, sampling)


def load_job_tokenizer(root: Path, tokenizer: str) -> Encoder:
    """Load the tokenizer that `train.tokenizer` names, below the data root. Raises UserError."""
    return load_tokenizer(resolve_below(root, tokenizer, "train.tokenizer"), f"`train.tokenizer` {tokenizer!r}")


def _open(path: Path, data: str, root: Path, encoder: Encoder, column: str) -> Tokens:
    # Opening a FIFO would block forever.
    if not path.is_dir() and not path.is_file():
        raise UserError(f"`train.data` is {data!r}. Use a regular file or a folder.")
    if path.is_file() and get_suffix(path) == TOKENS:
        return _map_tokens(path, data, np.dtype(np.uint16))
    if path.is_file() and encoder.tokenizer is None and not has_rows(path):
        return _map_tokens(path, data, np.dtype(np.uint8))
    name = get_cache_name(path, encoder, column)
    return _map_cached(root, name, encoder.dtype, partial(write_tokens, path, encoder, column))


def _map_tokens(path: Path, data: str, kind: np.dtype[Any]) -> Tokens:
    size = path.stat().st_size
    if size % kind.itemsize:
        raise UserError(f"`train.data` is {data!r} with {size} bytes, which is not a multiple of 2 (uint16).")
    return np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, kind)


def resolve_below(root: Path, name: str, field: str) -> Path:
    """Return the path of `name` below `root`, with symlinks resolved. Raises UserError."""
    base = root.resolve()
    try:
        path = (base / name).resolve()
        there = path.exists()
    except OSError as error:
        raise UserError(f"`{field}` is {abbreviate(name)}, which cannot be read: {error.strerror}") from None
    except (ValueError, RuntimeError):  # a NUL, a lone surrogate, or a symlink loop
        raise UserError(f"`{field}` is {abbreviate(name)}, which is not a valid file name.") from None
    if not path.is_relative_to(base):
        raise UserError(f"`{field}` is {abbreviate(name)}, which is outside the data root.")
    if not there:
        raise UserError(f"`{field}` is {abbreviate(name)}, which does not exist below the data root.")
    return path


def _load_stdlib(root: Path, encoder: Encoder) -> Tokens:
    """Load the source of Python's standard library, up to MAX_TEXT_BYTES."""
    folder = Path(sysconfig.get_paths()["stdlib"])

    def sources() -> Iterator[bytes]:
        left = MAX_TEXT_BYTES
        for path in walk_text_files(folder, suffix=".py"):
            part = path.read_bytes()[:left]
            yield part
            left -= len(part)
            if not left:
                return

    def parts() -> Iterator[TextPiece]:
        for source in sources():
            yield from split_document(iter_blocks(source.decode(errors="replace")))

    def gather(out: IO[bytes]) -> None:
        if encoder.tokenizer is None:
            out.writelines(sources())
        else:
            write_pieces(parts(), encoder, b"", out)

    version = platform.python_version()
    name = f"stdlib-{version}.u8" if encoder.tokenizer is None else f"stdlib-{version}-{encoder.digest[:16]}"
    return _map_cached(root, name, encoder.dtype, gather)


def _map_cached(root: Path, name: str, dtype: np.dtype[Any], write: Callable[[IO[bytes]], None]) -> Tokens:
    """Write a file of tokens once, and map it on all ranks. The first rank writes it.

    Each user has a separate cache folder, so that a rank never reads files of another user's processes.
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
