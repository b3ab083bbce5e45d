"""Django request handler with one thread per request."""

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

from jobs.api.held_request_middleware import run_until_disconnect
from webapp.serving import limits


class SingleThreadHandler(ASGIHandler):
    """ASGI handler that runs all of a request in one thread of a pool.

    Django's handler switches between a thread and the event loop for signals, middleware, and the view, and each switch
    waits for the GIL. It also starts a thread per request.
    """

    def __init__(self) -> None:
        super().__init__()
        threads = ThreadPoolExecutor(limits.MAX_REQUEST_THREADS, thread_name_prefix="request")
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
                await run_until_disconnect(receive, self.send_response(response, send))
            finally:
                await self._closed(response)

    def _answer(self, scope: Any, body: IO[bytes]) -> HttpResponseBase:
        """Return the response. It is closed unless it streams."""
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
            response.streaming_content = stream_parts(response.streaming_content)
        answered: HttpResponseBase = response
        return answered


async def stream_parts(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield each part after the previous part was sent. Django would read a complete file into memory."""
    while (part := await sync_to_async(lambda: next(parts, None), thread_sensitive=False)()) is not None:
        yield part
