"""Django behind ASGI, a request in one thread from its first signal to its last."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from asgiref.sync import sync_to_async
from django.core.exceptions import RequestAborted
from django.core.handlers.asgi import ASGIHandler, get_script_prefix
from django.core.signals import request_started
from django.http import FileResponse
from django.http.response import HttpResponseBase
from django.urls import set_script_prefix

from jobs.api.http.patient import unless_gone
from webapp.serving import limits


class OneThreadHandler(ASGIHandler):
    """Our views wait for the database in a thread. Left alone, Django goes to and fro between that thread and the loop
    for the request's signals, for every middleware that could do either, and for the view: each time a wait for
    Python's lock. And it starts a thread for each request, where these are kept for the next."""

    def __init__(self) -> None:
        super().__init__()
        threads = ThreadPoolExecutor(limits.REQUESTS_AT_ONCE, thread_name_prefix="request")
        self._answered = sync_to_async(self._answer, thread_sensitive=False, executor=threads)
        self._closed = sync_to_async(HttpResponseBase.close, thread_sensitive=False, executor=threads)

    def load_middleware(self, is_async: bool = False) -> None:
        super().load_middleware(is_async=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.handle(scope, receive, send)

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            body = await self.read_body(receive)
        except RequestAborted:
            return
        with body:
            response = await self._answered(scope, body)
            if not response.streaming:
                await self.send_response(response, send)
                return
            try:
                await unless_gone(receive, self.send_response(response, send))
            finally:
                await self._closed(response)

    def _answer(self, scope: Any, body: IO[bytes]) -> HttpResponseBase:
        """The response; one that is whole is closed already."""
        set_script_prefix(get_script_prefix(scope))
        request_started.send(sender=self.__class__, scope=scope)
        request, refused = self.create_request(scope, body)
        response: Any = refused if request is None else self.get_response(request)
        response._handler_class = self.__class__
        if isinstance(response, FileResponse):
            response.block_size = self.chunk_size
        if not response.streaming:
            response.close()
        elif not response.is_async:
            response.streaming_content = part_by_part(response.streaming_content)
        answered: HttpResponseBase = response
        return answered


async def part_by_part(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Each read when the one before was sent: left alone, Django holds all of a file in memory before it sends any."""
    while (part := await sync_to_async(lambda: next(parts, None), thread_sensitive=False)()) is not None:
        yield part
