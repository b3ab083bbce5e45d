"""Read imports in a child process, whose memory and time are limited, with the results of the reader itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from jobs.runs.traces.imports import reader_process
from jobs.runs.traces.imports.common import ImportProblemError
from jobs.runs.traces.imports.reader import read_traces
from jobs.runs.traces.imports.reader_process import DeletedFilesError, read_in_process, read_progress
from jobs.runs.traces.imports.trace_files import TraceFile
from jobs.runs.traces.trace_events import serialize_trace
from tests.support.processes import wait_until

NUM_EVENTS = 2_000_000  # of about 60 bytes, which take many seconds to read


def make_files(folder: Path) -> list[TraceFile]:
    return [TraceFile(path.name, path) for path in sorted(folder.glob("kineto_*"))]


@pytest.fixture
def large(tmp_path: Path) -> TraceFile:
    """Return a trace that a child cannot read before a test has looked at the child."""
    path = tmp_path / "large_0.json"
    event = '{"ph":"X","cat":"cpu_op","name":"aten::add","ts":1,"dur":1},\n'
    with path.open("w") as file:
        file.write('{"traceEvents":[\n')
        for _ in range(NUM_EVENTS // 10_000):
            file.write(event * 10_000)
        file.write("{}]}")
    return TraceFile(path.name, path)


def test_equals_reader_of_the_web_process(trace_folder: Path, tmp_path: Path) -> None:
    summary = read_in_process(make_files(trace_folder), tmp_path)
    result = read_traces(make_files(trace_folder))
    assert (summary.format, summary.notes, summary.ranks) == (result.format, result.notes, 2)
    assert summary.events == len(result.trace.calls) + len(result.trace.spans)
    columns = serialize_trace(result.trace)
    for name, table in (("calls", columns["calls"]), ("spans", columns["spans"])):
        stored = pq.read_table(tmp_path / f"{name}.parquet").to_pydict()
        assert json.dumps({key: stored[key] for key in table["columns"]}) == json.dumps(table["columns"])
    assert {path.name for path in tmp_path.iterdir()} == {"calls.parquet", "spans.parquet"}


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [("MAX_CPU_S", 2, "more than 2 s of CPU time"), ("MAX_MEMORY_BYTES", 160 * 2**20, "more than 160 MiB of memory")],
)
def test_limits_the_child(
    large: TraceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, words: str
) -> None:
    monkeypatch.setattr(reader_process, limit, value)
    if limit == "MAX_MEMORY_BYTES":  # spans, which the reader keeps
        large.path.write_text('{"traceEvents":[' + '{"ph":"X","cat":"gpu_memcpy","name":"x","ts":1,"dur":1},' * 400_000)
    with pytest.raises(ImportProblemError, match=words):
        read_in_process([large], tmp_path)


def test_deleted_files_end_the_child(large: TraceFile, tmp_path: Path) -> None:
    def delete_when_started() -> None:
        wait_until(lambda: read_progress(tmp_path) is not None, "the child reads")
        large.path.unlink()

    before = psutil.Process().children()
    deleter = threading.Thread(target=delete_when_started)
    deleter.start()
    with pytest.raises(DeletedFilesError):
        read_in_process([large], tmp_path)
    deleter.join()
    assert set(psutil.Process().children()) <= set(before)


def test_child_ends_with_its_parent(large: TraceFile, tmp_path: Path) -> None:
    """A restarted web process left its readers behind."""
    program = (
        "import sys; from pathlib import Path; "
        "from jobs.runs.traces.imports.reader_process import read_in_process; "
        "from jobs.runs.traces.imports.trace_files import TraceFile; "
        f"read_in_process([TraceFile('large_0.json', Path({str(large.path)!r}))], Path({str(tmp_path)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", program], cwd=reader_process.ROOT, env=dict(os.environ)) as parent:
        wait_until(lambda: (read_progress(tmp_path) or 0) > 0, "the child reads")
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child ends")
