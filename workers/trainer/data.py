"""Training data: byte-level text or uint16 tokens, and batches that depend on the seed and the step alone."""

from __future__ import annotations

import fcntl
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workers.trainer.errors import UserError

STDLIB = "stdlib"
HELD_OUT_SHARE = 0.05
MAX_TEXT_BYTES = 32 * 2**20
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
EVAL_STREAM = 2**32  # keeps validation draws apart from those of any training step

Tokens = npt.NDArray[np.integer]


class Corpus:
    """A flat array of tokens, its end held out for validation."""

    def __init__(self, tokens: Tokens, vocab_size: int, seq_len: int, name: str) -> None:
        held_out = int(len(tokens) * HELD_OUT_SHARE)
        self.train, self.held_out = tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]
        self._vocab_size, self._name = vocab_size, name
        if held_out < seq_len + 1:
            need = int((seq_len + 1) / HELD_OUT_SHARE) + 1
            raise UserError(
                f"train.data: {name!r} has {len(tokens)} tokens; its held-out 5% must hold one sequence of "
                f"{seq_len} + 1, so about {need} are needed"
            )

    def train_batch(self, seed: int, step: int, global_batch: int, rows: slice, seq_len: int) -> Tokens:
        """Rows of step `step`'s global batch, (rows, seq_len + 1): inputs and, one later, targets."""
        return self._draw(self.train, (seed, step), global_batch, rows, seq_len)

    def eval_batch(self, seed: int, global_batch: int, rows: slice, seq_len: int) -> Tokens:
        """The same held-out sequences every time, (rows, seq_len + 1)."""
        return self._draw(self.held_out, (seed, EVAL_STREAM), global_batch, rows, seq_len)

    def _draw(self, tokens: Tokens, key: tuple[int, int], global_batch: int, rows: slice, seq_len: int) -> Tokens:
        starts = np.random.default_rng(key).integers(0, len(tokens) - seq_len, size=global_batch)[rows]
        batch = np.stack([tokens[start : start + seq_len + 1] for start in starts]).astype(np.int64)
        largest = int(batch.max())
        if largest >= self._vocab_size:
            raise UserError(
                f"train.data: {self._name!r} holds token {largest}, outside the model's vocab_size {self._vocab_size}"
            )
        return batch


def load_corpus(data: str, root: Path, vocab_size: int, seq_len: int) -> Corpus:
    """Open `data`: "stdlib", or a text file, a directory of text or a `.bin` of uint16 tokens below `root`.

    Raises:
        UserError: outside the root, missing, unreadable or too short.
    """
    if data == STDLIB:
        return Corpus(_cached(root, _stdlib_name(), _stdlib_files()), vocab_size, seq_len, data)
    path = _inside(root, data)
    try:
        tokens = _open(path, data)
    except OSError as error:
        raise UserError(f"train.data: cannot read {data!r}: {error.strerror or error}") from None
    return Corpus(tokens, vocab_size, seq_len, data)


def _open(path: Path, data: str) -> Tokens:
    if path.is_dir():
        return np.frombuffer(_read_all(_text_files(path)), dtype=np.uint8)
    # Opening a FIFO would wait for a writer for ever, and a device is nobody's training data.
    if not path.is_file():
        raise UserError(f"train.data: {data!r} is neither a regular file nor a directory")
    kind = np.dtype(np.uint16 if path.suffix == ".bin" else np.uint8)
    size = path.stat().st_size
    if size % kind.itemsize:
        raise UserError(f"train.data: {data!r} has {size} bytes, not a whole number of uint16")
    return np.memmap(path, dtype=kind, mode="r") if size else np.empty(0, kind)


def _inside(root: Path, data: str) -> Path:
    """Resolve symlinks too: what counts is where the bytes lie."""
    base = root.resolve()
    path = (base / data).resolve()
    if not path.is_relative_to(base):
        raise UserError(f"train.data: {data!r} is outside the data root")
    if not path.exists():
        raise UserError(f"train.data: there is no {data!r} under the data root")
    return path


def _stdlib_files() -> Iterator[Path]:
    return _text_files(Path(sysconfig.get_paths()["stdlib"]), suffix=".py")


def _stdlib_name() -> str:
    return f"stdlib-{platform.python_version()}.u8"


def _text_files(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Regular files in a fixed order, hidden ones and symlinks left out."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("."))
        for name in sorted(files):
            path = Path(here, name)
            if name.endswith(suffix) and not name.startswith(".") and not path.is_symlink() and path.is_file():
                yield path


def _read_all(files: Iterator[Path]) -> bytes:
    """The files' bytes one after another, up to MAX_TEXT_BYTES."""
    parts: list[bytes] = []
    left = MAX_TEXT_BYTES
    for path in files:
        part = path.read_bytes()[:left]
        parts.append(part)
        left -= len(part)
        if not left:
            break
    return b"".join(parts)


def _cached(root: Path, name: str, files: Iterator[Path]) -> Tokens:
    """Gather the files once into a cache that all ranks map; the first to come writes it, by rename."""
    folder = root / ".cache"
    target = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                draft = target.with_suffix(".new")
                draft.write_bytes(_read_all(files))
                draft.replace(target)
    except OSError as error:
        if not target.exists():
            raise UserError(
                f"train.data: cannot keep {name} in the data root's .cache ({error.strerror or error}); make the data "
                "root writable for one run, or put the file there"
            ) from None
    return np.memmap(target, dtype=np.uint8, mode="r")
