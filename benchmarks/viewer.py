"""Memory of the web process while a job prints 20 MB/s and somebody looks: beside the same process with nobody looking.

Whoever looks first is given all that the stream holds; one viewer reads as fast as it can, one a thousand bytes a
second. The stream is written as a supervisor would: batches of at most BATCH_BYTES, bounded in entries.
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
HELD_ENTRIES = 500  # about 128 MB to replay
SECONDS = 20.0
SLOW_BYTES_PER_S = 1000


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        database = f"sqlite:///{folder / 'db.sqlite3'}"
        with run_redis(folder / "redis") as redis, run_site(database, redis, folder / "web") as made:
            asyncio.run(measure(made))


async def measure(made: Site) -> None:
    job = made.call("POST", "/api/v1/jobs", GOOD, headers=made.build_token_header("owner")).json()["id"]
    printing = asyncio.create_task(asyncio.to_thread(write, made, job))
    alone = await peak(made, SECONDS / 4)
    print(f"no viewer: {alone / 1e6:.0f} MB")
    for words, pause in (("one viewer that reads all", 0.0), ("plus one that reads 1 kB/s", 1 / SLOW_BYTES_PER_S)):
        read: list[int] = []
        viewer = asyncio.create_task(look(made, job, pause, read))
        most = await peak(made, SECONDS / 2)
        viewer.cancel()
        await asyncio.gather(viewer, return_exceptions=True)
        told = f"{len(read)} frames, the largest {max(read, default=0) / 1e6:.2f} MB, {sum(read) / 1e6:.0f} MB in total"
        print(f"{words}: {most / 1e6:.0f} MB, {most / alone:.2f} of no viewer; {told}")
    await printing


def write(made: Site, job: str) -> None:
    client = made.redis.client()
    lines = ["x" * 1000] * (MAX_BATCH_BYTES // 1000 - 2)
    item = {"kind": "log", "rank": 0, "time": 0.0, "first": 0, "lines": lines}
    batch: bytes = msgpack.packb({"v": 1, "job": job, "attempt": 1, "time": 0.0, "items": [item]})

    def put() -> None:
        client.xadd(telemetry_stream(job, 1), {"b": batch}, maxlen=HELD_ENTRIES)

    for _ in range(HELD_ENTRIES):
        put()
    began, written = time.monotonic(), 0
    while (passed := time.monotonic() - began) < 1.25 * SECONDS:
        while written < passed * BYTES_PER_S:
            put()
            written += len(batch)
        time.sleep(0.01)


async def look(made: Site, job: str, pause: float, read: list[int]) -> None:
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


async def peak(made: Site, seconds: float) -> int:
    """Bytes resident at most during so many seconds."""
    most, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        most = max(most, made.memory_bytes)
        await asyncio.sleep(0.05)
    return most


if __name__ == "__main__":
    main()
