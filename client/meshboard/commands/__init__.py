"""The `meshboard` command: `main` is its door, and every error one line and an exit code."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

import typer

from meshboard.commands import audit, boards, gates, jobs, planning, running, started
from meshboard.commands.app import app, stdout
from meshboard.commands.refusals import KNOWN, UsageError, code_of, document, say
from meshboard.errors import why
from meshboard.exits import Exit
from meshboard.show.words import as_json

__all__ = ["app", "audit", "boards", "gates", "jobs", "main", "planning", "running", "started"]


def main() -> None:
    """Exits with one of `meshboard.exits`."""
    stdout.has_document = False
    if sys.stdout is None:
        say("Cannot write the output: standard output is closed")
        sys.exit(Exit.BROKEN)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of a name that this terminal or log has no letters for
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        code = _ran()
        sys.stdout.flush()
    except OSError as error:
        code = _unwritten(error)
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(code)


def _terminate(*_: object) -> NoReturn:
    """What was seen is told, as after Ctrl-C."""
    sys.exit(Exit.TERMINATED)


def _ran() -> int:
    try:
        return app(standalone_mode=False) or Exit.OK
    except UsageError as error:
        error.show()
        _document(error, error.format_message())
        return Exit.WRONG
    except typer.Abort:
        say("aborted")
        return Exit.INTERRUPTED
    except KNOWN as error:
        say(str(error))
        _document(error, str(error))
        return code_of(error)
    except OSError:
        raise
    except SystemExit as ended:
        if isinstance(ended.__context__, OSError):  # typer's own end where nobody reads any more
            raise ended.__context__ from None
        raise
    except Exception as error:  # a build reads one line and a code, whatever broke
        words = " ".join(f"{type(error).__name__}: {error}".split())
        say(f"{words}. This is an error in meshboard, or the board returned an invalid response.")
        _document(error, words)
        return Exit.BROKEN


def _document(error: Exception, words: str) -> None:
    """On standard output, of a command that was to answer as JSON and has not yet."""
    given = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    if "--json" in given and not stdout.has_document:
        print(as_json(document(error, words), indent=None))


def _unwritten(error: OSError) -> Exit:
    """Whoever read along may have had enough, which is no news; what is left unwritten is let go, or the interpreter
    would try again as it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        say(f"Cannot write the output: {why(error)}")
    return Exit.BROKEN
