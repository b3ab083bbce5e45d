"""The `meshboard` command: `main` is its door, and every error one line and an exit code."""

from __future__ import annotations

import sys

from meshboard import files, gate
from meshboard.access import NoAccessError
from meshboard.commands import boards, gates, jobs, planning, running, started
from meshboard.commands.app import app
from meshboard.errors import AwayError, RefusedError, TimedOutError
from meshboard.exits import Exit

__all__ = ["app", "boards", "gates", "jobs", "main", "planning", "running", "started"]


def main() -> None:
    """Exits with one of `meshboard.exits`."""
    try:
        app()
    except RefusedError as error:
        refused = error.status in (401, 403, 429) or error.status >= 500
        _stop(str(error), Exit.AWAY if refused else Exit.WRONG)
    except (AwayError, NoAccessError) as error:
        _stop(str(error), Exit.AWAY)
    except TimedOutError as error:
        _stop(str(error), Exit.LATE)
    except (files.FileError, gate.LimitError, gate.UnknownError) as error:
        _stop(str(error), Exit.WRONG)


def _stop(message: str, code: Exit) -> None:
    print(f"meshboard: {message}", file=sys.stderr)
    sys.exit(code)
