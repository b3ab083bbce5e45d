"""Measure the delay, the loss, and the cost when many viewers watch one large run.

    python -m benchmarks.crowd [--ranks 64 --hz 10 --viewers 20] [--seconds 20] [--browser]

The run is synthetic, as its name on the page says. A process writes the batches of supervisors with 8 ranks each and
three cells per rank. Web, Redis, source, and viewers share this machine. The delay starts when Redis receives a batch.
It ends when a viewer has the batch, or when a browser frame shows the calls of all ranks. Viewers join one by one and
request only new batches. Batches that a viewer did not receive are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
from playwright.sync_api import CDPSession
from websockets.asyncio.client import connect

from benchmarks.latency.__main__ import WATCH_FRAMES
from contracts.names import telemetry_stream
from tests.planner.wrong_specs import GOOD
from tests.support.browser import run_chromium
from tests.support.processes import ROOT, run_redis
from tests.support.telemetry import unpack_messages
from tests.support.web import Site, run_site

RANKS_PER_HOST = 8
CELLS = [("all_reduce", "dp"), ("all_reduce", "tp"), ("send", "pp")]
MAX_STREAM_ENTRIES = 500
SLOW_BYTES_PER_S = 1000
SETTLE_S = 3.0

# A job that runs, on hosts of 8 ranks each.
CREATE_RUNNING_JOB = """
import django, json, sys
django.setup()
from django.contrib.auth.models import User
from django.utils import timezone
from jobs.models import Attempt, Member, Status
from jobs.queue import actions
spec, nodes = json.loads(sys.argv[1]), int(sys.argv[2])
job, _ = actions.submit(User.objects.get(username="owner"), spec)
attempt = Attempt.objects.create(job=job, number=1)
now = timezone.now()
Member.objects.bulk_create(
    Member(attempt=attempt, node=n, host_name=f"h{n}", first_rank=8 * n, num_ranks=8, ordered=now) for n in range(nodes)
)
job.status = Status.RUNNING
job.save()
print(job.id)
"""


class CrowdOptions(NamedTuple):
    """Ranks, batches per second of each host, viewers, and seconds of a run."""

    ranks: int
    hz: float
    viewers: int
    seconds: float
    slow: bool = False  # one more, who reads 1 kB/s
    browser: bool = False


class ViewerResult(NamedTuple):
    """Delays in seconds, missed batches, and received bytes of all viewers."""

    late: list[float]
    missed: int
    num_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--hz", type=float, default=10)
    parser.add_argument("--viewers", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--browser", action="store_true")
    optionss = parser.parse_args()
    if optionss.ranks:
        runs = [CrowdOptions(optionss.ranks, optionss.hz, optionss.viewers, optionss.seconds, browser=optionss.browser)]
    else:
        runs = [
            CrowdOptions(64, 10, 20, optionss.seconds, browser=True),
            CrowdOptions(64, 10, 20, optionss.seconds, slow=True),
        ]
        runs += [CrowdOptions(1024, 5, viewers, optionss.seconds) for viewers in (1, 50, 100)]
    for options in runs:
        with tempfile.TemporaryDirectory() as name, run_redis(Path(name) / "redis") as redis:
            static = shutil.copytree(ROOT / "webapp" / "static", Path(name) / "static")
            database, folder = f"sqlite:///{name}/db.sqlite3", Path(name) / "web"
            with run_site(database, redis, folder, MESHBOARD_STATIC_ROOT=str(static)) as board:
                measure(board, options)


def measure(board: Site, request: CrowdOptions) -> None:
    nodes = request.ranks // RANKS_PER_HOST
    job = create_running_job(board, request, nodes)
    alone = board.memory_bytes
    cpu = read_board_cpu_s(board)
    with run_source(board, job, request, nodes) as result, watch_page(board, job, request) as page:
        seen = run_viewer_process(board, job, request)
        memory = board.memory_bytes
    cpu = read_board_cpu_s(board) - cpu
    late = sorted(seen.late)
    p50, p99 = statistics.median(late), late[int(len(late) * 0.99) - 1]
    slow = " and one that reads 1 kB/s" if request.slow else ""
    viewers = f"{request.viewers} viewers{slow}"
    print(f"{request.ranks:,} ranks x {request.hz:g} Hz, {viewers}, {request.seconds:g} s (synthetic)")
    print(f"  to a viewer: p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms; {seen.missed} batches missed")
    rate = seen.num_bytes / request.viewers / request.seconds
    print(f"  {rate / 1e3:,.0f} kB/s each; web {memory / 1e6:.0f} MB ({memory / alone:.2f} of idle), {cpu:.1f} s CPU")
    if page is not None:
        print_page_result(page, result, request)


def create_running_job(board: Site, request: CrowdOptions, nodes: int) -> str:
    name = f"SYNTHETIC {request.ranks} ranks x {request.hz:g} Hz"
    spec = {**GOOD, "name": name}
    argv = [sys.executable, "-c", CREATE_RUNNING_JOB, json.dumps(spec), str(nodes)]
    done = subprocess.run(argv, env=board.environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def read_board_cpu_s(board: Site) -> float:
    fields = Path(f"/proc/{board.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


@contextlib.contextmanager
def run_source(board: Site, job: str, request: CrowdOptions, nodes: int) -> Iterator[list[float]]:
    """Write batches of supervisors until exit, and yield the unix time when all hosts have written each tick."""
    result: list[float] = []
    done = threading.Event()
    client = board.redis.client()

    def write() -> None:
        began, tick = time.monotonic(), 0
        while not done.is_set():
            tick += 1
            pipe = client.pipeline(transaction=False)
            for node in range(nodes):
                entry: Any = {"b": build_batch(job, node, tick), "n": tick - 1}
                pipe.xadd(telemetry_stream(job, 1, node), entry, maxlen=MAX_STREAM_ENTRIES)
            pipe.execute()
            result.append(time.time())
            done.wait(max(0.0, began + tick / request.hz - time.monotonic()))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield result
    finally:
        done.set()
        thread.join()


def build_batch(job: str, node: int, tick: int) -> bytes:
    now = time.time()
    counted = {"phase": "step", "group_size": 8, "count": tick, "completed": tick, "payload_bytes": tick * 10**6}
    counted |= {"algorithmic_bytes": tick * 10**6, "busy_s": tick * 1e-3}
    cells = [{"op": op, "axis": axis, **counted} for op, axis in CELLS]
    first = node * RANKS_PER_HOST
    items = [
        {"kind": "traffic", "rank": rank, "time": now, "cells": cells, "dropped": 0}
        for rank in range(first, first + RANKS_PER_HOST)
    ]
    packed: bytes = msgpack.packb({"v": 1, "job": job, "attempt": 1, "time": now, "host": f"h{node}", "items": items})
    return packed


def run_viewer_process(board: Site, job: str, request: CrowdOptions) -> ViewerResult:
    """Run the viewers in another process, because they would slow down the source."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        arguments = (board.port, board.url, board.build_cookie_header("owner"), job, request)
        return pool.apply(run_viewers, arguments)


