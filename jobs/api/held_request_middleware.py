"""ASGI middleware that holds waiting requests as tasks, so that they occupy no thread."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

from jobs.api.problems import CONTENT_TYPE, build_request_problem
from jobs.runs.live.held_requests import (
    SCOPE_KEY,
    FollowEvents,
    HeldRequest,
    WaitForChange,
    format_event,
    get_job_watcher,
)
from jobs.runs.live.job_follower import JobFollower

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]

MAX_HELD_REQUESTS = 1000  # per process
MAX_HELD_PER_USER = 200
RETRY_AFTER_S = 5
MAX_CONCURRENT_RECHECKS = 16  # each view occupies a thread and a database connection
RECHECK_S = 10.0  # between two checks of the right to see the job
HELD_STATUS = 204  # status of a view that wants its request held


class HeldRequestMiddleware:
    """Pass requests to `application`, and hold requests whose view asks for a wait."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._held: Counter[int] = Counter()  # by user
        self._recheck_slots = asyncio.Semaphore(MAX_CONCURRENT_RECHECKS)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        held, headers = await self._call_view(scope, receive, send)
        if held.wait is None:
            return
        if message := self._explain_full(held.user):
            await _refuse(send, message)
            return
        self._held[held.user] += 1
        try:
            if isinstance(held.wait, WaitForChange):
                await run_until_disconnect(receive, self._wait(scope, held.wait, send))
            else:
                await run_until_disconnect(receive, self._stream_events(scope, held.wait, headers, send))
        finally:
            self._held[held.user] -= 1
            if not self._held[held.user]:
                del self._held[held.user]

    async def _call_view(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send, held: HeldRequest | None = None
    ) -> tuple[HeldRequest, list[tuple[bytes, bytes]]]:
        """Call the view. Return its request to be held and its headers, or send its response."""
        held = held or HeldRequest()
        headers: list[tuple[bytes, bytes]] = []

        async def send_unless_held(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] != HELD_STATUS:
                    held.wait = None
                headers.extend(message["headers"])
            if held.wait is None:
                await send(message)

        await self._application({**scope, SCOPE_KEY: held}, receive, send_unless_held)
        return held, headers

    async def _recheck(self, scope: MutableMapping[str, Any], *, last: bool = False) -> list[Message]:
        """Call the view again. Return its response, or [] if the request is still to be held.

        The number of concurrent calls is limited, because a change of a job wakes all its waiting requests.
        """
        response: list[Message] = []

        async def collect(message: Message) -> None:
            response.append(message)

        async with self._recheck_slots:
            await self._call_view(scope, _make_empty_receive(), collect, HeldRequest(is_repeated=True, is_last=last))
        return response

    def _explain_full(self, user: int) -> str:
        """Return why another request cannot be held, or ""."""
        if self._held.total() >= MAX_HELD_REQUESTS:
            return f"The board already has {MAX_HELD_REQUESTS} waiting requests, the maximum. Try again later."
        if self._held[user] >= MAX_HELD_PER_USER:
            return f"You already have {MAX_HELD_PER_USER} waiting requests, the maximum. Try again later."
        return ""

    async def _wait(self, scope: MutableMapping[str, Any], wait: WaitForChange, send: Send) -> None:
        loop = asyncio.get_running_loop()
        deadline, seen = loop.time() + wait.timeout_s, wait.seen
        with get_job_watcher().watch(wait.job, seen) as waiting:
            checked_at = loop.time()
            while True:
                await waiting.wait(max(0.0, min(deadline, checked_at + RECHECK_S) - loop.time()))
                now = loop.time()
                state = waiting.state
                has_changed = state is None or state[:2] != seen[:2]
                if not has_changed and now < min(deadline, checked_at + RECHECK_S):
                    continue  # only the verdict changed
                checked_at, seen = now, state or seen
                response = await self._recheck(scope, last=now >= deadline)
                for message in response:
                    await send(message)
                if response:
                    return

    async def _stream_events(
        self, scope: MutableMapping[str, Any], wait: FollowEvents, headers: list[tuple[bytes, bytes]], send: Send
    ) -> None:
        own_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # else a proxy buffers the stream
        ]
        replaced = (b"content-length", *dict(own_headers))
        view_headers = [(name, value) for name, value in headers if name.lower() not in replaced]
        await send({"type": "http.response.start", "status": 200, "headers": [*own_headers, *view_headers]})
        streaming = asyncio.create_task(_forward_events(wait, send))
        refused = asyncio.create_task(self._wait_for_refusal(scope, wait))
        try:
            await asyncio.wait({streaming, refused}, return_when=asyncio.FIRST_COMPLETED)
            if streaming.done():
                streaming.result()
            else:
                streaming.cancel()
                await asyncio.gather(streaming, return_exceptions=True)
                await _send_part(send, format_event("error", refused.result()))
        finally:
            for task in (streaming, refused):
                task.cancel()
            await asyncio.gather(streaming, refused, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _wait_for_refusal(self, scope: MutableMapping[str, Any], wait: FollowEvents) -> Any:
        """Return the refusal of the view when the user loses access to the job."""
        loop = asyncio.get_running_loop()
        with get_job_watcher().watch(wait.job, wait.seen) as waiting:
            while True:
                due = loop.time() + RECHECK_S
                while await waiting.wait(max(0.0, due - loop.time())) and waiting.state is not None:
                    pass
                response = await self._recheck(scope)
                if response:
                    return json.loads(b"".join(message.get("body", b"") for message in response) or b"null")


async def _forward_events(wait: FollowEvents, send: Send) -> None:
    # A canceled send leaves the generator suspended: close it here, so its streams are dropped at once.
    async with aclosing(JobFollower(wait).events()) as events:
        async for part in events:
            await _send_part(send, part)


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def run_until_disconnect(receive: Receive, work: Awaitable[None]) -> None:
    """Run the work, and cancel it when the client disconnects."""
    tasks = {asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _make_empty_receive() -> Receive:
    """Return the receive callable of a request without a body, whose client stays."""
    pending: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if not pending:
            await asyncio.Event().wait()
        return pending.pop()

    return receive


async def _refuse(send: Send, message: str) -> None:
    body = json.dumps(build_request_problem(429, message)).encode()
    headers = [
        (b"content-type", CONTENT_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(RETRY_AFTER_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 429, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
