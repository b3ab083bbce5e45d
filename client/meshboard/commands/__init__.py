"""The `meshboard` command."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

import typer

from meshboard.commands import board, gates, jobs
from meshboard.commands.app import (
    KNOWN_ERRORS,
    ExitCode,
    UsageError,
    app,
    build_problem_document,
    get_exit_code,
    print_error,
    stdout,
)
from meshboard.errors import format_error
from meshboard.formatting import format_json

__all__ = ["app", "board", "gates", "jobs", "main", "running"]


def main() -> None:
    """Run the command and exit with an `ExitCode`. Each error is one line."""
    stdout.has_document = False
    if sys.stdout is None:
        print_error("Cannot write the output: standard output is closed")
        sys.exit(ExitCode.BROKEN)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal cannot encode
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        code = _run_app()
        sys.stdout.flush()
    except OSError as error:
        code = _report_write_error(error)
    finally:
        signal.signal(signal.SIGTERM, previous)
    sys.exit(code)


def _terminate(*_: object) -> NoReturn:
    # An exception lets the command print what it knows, as after Ctrl-C.
    sys.exit(ExitCode.TERMINATED)


def _run_app() -> int:
    try:
        return app(standalone_mode=False) or ExitCode.OK
    except UsageError as error:
        error.show()
        _print_problem_document(error, error.format_message())
        return ExitCode.WRONG
    except typer.Abort:
        print_error("aborted")
        return ExitCode.INTERRUPTED
    except KNOWN_ERRORS as error:
        print_error(str(error))
        _print_problem_document(error, str(error))
        return get_exit_code(error)
    except OSError:
        raise
    except SystemExit as ended:
        if isinstance(ended.__context__, OSError):  # typer exits if nothing reads the output
            raise ended.__context__ from None
        raise
    except Exception as error:  # a build needs one line and an exit code for every error
        words = " ".join(f"{type(error).__name__}: {error}".split())
        print_error(f"{words}. This is an error in meshboard, or the board returned an invalid response.")
        _print_problem_document(error, words)
        return ExitCode.BROKEN


def _print_problem_document(error: Exception, words: str) -> None:
    """Print the error as JSON if the command has --json and has printed no JSON yet."""
    options = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    if "--json" in options and not stdout.has_document:
        print(format_json(build_problem_document(error, words), indent=None))


def _report_write_error(error: OSError) -> ExitCode:
    """Report a failed write, except a closed pipe, whose reader has what it wants."""
    with suppress(OSError, ValueError):  # else the interpreter writes the rest again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:
        print_error(f"Cannot write the output: {format_error(error)}")
    return ExitCode.BROKEN
