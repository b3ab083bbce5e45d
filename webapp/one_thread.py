"""Django behind ASGI, a request in one thread from the first middleware to the view and back."""

from __future__ import annotations

from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest
from django.http.response import HttpResponseBase


class OneThreadHandler(ASGIHandler):
    """Nearly all of our views wait for the database in a thread. Left alone, Django goes to and fro between that thread
    and the loop for every middleware that could do either; a view that is a coroutine still runs in the loop."""

    def load_middleware(self, is_async: bool = False) -> None:
        super().load_middleware(is_async=False)

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        return await sync_to_async(self.get_response, thread_sensitive=True)(request)
