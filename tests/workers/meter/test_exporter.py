"""The exporter on a unix socket loses no counter and never blocks training."""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from contracts.codec import decode_frame
from tests.support.processes import scale_timeout, wait_until
from workers.meter import exporter as exporter_module
from workers.meter.exporter import Exporter
from workers.meter.monitors import MAX_ITEM_BYTES
from workers.meter.recorder import Recorder


class Supervisor:
    """Server that stores every complete frame."""

    def __init__(self, path: Path, reads: bool = True) -> None:
        self.frames: list[dict[str, Any]] = []
        self._reads = reads
        self._path = path
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    @property
    def items(self) -> list[dict[str, Any]]:
        return [item for frame in list(self.frames) for item in frame["items"]]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [item for item in self.items if item["kind"] == kind]

    def cells(self) -> dict[tuple[str, str, str], dict[str, Any]]:
        """Return the newest values of each cell."""
        return {(c["phase"], c["op"], c["axis"]): c for item in self.of_kind("traffic") for c in item["cells"]}

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            if self._reads:
                self._read(connection)

    def _read(self, connection: socket.socket) -> None:
        buffer = b""
        while True:
            try:
                data = connection.recv(65536)
            except OSError:
                return
            if not data:
                return
            buffer += data
            while len(buffer) >= 4 and len(buffer) >= 4 + (size := struct.unpack(">I", buffer[:4])[0]):
                self.frames.append(msgpack.unpackb(buffer[4 : 4 + size]))
                buffer = buffer[4 + size :]

    def kill(self) -> None:
        for closing in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                closing.shutdown(socket.SHUT_RDWR)
            closing.close()
        self._thread.join(scale_timeout(5))
        self._path.unlink(missing_ok=True)


def eventually(true: Callable[[], Any]) -> None:
    wait_until(true, "it happens", 10, 0.01)


def eventually_some(found: Callable[[], list[Any]]) -> list[Any]:
    eventually(found)
    return found()


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own paths are too long for a unix socket
        yield Path(folder) / "s"


def evaluation(step: int) -> Any:
    return {"kind": "eval", "rank": 0, "time": 0.0, "step": step, "loss": 1.0}


def step_item(step: int) -> Any:
    return {"kind": "step", "rank": 0, "time": 0.0, "step": step, "cells": []}


def test_frame_has_only_changed_cells(path):
    supervisor, recorder = Supervisor(path), Recorder(rank=3)
    exporter = Exporter(recorder, str(path), "job1", 2)
    recorder.issue("all_reduce", "0", 2, 100)()
    eventually(lambda: supervisor.cells())
    recorder.issue("broadcast", "0", 2, 8)()
    eventually(lambda: len(supervisor.cells()) == 2)
    assert exporter.close(5)
    frame = supervisor.frames[0]
    assert {key: frame[key] for key in ("v", "job", "attempt", "rank")} == {
        "v": 1,
        "job": "job1",
        "attempt": 2,
        "rank": 3,
    }
    messages = [[cell["op"] for cell in item["cells"]] for item in supervisor.of_kind("traffic")]
    assert messages == [["all_reduce"], ["broadcast"]]
    supervisor.kill()


def test_sends_timelines_and_the_last_one_at_close(path, monkeypatch):
    for name in ("MAX_HOST_BYTES_PER_S", "MAX_RANK_BYTES_PER_S"):
        monkeypatch.setattr(f"workers.meter.monitors.{name}", 2**40)  # all steps, however fast they come
    supervisor, recorder = Supervisor(path), Recorder(rank=3)
    exporter = Exporter(recorder, str(path), "job1", 2)
    recorder.set_phase("step")
    late = None
    for step in range(1, 4):
        recorder.begin_step(step)
        recorder.issue("all_reduce", "0", 2, step)()
        late = recorder.issue("all_gather", "0", 2, step)
        if step < 3:
            late()
        with recorder.time_span("forward", 0, 1):
            pass
        recorder.end_step(step)
    eventually(lambda: len(supervisor.of_kind("timeline")) == 2)
    assert exporter.close(5)
    eventually(lambda: len(supervisor.of_kind("timeline")) == 3)
    result = supervisor.of_kind("timeline")
    assert [item["step"] for item in result] == [1, 2, 3]
    assert [item["calls"]["payload_bytes"] for item in result] == [[1, 1], [2, 2], [3, 3]]
    assert [item["calls"]["sequence"] for item in result] == [[1, 2], [3, 4], [5, 6]]
    assert result[2]["calls"]["ended_us"][1] == round(result[2]["step_s"] * 1e6), "it had not ended"
    for frame in supervisor.frames:
        decode_frame(msgpack.packb(frame))
    supervisor.kill()


def test_truncates_timeline_above_the_size_limit(path):
    supervisor, recorder = Supervisor(path), Recorder(rank=3)
    exporter = Exporter(recorder, str(path), "job1", 2)
    recorder.begin_step(1)
    for _ in range(4000):
        recorder.issue("reduce_scatter", "0", 2, 2**40)()
        with recorder.time_span("checkpoint", 0, 2**60):
            pass
    recorder.end_step(1)
    assert exporter.close(5)
    (result,) = eventually_some(lambda: supervisor.of_kind("timeline"))
    assert len(msgpack.packb(result)) <= MAX_ITEM_BYTES
    assert result["left_out"] == 8000 - len(result["calls"]["op"]) - len(result["spans"]["work"]) > 0
    supervisor.kill()


