"""Unpack an uploaded archive as the job's user: `python -m workers.host.unpack FOLDER`, with the archive on stdin.

On an error, stdout has one line for people, and the exit code is 1. The supervisor then removes the folder.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import IO

from contracts.archives import ArchiveError, read_archive

MAX_MEMORY_BYTES = 2**30
MAX_CPU_S = 60


def unpack(archive: IO[bytes], folder: Path) -> None:
    """Write the files of an archive below an empty folder. Raises ArchiveError, OSError."""
    for entry in read_archive(archive):
        target = folder / entry.path
        if entry.is_folder:
            target.mkdir(parents=True, exist_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o755 if entry.is_executable else 0o644
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as out:
            for part in entry.parts:
                out.write(part)


def main() -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    os.umask(0o022)
    try:
        unpack(sys.stdin.buffer, Path(sys.argv[1]))
    except ArchiveError as error:
        print(error)
        return 1
    except OSError as error:
        print(f"{error.strerror}: {error.filename or sys.argv[1]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
