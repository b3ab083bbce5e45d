"""Server-sent events, as https://html.spec.whatwg.org/multipage/server-sent-events.html has them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from meshboard.door import BUSY_S, Door, problems_of
from meshboard.errors import AwayError, RefusedError, passes

AWAY_S = 600.0  # for which a board that was there may be away: it may be upgraded


class Event(NamedTuple):
    """`id`: where to go on behind it; "" where that is another's to say."""

    name: str
    data: Any
    id: str


def told(lines: Iterable[str]) -> Iterator[Event]:
    """Whole events; what breaks off is none."""
    name, data, last = "", list[str](), ""
    for line in lines:
        if not line:
            if data:
                yield Event(name or "message", json.loads("\n".join(data)), last)
            name, data, last = "", [], ""
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
        elif field == "id":
            last = value


def follow(door: Door, path: str, **query: Any) -> Iterator[Event]:
    """Events until the one called `end`; a line that breaks is taken up behind the last event that had an id.

    Raises:
        RefusedError: at once, or as soon as the right to see it ends.
        AwayError: it could not be reached, or not any more for AWAY_S.
    """
    last, heard = "", None
    while True:
        try:
            with door.stream(path, params=query, headers={"Last-Event-ID": last} if last else {}) as response:
                for event in told(response.iter_lines()):
                    heard, last = time.monotonic(), event.id or last
                    yield _allowed(event)
                    if event.name == "end":
                        return
        except (AwayError, RefusedError) as error:
            if heard is None or not passes(error) or time.monotonic() - heard > AWAY_S:
                raise
        except ValueError as error:
            raise AwayError(f"{door.url} sends events that are none: {error}") from None
        time.sleep(BUSY_S)


def _allowed(event: Event) -> Event:
    """Raises RefusedError: the right to see the job has ended."""
    if event.name == "error":
        raise RefusedError(int(event.data["status"]), problems_of(event.data))
    return event