def test_close_sends_all_queued_items(path):
    supervisor, recorder = Supervisor(path), Recorder(rank=0)
    exporter = Exporter(recorder, str(path), "job", 1)
    for step in range(1000):
        exporter.send(evaluation(step))
    recorder.issue("barrier", "0", 2, 0)()
    assert exporter.close(5)
    eventually(lambda: len(supervisor.of_kind("eval")) >= 1000 and supervisor.cells())
    assert [item["step"] for item in supervisor.of_kind("eval")] == list(range(1000))
    assert supervisor.cells()["setup", "barrier", "world"] == recorder.get_cells()[0]
    supervisor.kill()


def test_counters_are_exact_after_supervisor_restart(path):
    first, recorder = Supervisor(path), Recorder(rank=0)
    exporter = Exporter(recorder, str(path), "job", 1)
    recorder.issue("all_reduce", "0", 2, 100)()
    recorder.issue("broadcast", "0", 2, 8)()  # sent once to the first supervisor, and never again
    eventually(lambda: len(first.cells()) == 2)
    first.kill()
    for step in range(50):  # while no supervisor listens
        recorder.issue("all_reduce", "0", 2, 100)()
        exporter.send(evaluation(step))
    second = Supervisor(path)
    eventually(lambda: len(second.of_kind("eval")) >= 50)
    recorder.issue("all_reduce", "0", 2, 1)()
    assert exporter.close(5)
    eventually(lambda: second.cells().get(("setup", "all_reduce", "world"), {}).get("count") == 52)
    assert list(second.cells().values()) == recorder.get_cells()
    assert second.cells()["setup", "all_reduce", "world"]["payload_bytes"] == 5101
    assert [item["step"] for item in second.of_kind("eval")] == list(range(50))
    second.kill()


def test_sends_all_cells_over_a_new_connection(path):
    first, recorder = Supervisor(path), Recorder(rank=0)
    exporter = Exporter(recorder, str(path), "job", 1)
    recorder.issue("all_reduce", "0", 2, 100)()
    eventually(lambda: first.cells())
    first.kill()
    second = Supervisor(path)
    eventually(lambda: second.cells())
    assert list(second.cells().values()) == recorder.get_cells()
    assert exporter.close(5)
    second.kill()


def test_training_starts_before_the_socket_exists(path):
    recorder = Recorder(rank=0)
    exporter = Exporter(recorder, str(path), "job", 1)
    recorder.issue("all_reduce", "0", 2, 100)()
    exporter.send(evaluation(1))
    supervisor = Supervisor(path)
    assert exporter.close(5)
    eventually(lambda: supervisor.of_kind("eval") and supervisor.cells())
    supervisor.kill()


def test_silent_supervisor_blocks_neither_training_nor_close(path):
    supervisor, recorder = Supervisor(path, reads=False), Recorder(rank=0)
    exporter = Exporter(recorder, str(path), "job", 1)
    padding = "x" * 1000
    slowest_s = 0.0
    for step in range(3 * exporter_module.MAX_QUEUED_ITEMS):  # 30 MB, far more than a socket holds
        start = time.perf_counter()
        exporter.send(step_item(step) | {"padding": padding})
        recorder.issue("send", "0", 2, 1)()
        slowest_s = max(slowest_s, time.perf_counter() - start)
    assert slowest_s < 5, "the socket would have blocked for ever"
    assert len(exporter._queue) <= exporter_module.MAX_QUEUED_ITEMS
    start = time.perf_counter()
    assert not exporter.close(0.3)
    assert time.perf_counter() - start < 5
    assert recorder.get_cells()[0]["count"] == 3 * exporter_module.MAX_QUEUED_ITEMS
    supervisor.kill()


def test_full_queue_drops_only_step_items(path, monkeypatch):
    monkeypatch.setattr(exporter_module, "MAX_QUEUED_ITEMS", 10)
    exporter = Exporter(Recorder(rank=0), str(path), "job", 1)
    exporter.send({"kind": "phase", "rank": 0, "time": 0.0, "phase": "step"})
    for step in range(40):
        exporter.send(step_item(step))
        if step % 10 == 0:
            exporter.send(evaluation(step))
    exporter.send({"kind": "verdict", "rank": 0, "time": 0.0, "rows": []})
    supervisor = Supervisor(path)
    assert exporter.close(5)
    eventually(lambda: supervisor.of_kind("verdict"))
    messages = [item["kind"] for item in supervisor.items if item["kind"] not in ("step", "gauge", "standing")]
    assert messages == ["phase", *["eval"] * 4, "verdict"]
    assert [item["step"] for item in supervisor.of_kind("step")] == [37, 38, 39], "the last position takes a place"
    supervisor.kill()


def test_failing_source_omits_only_its_own_item(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For example with too many open files, after which the rank must not stay silent."""
    failed = threading.Event()

    def look() -> None:
        failed.set()
        raise OSError("too many open files")

    supervisor = Supervisor(path)
    recorder = Recorder(rank=0)
    exporter = Exporter(recorder, str(path), "job", 1)
    exporter.add_source(look)
    eventually(failed.is_set)
    recorder.issue("all_reduce", "dp", 2, 8)()
    eventually(supervisor.cells)
    assert exporter.close()
    supervisor.kill()
    (logged,) = [record for record in caplog.records if record.name == "workers.meter.exporter"]
    assert logged.exc_info is not None
    assert "too many open files" in str(logged.exc_info[1]), "the first of them is in the rank's log"
