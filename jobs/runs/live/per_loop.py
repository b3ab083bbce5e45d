"""Share one object per event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerLoop(Generic[T]):
    """Return the object of the running event loop, which `create` makes at the first call."""

    def __init__(self, create: Callable[[], T]) -> None:
        self._create = create
        # Keyed by the loop, because a new loop may reuse the id() of a collected one.
        self._objects = WeakKeyDictionary[asyncio.AbstractEventLoop, T]()

    def __call__(self) -> T:
        loop = asyncio.get_running_loop()
        if loop not in self._objects:
            self._objects[loop] = self._create()
        return self._objects[loop]
