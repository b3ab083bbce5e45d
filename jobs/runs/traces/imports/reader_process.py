"""Read uploaded trace files in a child process, because a large file would block all pages of the web process.

`python -m jobs.runs.traces.imports.reader_process` is the child. It receives the files as JSON, writes the events as
Parquet, and prints a summary as JSON. It needs no secrets and no database.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import TypedDict

from jobs.core.child_processes import exit_with_parent
from jobs.core.verdict_schema import Evidence, VerdictState
from jobs.runs.history.store.schema import TABLES
from jobs.runs.traces.imports.common import ImportProblemError
from jobs.runs.traces.imports.reader import ImportResult, read_traces
from jobs.runs.traces.imports.trace_files import TraceFile
from jobs.runs.traces.trace_events import serialize_trace

ROOT = Path(__file__).resolve().parents[4]
MAX_MEMORY_BYTES = 2 * 2**30
MAX_CPU_S = 300
MAX_ELAPSED_S = 900.0  # for a busy machine
PROGRESS_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 0.2
NICENESS = 5  # pages have priority over imports
MAX_STEPS = 10_000
PROGRESS_FILE: Final = "progress"
FINDINGS_FILE: Final = "findings.json"
FEWER_EVENTS = "Record fewer steps, or import fewer ranks."


class ReadSummary(NamedTuple):
    """Describe the events of an import."""

    format: str
    notes: list[str]
    ranks: int
    events: int
    steps: list[int]


class ImportFinding(TypedDict):
    """Describe a hang or mismatch that flight recorder dumps show."""

    state: VerdictState
    sentence: str
    reason: str
    next: str
    evidence: list[Evidence]


class DeletedFilesError(RuntimeError):
    """The files were deleted while they were read."""


def read_in_process(files: list[TraceFile], folder: Path) -> ReadSummary:
    """Read the files, and write `calls.parquet`, `spans.parquet`, and findings of hangs into a folder.

    Raises:
        ImportProblemError: The files are invalid, or need more than MAX_MEMORY_BYTES or MAX_CPU_S.
        TimeoutError: The machine is so busy that the files were not read in MAX_ELAPSED_S.
        DeletedFilesError: A file was deleted, which also ends the child.
    """
    question = {
        "parent": os.getpid(),
        "files": [[file.name, str(file.path)] for file in files],
        "folder": str(folder),
        "max_memory_bytes": MAX_MEMORY_BYTES,
        "max_cpu_s": MAX_CPU_S,
    }
    environment = {name: os.environ[name] for name in ("PATH", "VIRTUAL_ENV", "LANG") if name in os.environ}
    environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # other pools reserve memory, which the limit counts
    argv = [sys.executable, "-m", "jobs.runs.traces.imports.reader_process"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT, env=environment) as process:
        try:
            output, errors = _wait(process, json.dumps(question).encode(), files)
        finally:
            process.kill()
    if process.returncode:
        if not all(file.path.exists() for file in files):
            raise DeletedFilesError
        raise _explain_exit(process.returncode, errors)
    answer: dict[str, Any] = json.loads(output)
    if "problem" in answer:
        raise ImportProblemError(*answer["problem"])
    return ReadSummary(**answer)


def _wait(process: subprocess.Popen[bytes], question: bytes, files: list[TraceFile]) -> tuple[bytes, bytes]:
    deadline = time.monotonic() + MAX_ELAPSED_S
    unsent: bytes | None = question
    while True:
        try:
            return process.communicate(unsent, timeout=CHECK_INTERVAL_S)
        except subprocess.TimeoutExpired:
            unsent = None  # a repeated call continues to send the input of the first call
            if not all(file.path.exists() for file in files):
                raise DeletedFilesError from None
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"The board did not read the files in {MAX_ELAPSED_S:.0f} s. Try again later."
                ) from None


def _explain_exit(code: int, errors: bytes) -> Exception:
    if code == -signal.SIGXCPU:
        return ImportProblemError(
            "import", "files", f"Reading the files takes more than {MAX_CPU_S} s of CPU time. {FEWER_EVENTS}"
        )
    if errors.rstrip().endswith(b"MemoryError"):  # no memory was left to answer
        return ImportProblemError("import", "files", _describe_memory_limit(MAX_MEMORY_BYTES))
    if code == -signal.SIGKILL:
        return ImportProblemError(
            "import", "files", f"The operating system ended the reader, probably for lack of memory. {FEWER_EVENTS}"
        )
    return RuntimeError(f"The reader of an import ended with {code}: {errors.decode(errors='replace')}")


def _describe_memory_limit(max_bytes: int) -> str:
    return f"Reading the files needs more than {max_bytes / 2**20:,.0f} MiB of memory. {FEWER_EVENTS}"


def read_progress(folder: Path) -> float | None:
    """Return the fraction of the uploaded bytes that the child has read, or None if no child reads them."""
    try:
        return float((folder / PROGRESS_FILE).read_text())
    except (OSError, ValueError):
        return None


def _write_result(result: ImportResult, folder: Path) -> None:
    """Write the events as Parquet in the layout of the history, and the findings as JSON."""
    columns = serialize_trace(result.trace)
    for name, table in (("calls", columns["calls"]), ("spans", columns["spans"])):
        pq.write_table(pa.table(table["columns"], schema=TABLES[name]), folder / f"{name}.parquet")
    if result.findings:
        findings: list[ImportFinding] = [
            {
                "state": finding.state,
                "sentence": finding.sentence,
                "reason": finding.reason,
                "next": finding.next,
                "evidence": list(finding.evidence),
            }
            for finding in result.findings
        ]
        (folder / FINDINGS_FILE).write_text(json.dumps(findings))


def read_findings(folder: Path) -> list[ImportFinding]:
    """Return the hangs and mismatches in an import of flight recorder dumps, the cause first."""
    try:
        findings: list[ImportFinding] = json.loads((folder / FINDINGS_FILE).read_text())
    except FileNotFoundError:
        return []
    return findings


def _answer(files: list[TraceFile], folder: Path, max_memory_bytes: int) -> dict[str, Any]:
    try:
        result = read_traces(files)
        _write_result(result, folder)
    except ImportProblemError as error:
        return {"problem": [error.file, error.field, error.message]}
    except MemoryError:
        return {"problem": ["import", "files", _describe_memory_limit(max_memory_bytes)]}
    calls, spans = result.trace.calls, result.trace.spans
    steps = sorted({call.step for call in calls} | {span.step for span in spans})[:MAX_STEPS]
    ranks = len(result.trace.get_ranks())
    return ReadSummary(result.format, result.notes, ranks, len(calls) + len(spans), steps)._asdict()


def _write_progress(files: list[TraceFile], folder: Path, is_done: threading.Event) -> None:
    total = sum(file.path.stat().st_size for file in files)
    path, part = folder / PROGRESS_FILE, folder / f"{PROGRESS_FILE}.part"
    while True:
        with contextlib.suppress(OSError):  # the disk is full, or the import was deleted
            part.write_text(f"{min(1.0, sum(file.furthest_byte for file in files) / max(1, total)):.3f}")
            part.replace(path)
        if is_done.wait(PROGRESS_INTERVAL_S):
            break
    path.unlink(missing_ok=True)


def main() -> None:
    """Answer the question on the standard input."""
    question = json.loads(sys.stdin.buffer.read())
    exit_with_parent(question["parent"])
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (question["max_cpu_s"], question["max_cpu_s"] + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    files, folder = [TraceFile(name, Path(path)) for name, path in question["files"]], Path(question["folder"])
    is_done = threading.Event()
    reporter = threading.Thread(target=_write_progress, args=(files, folder, is_done))
    reporter.start()
    resource.setrlimit(resource.RLIMIT_DATA, (question["max_memory_bytes"],) * 2)
    try:
        answer = _answer(files, folder, question["max_memory_bytes"])
    finally:
        is_done.set()
        reporter.join()
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