def run_viewers(port: int, origin: str, headers: dict[str, str], job: str, request: CrowdOptions) -> ViewerResult:
    return asyncio.run(view_job(f"ws://127.0.0.1:{port}/ws/jobs/{job}/", origin, headers, request))


async def view_job(url: str, origin: str, headers: dict[str, str], request: CrowdOptions) -> ViewerResult:
    late: list[float] = []
    counts: list[dict[int, list[str]]] = []
    num_bytes, began = [0], [math.inf]

    def opened(**bounds: Any) -> connect:
        now, nodes = round(1e3 * time.time()), request.ranks // RANKS_PER_HOST
        after = ",".join(f"{node}:{now}-0" for node in range(nodes))
        return connect(
            f"{url}?attempt=1&after={after}",
            origin=origin,  # type: ignore[arg-type]
            additional_headers=headers,
            max_size=None,
            compression=None,
            **bounds,
        )

    async def one(joined: asyncio.Event) -> None:
        had: dict[int, list[str]] = {}
        counts.append(had)
        async with opened() as socket:
            async for frame in socket:
                now = time.time()
                measured = now > began[0]
                num_bytes[0] += len(frame) if measured else 0
                for message in unpack_messages(frame):
                    if entries := message.get("entries"):
                        joined.set()
                        had.setdefault(message["node"], []).extend(entry for entry, _ in entries)
                        if measured:
                            late.extend(now - int(entry.partition("-")[0]) / 1000 for entry, _ in entries)

    async def slowly() -> None:
        async with opened(max_queue=1) as socket:
            async for frame in socket:
                await asyncio.sleep(len(frame) / SLOW_BYTES_PER_S)

    tasks = []
    for _ in range(request.viewers):
        joined = asyncio.Event()
        tasks.append(asyncio.create_task(one(joined)))
        await joined.wait()
    tasks += [asyncio.create_task(slowly())] if request.slow else []
    await asyncio.sleep(SETTLE_S)
    began[0] = time.time()
    await asyncio.sleep(request.seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return ViewerResult(late, count_missed_batches(counts), num_bytes[0])


def count_missed_batches(counts: list[dict[int, list[str]]]) -> int:
    """Count batches between the first and the last of a viewer that only other viewers received."""
    found = 0
    for node in {node for had in counts for node in had}:
        everything = sorted({entry for had in counts for entry in had.get(node, [])}, key=parse_entry_id)
        place = {entry: n for n, entry in enumerate(everything)}
        for had in counts:
            mine = [place[entry] for entry in had.get(node, [])]
            found += sum(abs(after - before - 1) for before, after in pairwise(mine))
    return found


def parse_entry_id(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


@contextlib.contextmanager
def watch_page(board: Site, job: str, request: CrowdOptions) -> Iterator[dict[str, Any] | None]:
    """Open the page in a browser, and yield its frames and the seconds of its scripts."""
    if not request.browser:
        yield None
        return
    with run_chromium() as browser:
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        context.add_cookies([{"name": "sessionid", "value": board.users["owner"]["session"], "url": board.url}])
        page = context.new_page()
        page.goto(f"{board.url}/jobs/{job}/")
        page.wait_for_selector("#collectives tr")
        page.evaluate(WATCH_FRAMES)
        result: dict[str, Any] = {}
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        before = read_metrics(session)
        yield result
        result["seen"], result["after"], result["before"] = page.evaluate("window.seen"), read_metrics(session), before
        browser.close()


def read_metrics(session: CDPSession) -> dict[str, float]:
    return {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}


def print_page_result(page: dict[str, Any], told: list[float], request: CrowdOptions) -> None:
    late = []
    calls = request.ranks * len(CELLS)
    first_calls, first_s = page["seen"][0]
    for tick, end in enumerate(told, 1):
        if tick * calls <= first_calls or end < first_s + SETTLE_S:
            continue
        shown = next((when for shown, when in page["seen"] if shown >= tick * calls), None)
        if shown is not None:
            late.append(shown - end)
    late.sort()
    spent = page["after"]["ScriptDuration"] - page["before"]["ScriptDuration"]
    passed = page["after"]["Timestamp"] - page["before"]["Timestamp"]
    updates = request.hz * passed
    p50, p99 = statistics.median(late), late[int(len(late) * 0.99) - 1]
    print(f"  to a browser's frame: p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms of {len(late)} ticks")
    share = f"{spent / passed:.0%} of the time"
    print(f"  scripts: {1e3 * spent / updates:.1f} ms per update of all ranks, {share}")


if __name__ == "__main__":
    main()
