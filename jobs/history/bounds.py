"""What an attempt's history may take; beyond it raw steps go first, then roll-ups are merged (docs/bounds.md)."""

from __future__ import annotations

from jobs.history.folder import Folder, Manifest


def keep(folder: Folder, manifest: Manifest) -> None:
    """Below the bounds again."""
