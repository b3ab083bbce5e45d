"""What each event loop has one of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerLoop(Generic[T]):
    """Called within a loop: that loop's, made by `make` when it is asked for first."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        # By the loop, not its id(): the next loop may have that of one which is gone.
        self._made = WeakKeyDictionary[asyncio.AbstractEventLoop, T]()

    def __call__(self) -> T:
        loop = asyncio.get_running_loop()
        if loop not in self._made:
            self._made[loop] = self._make()
        return self._made[loop]
