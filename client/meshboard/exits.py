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
    Exit.OK: "all is well",
    Exit.FAILED: "the job did not succeed, no layout fits, or a limit does not hold or cannot be told",
    Exit.WRONG: "what was asked for makes no sense, or there is no such thing; every problem is named",
    Exit.AWAY: "the board cannot be reached, or refuses the token",
    Exit.LATE: "the time to wait was up; the job goes on",
    Exit.BROKEN: "what is said cannot be written, or the command broke; the job goes on",
    Exit.INTERRUPTED: "Ctrl-C; the job goes on",
    Exit.TERMINATED: "SIGTERM, as of a build that is cancelled; the job goes on",
}


def words() -> str:
    """For `--help`."""
    return "; ".join(f"{code.value} {meaning.split(';')[0]}" for code, meaning in MEANING.items())
