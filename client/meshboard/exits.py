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
    Exit.OK: "The command succeeded",
    Exit.FAILED: "The job failed, no layout fits in memory, or a gate limit failed or has no result",
    Exit.WRONG: "The request is invalid, or the object does not exist",
    Exit.AWAY: "The board is unreachable or rejects the REST token",
    Exit.LATE: "The timeout expired. The job continues",
    Exit.BROKEN: "The command could not write its output, or it crashed. The job continues",
    Exit.INTERRUPTED: "You pressed Ctrl-C. The job continues",
    Exit.TERMINATED: "The command received SIGTERM, for example from a cancelled build. The job continues",
}


def words() -> str:
    """For `--help`."""
    return "; ".join(f"{code.value} {meaning.split('. ')[0]}" for code, meaning in MEANING.items())
