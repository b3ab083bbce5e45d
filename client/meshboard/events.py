"""Server-sent events, as https://html.spec.whatwg.org/multipage/server-sent-events.html has them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from meshboard.door import Door, problems_of
from meshboard.errors import AwayError, RefusedError
from meshboard.patience import Patience


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


def follow(door: Door, parts: Sequence[str], **query: Any) -> Iterator[Event]:
    """Events until the one called `end`; a line that breaks is taken up behind the last event that had an id.

    Raises:
        RefusedError: at once, or as soon as the right to see it ends.
        AwayError: at once of a board that never answered; else it said nothing for AWAY_S.
    """
    last, patience = "", Patience(heard=door.was_there)
    while True:
        try:
            headers = {"Last-Event-ID": last} if last else {}
            with door.stream(parts, "text/event-stream", params=query, headers=headers) as response:
                for event in told(response.iter_lines()):
                    patience.hears()
                    last = event.id or last
                    yield _allowed(event)
                    if event.name == "end":
                        return
        except (AwayError, RefusedError) as error:
            patience.bear(error)
            continue
        except ValueError as error:
            raise AwayError(f"{door.url} sent an invalid event: {error}") from None
        patience.rest()


def _allowed(event: Event) -> Event:
    """Raises RefusedError: the right to see the job has ended."""
    if event.name == "error":
        raise RefusedError(int(event.data["status"]), problems_of(event.data), event.data)
    return event
