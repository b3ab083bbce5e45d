"""What becomes of an error: a line, an exit code, and with --json a problem document as REST has them (RFC 9457)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import typer

from meshboard.access import NoAccessError
from meshboard.errors import AwayError, RefusedError, TimedOutError, WrongError
from meshboard.exits import MEANING, Exit

UsageError: Any = typer.BadParameter.__bases__[0]  # typer exports it by no name; some releases have it of their own
KNOWN = (RefusedError, AwayError, NoAccessError, TimedOutError, WrongError)


def code_of(error: Exception) -> Exit:
    """What the command ends with."""
    if isinstance(error, RefusedError):
        return Exit.AWAY if error.status in (401, 403, 429) or error.status >= 500 else Exit.WRONG
    if isinstance(error, (AwayError, NoAccessError)):
        return Exit.AWAY
    if isinstance(error, TimedOutError):
        return Exit.LATE
    return Exit.WRONG if isinstance(error, (WrongError, UsageError)) else Exit.BROKEN


def document(error: Exception, words: str) -> dict[str, Any]:
    """The board's own, or one of its shape of what no board was asked."""
    if isinstance(error, RefusedError) and error.document is not None:
        return error.document
    field, pointer = (error.field, error.pointer) if isinstance(error, WrongError) else ("request", "")
    return {
        "title": MEANING[code_of(error)].split(". ")[0],
        "status": error.status if isinstance(error, RefusedError) else None,
        "detail": words,
        "errors": [{"field": field, "pointer": pointer, "message": words}],
    }


def say(words: str) -> None:
    """On standard error; where that takes nothing, the exit code says it alone."""
    with suppress(OSError):
        print(f"meshboard: {words}", file=sys.stderr)


def each(job_ids: Sequence[str], act: Callable[[str], Any]) -> tuple[list[Any], Exit]:
    """What came of each, in their order, and the worst exit code: one that is refused is said, and keeps none of the
    others from it. A single one raises what it raises."""
    if len(job_ids) == 1:
        return [act(job_ids[0])], Exit.OK
    found, worst = [], Exit.OK
    for job_id in job_ids:
        try:
            found.append(act(job_id))
        except KNOWN as error:
            say(str(error) if str(error).startswith(f"job {job_id}:") else f"{job_id}: {error}")
            found.append({"job": job_id, **document(error, str(error))})
            worst = max(worst, code_of(error))
    return found, worst
