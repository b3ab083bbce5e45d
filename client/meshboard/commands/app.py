"""Program, shared options, exit codes, errors, and connection of all commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from enum import IntEnum
from importlib.metadata import version
from typing import Annotated, Any

import typer

from meshboard.client import Client
from meshboard.credentials import Credentials, NoCredentialsError, load_credentials, sends_token_in_clear
from meshboard.errors import AwayError, RefusedError, TimedOutError, WrongError, format_error
from meshboard.formatting import format_json

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


class Stdout:
    """State of standard output. With --json, a command prints one document or none."""

    has_document = False


stdout = Stdout()
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help=f"Plan, submit, follow, and gate training runs on a board.\n\nExit codes: {list_exit_codes()}.",
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"meshboard {version('meshboard-client')}")
        raise typer.Exit


@app.callback()
def set_options(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="print the version and exit")
    ] = False,
) -> None:
    pass


AsJson = Annotated[bool, typer.Option("--json", help="print the complete response of the board as JSON")]
Spec = Annotated[
    str, typer.Argument(metavar="SPEC", help="YAML or JSON file with the job spec, or - for standard input")
]
OptionalSpec = Annotated[
    str | None,
    typer.Argument(
        metavar="[SPEC]", help="YAML or JSON file with the job spec, or - for standard input; optional with --config"
    ),
]
ConfigFile = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="config.json of a Hugging Face model, which replaces the model"),
]
LayoutFile = Annotated[
    str | None,
    typer.Option(
        "--layout",
        metavar="FILE",
        help="config file of torchtitan, Megatron-LM, NeMo, DeepSpeed, GPT-NeoX, accelerate, Lightning, or nanotron, "
        "which replaces the layout",
    ),
]
Ranks = Annotated[
    int | None, typer.Option(min=1, help="number of ranks of --layout; default is the number in the file")
]
Sets = Annotated[
    list[str], typer.Option("--set", metavar="FIELD=VALUE", help="change a field of the spec, such as layout.dp=2")
]
Cluster = Annotated[str | None, typer.Option(help="name of a cluster on the board to plan for")]
MeasuredSteps = Annotated[
    list[str],
    typer.Option(
        "--measured-step",
        metavar="tp=2,dp=4,micro_batches=8,step_s=1.35",
        help="measured step of one layout, which corrects all step times; tokens_per_s_per_gpu can replace step_s",
    ),
]
Timeout = Annotated[
    float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="stop waiting after this number of seconds")
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="job id")]
JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", help="job ids")]


def connect() -> AbstractContextManager[Client]:
    """Return a client of the board in the environment or in the stored login.

    Raises:
        NoCredentialsError, WrongError
    """
    return open_client(load_credentials())


@contextmanager
def open_client(credentials: Credentials) -> Iterator[Client]:
    """Yield a client. Raises WrongError if MESHBOARD_CA has no certificates."""
    warn_if_unencrypted(credentials)
    try:
        client = Client(credentials.url, credentials.token, verify=os.environ.get("MESHBOARD_CA") or True)
    except OSError as error:
        raise WrongError(f"MESHBOARD_CA: {format_error(error)}", "MESHBOARD_CA") from None
    with client:
        yield client


def warn_if_unencrypted(credentials: Credentials) -> None:
    """Print a warning if others on the network can read the token."""
    if sends_token_in_clear(credentials.url):
        print(
            f"meshboard: {credentials.url} does not use HTTPS. Others on the network can read the REST token.",
            file=sys.stderr,
        )


def print_json(content: Any) -> None:
    """Print a JSON document. After it, `main` prints none for an error."""
    stdout.has_document = True
    print(format_json(content))
