"""The layer round Django in which requests are held: a waiter is a task here, and costs no thread."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

from jobs.api.http.problems import CONTENT_TYPE, WHOLE, details
from jobs.runs.live.held_requests import (
    SCOPE_KEY,
    FollowEvents,
    HeldRequest,
    WaitForChange,
    format_event,
    get_job_watcher,
)
from jobs.runs.live.job_follower import JobFollower
from planner.facts.validation import Problem

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[None]]

MOST = 1000  # held at once in a process
MOST_OF_USER = 200
LATER_S = 5
ASKED_AGAIN_AT_ONCE = 16  # each view has a thread and a connection to the database of its own
ASK_AGAIN_S = 10.0  # until the view is asked whether the user may still see it
UNSEEN = 204  # a view's status with a wish


class Patient:
    """Hands requests to `application`, and holds those whose view wishes it."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._held: Counter[int] = Counter()  # by user
        self._asking_again = asyncio.Semaphore(ASKED_AGAIN_AT_ONCE)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        held, headers = await self._ask(scope, receive, send)
        if held.wait is None:
            return
        if words := self._full(held.user):
            await _refuse(send, words)
            return
        self._held[held.user] += 1
        try:
            if isinstance(held.wait, WaitForChange):
                await unless_gone(receive, self._wait(scope, held.wait, send))
            else:
                await unless_gone(receive, self._tell(scope, held.wait, headers, send))
        finally:
            self._held[held.user] -= 1
            if not self._held[held.user]:
                del self._held[held.user]

    async def _ask(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send, held: HeldRequest | None = None
    ) -> tuple[HeldRequest, list[tuple[bytes, bytes]]]:
        """What the view wishes, with the headers it would have; without a wish, `send` had its answer."""
        held = held or HeldRequest()
        headers: list[tuple[bytes, bytes]] = []

        async def unless_held(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] != UNSEEN:
                    held.wait = None
                headers.extend(message["headers"])
            if held.wait is None:
                await send(message)

        await self._application({**scope, SCOPE_KEY: held}, receive, unless_held)
        return held, headers

    async def _ask_again(self, scope: MutableMapping[str, Any], *, last: bool = False) -> list[Message]:
        """The view's answer, none while it wishes on. Few at a time: all who wait for a job are woken at once, and
        whoever reads slowly keeps nobody from asking."""
        answer: list[Message] = []

        async def keep(message: Message) -> None:
            answer.append(message)

        async with self._asking_again:
            await self._ask(scope, _no_body(), keep, HeldRequest(is_repeated=True, is_last=last))
        return answer

    def _full(self, user: int) -> str:
        """Why no more are held; empty where one more is."""
        if self._held.total() >= MOST:
            return f"The board already has {MOST} waiting requests, the maximum. Try again later."
        if self._held[user] >= MOST_OF_USER:
            return f"You already have {MOST_OF_USER} waiting requests, the maximum. Try again later."
        return ""

    async def _wait(self, scope: MutableMapping[str, Any], wish: WaitForChange, send: Send) -> None:
        loop = asyncio.get_running_loop()
        deadline, seen = loop.time() + wish.timeout_s, wish.seen
        with get_job_watcher().watch(wish.job, seen) as waiting:
            asked = loop.time()
            while True:
                await waiting.wait(max(0.0, min(deadline, asked + ASK_AGAIN_S) - loop.time()))
                now = loop.time()
                stands = waiting.state
                moved = stands is None or stands[:2] != seen[:2]
                if not moved and now < min(deadline, asked + ASK_AGAIN_S):
                    continue  # another verdict, which nobody waits for
                asked, seen = now, stands or seen
                answer = await self._ask_again(scope, last=now >= deadline)
                for message in answer:
                    await send(message)
                if answer:
                    return

    async def _tell(
        self, scope: MutableMapping[str, Any], wish: FollowEvents, headers: list[tuple[bytes, bytes]], send: Send
    ) -> None:
        own = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),  # a proxy that gathers an answer would never pass it on
        ]
        kept = [(name, value) for name, value in headers if name.lower() not in (b"content-length", *dict(own))]
        await send({"type": "http.response.start", "status": 200, "headers": [*own, *kept]})
        telling = asyncio.create_task(_pass_on(wish, send))
        refused = asyncio.create_task(self._until_refused(scope, wish))
        try:
            await asyncio.wait({telling, refused}, return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
            else:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)
                await _send_part(send, format_event("error", refused.result()))
        finally:
            for task in (telling, refused):
                task.cancel()
            await asyncio.gather(telling, refused, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_refused(self, scope: MutableMapping[str, Any], wish: FollowEvents) -> Any:
        """The view's refusal, once it refuses: asked now and then, and when the job is gone."""
        loop = asyncio.get_running_loop()
        with get_job_watcher().watch(wish.job, wish.seen) as waiting:
            while True:
                due = loop.time() + ASK_AGAIN_S
                while await waiting.wait(max(0.0, due - loop.time())) and waiting.state is not None:
                    pass
                answer = await self._ask_again(scope)
                if answer:
                    return json.loads(b"".join(message.get("body", b"") for message in answer) or b"null")


async def _pass_on(wish: FollowEvents, send: Send) -> None:
    # A canceled send leaves the generator suspended: close it here, so its streams are dropped at once.
    async with aclosing(JobFollower(wish).events()) as events:
        async for part in events:
            await _send_part(send, part)


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def unless_gone(receive: Receive, work: Awaitable[None]) -> None:
    """The work, which ends where the client goes away."""
    tasks = {asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))}
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _no_body() -> Receive:
    """A request without a body, whose client stays."""
    pending: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def received() -> Message:
        if not pending:
            await asyncio.Event().wait()
        return pending.pop()

    return received


async def _refuse(send: Send, words: str) -> None:
    body = json.dumps(details(429, [Problem(WHOLE, words)])).encode()
    headers = [
        (b"content-type", CONTENT_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(LATER_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 429, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
