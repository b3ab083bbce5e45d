"""Create malicious checkpoints, whose `.metadata` contains code and matches the manifest."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from workers.checkpoint import folder
from workers.checkpoint.folder import MANIFEST
from workers.checkpoint.load import METADATA


class Runs:
    """Create a file when it is unpickled, and return the original value."""

    def __init__(self, mark: Path, then: object) -> None:
        self._mark, self._then = mark, then

    def __reduce__(self) -> tuple[Any, ...]:
        words = "(__import__('pathlib').Path(%r).touch(), __import__('pickle').loads(%r))[1]"
        return eval, (words % (str(self._mark), pickle.dumps(self._then)),)


def plant(checkpoint: Path, data: bytes, *changed: str) -> None:
    """Replace `.metadata`, and update sizes and CRC-32 in the manifest."""
    (checkpoint / METADATA).write_bytes(data)
    path = checkpoint / MANIFEST
    content = json.loads(path.read_text())
    content["files"] |= folder.describe_files(checkpoint, [METADATA, *changed])
    path.write_text(json.dumps(content))


def poison(checkpoint: Path, mark: Path) -> None:
    """Plant code that torch's reader executes, and that still loads the checkpoint."""
    true = pickle.loads((checkpoint / METADATA).read_bytes())
    plant(checkpoint, pickle.dumps(Runs(mark, true)))
