"""Measure the memory of the web process while a job prints 20 MB/s, with and without viewers.

The stream has batches of at most BATCH_BYTES and a bounded number of entries. One viewer reads as fast as it can, and
one reads 1,000 bytes per second. Each viewer first receives the whole stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

import msgpack
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from contracts.codec import MAX_BATCH_BYTES
from contracts.names import telemetry_stream
from tests.planner.wrong_specs import GOOD
from tests.support.processes import run_redis
from tests.support.web import Site, run_site

BYTES_PER_S = 20e6
MAX_STREAM_ENTRIES = 500  # about 128 MB to replay
DURATION_S = 20.0
SLOW_BYTES_PER_S = 1000


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = f"sqlite:///{folder / 'db.sqlite3'}"
        with run_redis(folder / "redis") as redis, run_site(database, redis, folder / "web") as made:
            asyncio.run(measure_memory(made))


async def measure_memory(made: Site) -> None:
    job = made.call("POST", "/api/v1/jobs", GOOD, headers=made.build_token_header("owner")).json()["id"]
    printing = asyncio.create_task(asyncio.to_thread(write_stream, made, job))
    alone = await measure_peak_bytes(made, DURATION_S / 4)
    print(f"no viewer: {alone / 1e6:.0f} MB")
    for words, pause in (("one viewer that reads all", 0.0), ("plus one that reads 1 kB/s", 1 / SLOW_BYTES_PER_S)):
        read: list[int] = []
        viewer = asyncio.create_task(read_socket(made, job, pause, read))
        most = await measure_peak_bytes(made, DURATION_S / 2)
        viewer.cancel()
        await asyncio.gather(viewer, return_exceptions=True)
        result = (
            f"{len(read)} frames, the largest {max(read, default=0) / 1e6:.2f} MB, {sum(read) / 1e6:.0f} MB in total"
        )
        print(f"{words}: {most / 1e6:.0f} MB, {most / alone:.2f} of no viewer; {result}")
    await printing


def write_stream(made: Site, job: str) -> None:
    client = made.redis.client()
    lines = ["x" * 1000] * (MAX_BATCH_BYTES // 1000 - 2)
    item = {"kind": "log", "rank": 0, "time": 0.0, "first": 0, "lines": lines}
    batch: bytes = msgpack.packb({"v": 1, "job": job, "attempt": 1, "time": 0.0, "items": [item]})

    def put() -> None:
        client.xadd(telemetry_stream(job, 1), {"b": batch}, maxlen=MAX_STREAM_ENTRIES)

    for _ in range(MAX_STREAM_ENTRIES):
        put()
    began, written = time.monotonic(), 0
    while (passed := time.monotonic() - began) < 1.25 * DURATION_S:
        while written < passed * BYTES_PER_S:
            put()
            written += len(batch)
        time.sleep(0.01)


async def read_socket(made: Site, job: str, pause: float, read: list[int]) -> None:
    url = f"ws://127.0.0.1:{made.port}/ws/jobs/{job}/"
    options: dict[str, Any] = {
        "origin": made.url,
        "additional_headers": made.build_cookie_header("owner"),
        "max_size": None,
    }
    while True:
        with contextlib.suppress(ConnectionClosed):
            async with connect(url, max_queue=1, **options) as socket:
                while True:
                    read.append(len(await socket.recv()))
                    await asyncio.sleep(pause * read[-1])


async def measure_peak_bytes(made: Site, seconds: float) -> int:
    """Return the maximum resident bytes during these seconds."""
    most, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        most = max(most, made.memory_bytes)
        await asyncio.sleep(0.05)
    return most


if __name__ == "__main__":
    main()
