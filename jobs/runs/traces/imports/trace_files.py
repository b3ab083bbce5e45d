"""Open uploaded trace files, decompressed and limited in size. A damaged gzip file ends at its last good byte."""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from jobs.runs.traces.imports.common import ImportProblemError

MAX_DECOMPRESSED_BYTES = 2 * 2**30  # per file
MAX_IMPORT_DECOMPRESSED_BYTES = 8 * 2**30  # per import
GZIP_MAGIC: Final = b"\x1f\x8b"
COMPRESSED_CHUNK_BYTES: Final = 2**18


@dataclass
class TraceFile:
    """Locate an uploaded file. `name` comes from the client. `notes` receives problems that the user should know."""

    name: str
    path: Path
    notes: list[str] = field(default_factory=list)
    num_bytes: int = 0  # decompressed bytes read so far, by all readers of the file
    furthest_byte: int = 0  # of the uploaded file, which a reader has reached

    def open(self) -> IO[bytes]:
        """Open the file, decompressed if it is gzip."""
        with self.path.open("rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
        opened = self.path.open("rb", buffering=0)
        return io.BufferedReader(_BoundedFile(self, opened, _Gunzip(self, opened) if is_gzip else opened))

    def add_note(self, note: str) -> None:
        """Add a note once, with the name of the file."""
        if (text := f"{self.name}: {note}") not in self.notes:
            self.notes.append(text)


class _BoundedFile(io.RawIOBase):
    """Limit a decompressed file to MAX_DECOMPRESSED_BYTES, and store how far a reader is."""

    def __init__(self, source: TraceFile, uploaded: io.RawIOBase, inner: io.RawIOBase) -> None:
        self._source, self._uploaded, self._inner, self._num_bytes = source, uploaded, inner, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        part = self._inner.read(len(buffer)) or b""
        self._num_bytes += len(part)
        self._source.num_bytes += len(part)
        self._source.furthest_byte = max(self._source.furthest_byte, self._uploaded.tell())
        if self._num_bytes > MAX_DECOMPRESSED_BYTES:
            message = f"The decompressed file has more than {MAX_DECOMPRESSED_BYTES:,} bytes. Record fewer steps."
            raise ImportProblemError(self._source.name, "gzip", message)
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._inner.close()
        super().close()


class _Gunzip(io.RawIOBase):
    """Decompress a gzip file of one or more members. Damage ends the data with a note."""

    def __init__(self, source: TraceFile, file: io.RawIOBase) -> None:
        self._source, self._file = source, file
        self._decoder, self._input = zlib.decompressobj(wbits=31), b""
        self._num_bytes, self._is_at_end = 0, False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """Return at least one byte before the end of the data. Raise ImportProblemError if nothing can be read."""
        while not self._is_at_end:
            self._input = self._input or self._file.read(COMPRESSED_CHUNK_BYTES) or b""
            is_file_read = not self._input
            try:
                part = self._decoder.decompress(self._input, size)
            except zlib.error as error:
                self._end(f"the gzip file is damaged, so its last events are missing ({error})")
                break
            self._input = self._decoder.unconsumed_tail
            if self._decoder.eof:
                self._start_member()
            elif is_file_read and not part:
                self._end("the gzip file is cut off, so its last events are missing")
            if part:
                self._num_bytes += len(part)
                return part
        return b""

    def _start_member(self) -> None:
        rest = self._decoder.unused_data.lstrip(b"\0")
        rest = rest if len(rest) > 1 else rest + (self._file.read(COMPRESSED_CHUNK_BYTES) or b"").lstrip(b"\0")
        if not rest:
            self._is_at_end = True
        elif rest.startswith(GZIP_MAGIC):
            self._decoder, self._input = zlib.decompressobj(wbits=31), rest
        else:
            self._is_at_end = True
            self._source.add_note("data behind the end of the gzip file is left out")

    def _end(self, note: str) -> None:
        self._is_at_end = True
        if not self._num_bytes:
            raise ImportProblemError(self._source.name, "gzip", "The file cannot be decompressed. Upload it again.")
        self._source.add_note(note)

    def close(self) -> None:
        self._file.close()
        super().close()
