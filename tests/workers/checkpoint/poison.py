"""Checkpoints that mean harm: their `.metadata` is another, and their manifest says that it was written so."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

from workers.checkpoint import folder
from workers.checkpoint.load import METADATA
from workers.checkpoint.manifest import MANIFEST


class Runs:
    """Unpickled, it leaves a file, and is then what it was given: nobody notices."""

    def __init__(self, mark: Path, then: object) -> None:
        self._mark, self._then = mark, then

    def __reduce__(self) -> tuple[Any, ...]:
        words = "(__import__('pathlib').Path(%r).touch(), __import__('pickle').loads(%r))[1]"
        return eval, (words % (str(self._mark), pickle.dumps(self._then)),)


def plant(checkpoint: Path, data: bytes, *changed: str) -> None:
    """As its `.metadata`, with its size and CRC-32 in the manifest, and those of other files that were changed."""
    (checkpoint / METADATA).write_bytes(data)
    path = checkpoint / MANIFEST
    content = json.loads(path.read_text())
    content["files"] |= folder.describe(checkpoint, [METADATA, *changed])
    path.write_text(json.dumps(content))


def poison(checkpoint: Path, mark: Path) -> None:
    """What torch's own reader would run, and load the checkpoint none the less."""
    true = pickle.loads((checkpoint / METADATA).read_bytes())
    plant(checkpoint, pickle.dumps(Runs(mark, true)))
