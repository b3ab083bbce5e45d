"""What an import is to hold, as whoever opens it says."""

from __future__ import annotations

from jobs.models.names import name_problems
from jobs.runs.traces.imports import kept
from jobs.runs.traces.imports.shapes import ImportQuery
from planner.facts.validation import Problem, SpecError

LONGEST_NAME = 100


def wanted(asked: ImportQuery) -> tuple[str, list[tuple[str, int]]]:
    """The import's name, and its files with their bytes.

    Raises:
        SpecError: a name cannot be read, two files have one name, or all together are too many bytes.
    """
    files = [(file.name, file.size) for file in asked.files]
    problems = [one for place, (name, _) in enumerate(files) for one in name_problems(f"files.{place}.name", name)]
    if problems:
        raise SpecError(problems)
    if len({name for name, _ in files}) < len(files):
        raise SpecError([Problem("files", "Two files have the same name. Rename one of the files.")])
    total = sum(size for _, size in files)
    if total > kept.IMPORT_BYTES:
        raise SpecError(
            [Problem("files", f"The files have {total:,} bytes in total, and the maximum is {kept.IMPORT_BYTES:,}.")]
        )
    title = (asked.name or "").strip()
    return (title or files[0][0])[:LONGEST_NAME], files
