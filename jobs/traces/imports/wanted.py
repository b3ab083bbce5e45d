"""What an import is to hold, as whoever opens it says."""

from __future__ import annotations

from typing import Any

from jobs.text import storable
from jobs.traces.imports import kept
from jobs.traces.imports.parts import ImportProblemError

LONGEST_NAME = 100


def wanted(asked: Any) -> tuple[str, list[tuple[str, int]]]:
    """The import's name, and its files with their bytes, of {"name", "files": [{"name", "size"}]}.

    Raises:
        ImportProblemError: the first thing that makes no sense.
    """
    rows = asked.get("files") if isinstance(asked, dict) else None
    if not isinstance(rows, list) or not 1 <= len(rows) <= kept.MOST_FILES:
        raise ImportProblemError("import", "files", f"must be a list of 1 to {kept.MOST_FILES} files")
    files = []
    for row in rows:
        name, size = (row.get("name"), row.get("size")) if isinstance(row, dict) else (None, None)
        if not isinstance(name, str) or not storable(name) or not 1 <= len(name) <= 255:
            raise ImportProblemError("import", "files", "each has a name of 1 to 255 characters")
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= kept.FILE_BYTES:
            raise ImportProblemError(name, "size", f"must be 1 to {kept.FILE_BYTES:,} bytes, got {str(size)[:30]}")
        files.append((name, size))
    if len({name for name, _ in files}) < len(files):
        raise ImportProblemError("import", "files", "two have the same name")
    total = sum(size for _, size in files)
    if total > kept.IMPORT_BYTES:
        raise ImportProblemError("import", "files", f"{total:,} bytes together are more than {kept.IMPORT_BYTES:,}")
    told = asked.get("name")
    title = told if isinstance(told, str) and told.strip() and storable(told) else files[0][0]
    return title.strip()[:LONGEST_NAME], files
