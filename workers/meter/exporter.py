"""Sends what a rank counted to its supervisor, from a thread of its own, without ever making training wait."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque

import msgpack

from contracts.telemetry import VERSION, Cell, Frame, Item, TrafficItem
from workers.meter.recorder import Recorder

PERIOD_S = 0.1
SEND_TIMEOUT_S = 2.0
MAX_ITEMS = 10_000  # items waiting while the supervisor cannot be reached; the oldest go first


class Exporter:
    """Every PERIOD_S sends the changed cells, and whatever `send` was given, as one `Frame`.

    A missing or broken socket is tried again each period. Cells are cumulative, so a frame that was never sent
    costs resolution in time and no byte.
    """

    def __init__(self, recorder: Recorder, socket_path: str, job: str, attempt: int) -> None:
        self._recorder = recorder
        self._path = socket_path
        self._job = job
        self._attempt = attempt
        self._items: deque[Item] = deque(maxlen=MAX_ITEMS)
        self._sent: dict[tuple[str, str, str, int], tuple[int, int]] = {}
        self._socket: socket.socket | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="meter-exporter", daemon=True)
        self._thread.start()

    def send(self, item: Item) -> None:
        """Queue an item; never blocks."""
        self._items.append(item)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send everything still queued, then stop; gives up after `timeout_s`."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self._flush()
        deadline = time.monotonic() + SEND_TIMEOUT_S
        while not self._flush() and time.monotonic() < deadline:
            time.sleep(PERIOD_S)
        if self._socket is not None:
            self._socket.close()

    def _flush(self) -> bool:
        """Send what is new. False when it could not be delivered, and then it stays queued."""
        _, dropped = self._recorder.drain()
        changed = [cell for cell in self._recorder.cells() if self._sent.get(_key(cell)) != _mark(cell)]
        items: list[Item] = [self._items.popleft() for _ in range(len(self._items))]
        frame_items = list(items)
        if changed:
            now = time.time()
            traffic = TrafficItem(kind="traffic", rank=self._recorder.rank, time=now, cells=changed, dropped=dropped)
            frame_items.append(traffic)
        if not frame_items:
            return True
        frame = Frame(v=VERSION, job=self._job, attempt=self._attempt, rank=self._recorder.rank, items=frame_items)
        if not self._deliver(frame):
            self._items.extendleft(reversed(items))
            return False
        self._sent.update((_key(cell), _mark(cell)) for cell in changed)
        return True

    def _deliver(self, frame: Frame) -> bool:
        body: bytes = msgpack.packb(frame)
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(SEND_TIMEOUT_S)
                self._socket.connect(self._path)
            self._socket.sendall(struct.pack(">I", len(body)) + body)
        except OSError:
            # Half a frame may be under way: only a fresh connection is in a known state.
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.close()
            self._socket = None
            return False
        return True


def _key(cell: Cell) -> tuple[str, str, str, int]:
    return cell["phase"], cell["op"], cell["axis"], cell["group_size"]


def _mark(cell: Cell) -> tuple[int, int]:
    return cell["count"], cell["completed"]
