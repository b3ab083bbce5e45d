"""What the `meshboard` command's exit code says; README.md has the same table."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a build reads."""

    OK = 0
    FAILED = 1
    WRONG = 2
    AWAY = 3
    LATE = 4
    BROKEN = 5
    INTERRUPTED = 130
    TERMINATED = 143


MEANING = {
    Exit.OK: "success",
    Exit.FAILED: "the job failed, no layout fits, or a gate limit failed or has no result",
    Exit.WRONG: "the request is invalid or the object does not exist",
    Exit.AWAY: "the board is unreachable or refuses the token",
    Exit.LATE: "the timeout expired; the job continues",
    Exit.BROKEN: "the output cannot be written, or the command crashed; the job continues",
    Exit.INTERRUPTED: "Ctrl-C; the job continues",
    Exit.TERMINATED: "SIGTERM, for example from a cancelled build; the job continues",
}


def words() -> str:
    """For `--help`."""
    return "; ".join(f"{code.value} {meaning.split(';')[0]}" for code, meaning in MEANING.items())
