"""Exit codes of the command, and its errors as lines and problem documents."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

import typer

from meshboard.credentials import NoCredentialsError
from meshboard.errors import AwayError, RefusedError, TimedOutError, WrongError

UsageError: Any = typer.BadParameter.__bases__[0]  # typer does not export it, and some releases have their own
KNOWN_ERRORS = (RefusedError, AwayError, NoCredentialsError, TimedOutError, WrongError)


class ExitCode(IntEnum):
    """Exit code of the command. client/README.md has an equal table."""

    OK = 0
    FAILED = 1
    WRONG = 2
    AWAY = 3
    LATE = 4
    BROKEN = 5
    INTERRUPTED = 130
    TERMINATED = 143


EXIT_MEANINGS = {
    ExitCode.OK: "The command succeeded",
    ExitCode.FAILED: "The job failed, no layout fits in memory, or a gate limit failed or has no result",
    ExitCode.WRONG: "The request is invalid, or the object does not exist",
    ExitCode.AWAY: "The board is unreachable or rejects the REST token",
    ExitCode.LATE: "The timeout expired. The job continues",
    ExitCode.BROKEN: "The command could not write its output, or it crashed. The job continues",
    ExitCode.INTERRUPTED: "You pressed Ctrl-C. The job continues",
    ExitCode.TERMINATED: "The command received SIGTERM, for example from a cancelled build. The job continues",
}


def list_exit_codes() -> str:
    """Return all exit codes in one line, for --help."""
    return "; ".join(f"{code.value} {meaning.split('. ')[0]}" for code, meaning in EXIT_MEANINGS.items())


def get_exit_code(error: Exception) -> ExitCode:
    """Return the exit code for an error."""
    if isinstance(error, RefusedError):
        return ExitCode.AWAY if error.status in (401, 403, 429) or error.status >= 500 else ExitCode.WRONG
    if isinstance(error, (AwayError, NoCredentialsError)):
        return ExitCode.AWAY
    if isinstance(error, TimedOutError):
        return ExitCode.LATE
    return ExitCode.WRONG if isinstance(error, (WrongError, UsageError)) else ExitCode.BROKEN


def build_problem_document(error: Exception, words: str) -> dict[str, Any]:
    """Return the problem document of the board (RFC 9457), or an equal one for an error of the client."""
    if isinstance(error, RefusedError) and error.document is not None:
        return error.document
    field, pointer = (error.field, error.pointer) if isinstance(error, WrongError) else ("request", "")
    return {
        "title": EXIT_MEANINGS[get_exit_code(error)].split(". ")[0],
        "status": error.status if isinstance(error, RefusedError) else None,
        "detail": words,
        "errors": [{"field": field, "pointer": pointer, "message": words}],
    }


def print_error(words: str) -> None:
    """Print a line to standard error, unless it is closed."""
    with suppress(OSError):
        print(f"meshboard: {words}", file=sys.stderr)


def run_for_each(job_ids: Sequence[str], act: Callable[[str], Any]) -> tuple[list[Any], ExitCode]:
    """Call `act` for each job, and return the results and the largest exit code.

    The result of a failed call is its problem document. The call for a single job raises its error.
    """
    if len(job_ids) == 1:
        return [act(job_ids[0])], ExitCode.OK
    results, exit_code = [], ExitCode.OK
    for job_id in job_ids:
        try:
            results.append(act(job_id))
        except KNOWN_ERRORS as error:
            print_error(str(error) if str(error).startswith(f"job {job_id}:") else f"{job_id}: {error}")
            results.append({"job": job_id, **build_problem_document(error, str(error))})
            exit_code = max(exit_code, get_exit_code(error))
    return results, exit_code
