"""Load a served board with submits, lists, and sockets at the same time, and check that no job is lost.

    python -m benchmarks.load [--jobs 10000] [--sockets 200] [--rate 50] [--seconds 60] [--processes 2]

Web, controller, Redis, database, and the clients run on this machine. Requests start on schedule, even if earlier ones
have no response, and their time starts then. So if a server stops for a second, each request of that second shows it.
The first seconds, with the first requests of each process, are printed separately. The exit code is 1 if a request
failed or a submitted job is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgpack
import psutil
import uvloop
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from contracts.names import telemetry_stream
from tests.planner.wrong_specs import GOOD
from tests.support.postgres import postgres_server
from tests.support.processes import ROOT, run_process, run_redis
from tests.support.web import Site, run_site

LISTS_PER_S = 5
BATCHES_PER_S = 10
WARM_UP_S = 5
ROLES = {"postgres": "database", "webapp.serve": "web", "controller": "controller", "valkey": "Redis", "redis": "Redis"}
SUBMIT_P95_S, LIST_P95_S = 0.050, 0.100  # goals

# Copies of one ended job, like a board after weeks of use.
CREATE_JOB = """
import django, json, sys
django.setup()
from django.contrib.auth.models import User
from django.db import connection
from jobs.models import Job
from jobs.queue import actions
first, _ = actions.submit(User.objects.get(username="owner"), json.loads(sys.argv[1]))
kept = {name: getattr(first, name) for name in ("spec", "kind", "device", "num_slots", "estimate", "owner")}
count = int(sys.argv[2])
Job.objects.bulk_create((Job(**kept, name=f"earlier {n}", status="succeeded") for n in range(count)), batch_size=500)
connection.cursor().execute("ANALYZE")  # as a database does by itself within minutes
print(first.id)
"""
FIND_JOBS = """
import django, json, sys
django.setup()
from jobs.models import Job
asked = json.load(sys.stdin)
print(sum(Job.objects.filter(id__in=asked[n:n + 500]).count() for n in range(0, len(asked), 500)))
"""


class TimedRequest(NamedTuple):
    """A request with its seconds since the scheduled time, its response, and its error."""

    seconds: float
    answer: Any
    error: str


class SocketGroup:
    """Sockets of one job, with counts of messages, closed sockets, and silent sockets."""

    def __init__(self) -> None:
        self.frames = self.cut = self.open = self.mute = 0

    async def watch(self, url: str, origin: str, headers: dict[str, str]) -> None:
        try:
            async with connect(url, origin=origin, additional_headers=headers, max_size=None) as socket:  # type: ignore[arg-type]
                self.open += 1
                self.mute += 1
                received = False
                async for _ in socket:
                    self.frames += 1
                    self.mute -= not received
                    received = True
            self.cut += 1  # closed by the server; the client's own close cancels the task
        except (ConnectionClosed, OSError):
            self.cut += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--sockets", type=int, default=200)
    parser.add_argument("--rate", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=2, help="of the web")
    parser.add_argument("--database", choices=["postgres", "sqlite"], default="postgres")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, open_database(options.database, Path(name)) as url:
        folder = Path(name)
        several = {"MESHBOARD_WEB_PROCESSES": str(options.processes)}
        with run_redis(folder / "redis") as redis, run_site(url, redis, folder / "web", **several) as board:
            watched_job = run_python(board, CREATE_JOB, json.dumps(GOOD), str(options.jobs)).strip()
            controller = [sys.executable, "manage.py", "controller"]
            with run_process(controller, board.environment, folder / "controller.log", ROOT):
                return uvloop.run(measure(board, options, watched_job))


@contextlib.contextmanager
def open_database(kind: str, folder: Path) -> Iterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{folder}/db.sqlite3"
        return
    with postgres_server() as url:
        yield url


def run_python(board: Site, source: str, *arguments: str, sent: str = "") -> str:
    """Return the output of Python code that uses Django with the database of the board."""
    argv = [sys.executable, "-c", source, *arguments]
    done = subprocess.run(argv, env=board.environment, cwd=ROOT, input=sent, capture_output=True, text=True, check=True)
    return done.stdout


async def measure(board: Site, request: argparse.Namespace, watched_job: str) -> int:
    watched, socket_url = SocketGroup(), f"ws://127.0.0.1:{board.port}/ws/jobs/{watched_job}/"
    sockets = [
        asyncio.create_task(watched.watch(socket_url, board.url, board.build_cookie_header("owner")))
        for _ in range(request.sockets)
    ]
    until = time.monotonic() + 60
    while watched.open < request.sockets and time.monotonic() < until:
        await asyncio.sleep(0.05)
    fed = asyncio.create_task(write_telemetry(board, watched_job))
    bounds = httpx.Limits(max_connections=None, max_keepalive_connections=32)
    headers = board.build_token_header("owner")
    async with httpx.AsyncClient(base_url=board.url, headers=headers, limits=bounds, timeout=30) as client:

        async def submit(number: int) -> httpx.Response:
            return await client.post("/api/v1/jobs", json={**GOOD, "name": f"load {number}"})

        async def listed(_: int) -> httpx.Response:
            return await client.get("/api/v1/jobs?limit=50")

        loops_s = [measure_loop_s()]
        first = await send_paced_requests(request.rate, WARM_UP_S, submit, 201)
        before = read_cpu_s()
        submits, lists = await asyncio.gather(
            send_paced_requests(request.rate, request.seconds, submit, 201),
            send_paced_requests(LISTS_PER_S, request.seconds, listed, 200),
        )
        busy = {role: seconds - before[role] for role, seconds in read_cpu_s().items()}
    loops_s.append(measure_loop_s())
    fed.cancel()
    cut = watched.cut
    for socket in sockets:
        socket.cancel()
    await asyncio.gather(*sockets, return_exceptions=True)
    ids = [one.answer["id"] for one in (*first, *submits) if not one.error]
    there = int(run_python(board, FIND_JOBS, sent=json.dumps(ids)))
    errors = [one.error for one in (*first, *submits, *lists) if one.error]
    web = f"{request.processes} web processes"
    print(
        f"{request.database}, {web}, {request.jobs:,} existing jobs, {request.sockets} sockets, {request.seconds:.0f} s"
    )
    print_latencies(f"first {WARM_UP_S} s", first, SUBMIT_P95_S)
    print_latencies("submit", submits, SUBMIT_P95_S)
    print_latencies("list", lists, LIST_P95_S)
    print(f"sockets   {watched.open} opened, {cut} closed, {watched.mute} without data, {watched.frames:,} frames")
    print(f"machine   a loop of 10,000,000 additions in {loops_s[0]:.2f} s of CPU before, {loops_s[1]:.2f} s after")
    print(f"cpu       {', '.join(f'{role} {seconds:.1f} s' for role, seconds in busy.items())}")
    print(f"errors    {len(errors)}{': ' + errors[0] if errors else ''}")
    print(f"lost      {len(ids) - there} of {len(ids):,} acknowledged")
    return 1 if errors or cut or watched.mute or there < len(ids) or watched.open < request.sockets else 0


async def send_paced_requests(
    rate: float, seconds: float, ask: Callable[[int], Awaitable[httpx.Response]], good: int
) -> list[TimedRequest]:
    """Send `rate` requests per second on schedule."""
    began = time.monotonic()

    async def one(number: int) -> TimedRequest:
        due = began + number / rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        try:
            answer = await ask(number)
        except httpx.HTTPError as error:
            return TimedRequest(time.monotonic() - due, None, repr(error))
        wrong = "" if answer.status_code == good else f"{answer.status_code} {answer.text[:200]}"
        return TimedRequest(time.monotonic() - due, answer.json() if not wrong else None, wrong)

    return await asyncio.gather(*(one(number) for number in range(max(2, round(rate * seconds)))))


def measure_loop_s() -> float:
    """Return the seconds of a fixed amount of work, because the speed of a virtual machine changes."""
    began, total = time.process_time(), 0
    for number in range(10_000_000):
        total += number
    return time.process_time() - began


def read_cpu_s() -> Counter[str]:
    """Return the CPU seconds of each service with its children, and of this process."""
    this = psutil.Process()
    found = Counter({"benchmark": sum(this.cpu_times()[:2])})
    for part in this.children():
        role = next((role for word, role in ROLES.items() if word in " ".join(part.cmdline())), part.name())
        found[role] += sum(sum(one.cpu_times()[:2]) for one in (part, *part.children(recursive=True)))
    return found


async def write_telemetry(board: Site, job: str) -> None:
    """Write the telemetry of a running job."""
    client = board.redis.client()
    for number in range(10**9):
        item = {"kind": "log", "rank": 0, "time": time.time(), "first": number, "lines": [f"line {number}"]}
        batch: Any = msgpack.packb({"v": 1, "job": job, "attempt": 1, "time": time.time(), "items": [item]})
        await asyncio.to_thread(client.xadd, telemetry_stream(job, 1), {"b": batch}, maxlen=10_000)
        await asyncio.sleep(1 / BATCHES_PER_S)


def print_latencies(name: str, requests: list[TimedRequest], goal_s: float) -> None:
    seconds = [one.seconds for one in requests]
    p95 = statistics.quantiles(seconds, n=20)[-1]
    figures = f"median {1e3 * statistics.median(seconds):.0f} ms, p95 {1e3 * p95:.0f} ms"
    goal = f"goal {1e3 * goal_s:.0f}: {'met' if p95 <= goal_s else 'missed'}"
    print(f"{name:<9} {len(seconds):,} requests, {figures} ({goal})")


if __name__ == "__main__":
    sys.exit(main())
