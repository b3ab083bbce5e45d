"""Events that could not be taken in: kept where staff sees them, so that the ones behind them are."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgpack
import redis
from django.db import InterfaceError, OperationalError
from django.db.models import Count, QuerySet

from contracts.codec import BadMessageError
from jobs.models import DeadLetter

log = logging.getLogger(__name__)

MOST = 1000  # rows, the newest
MOST_OF_A_SENDER = 200  # so that one pushes out few of the others'
BODY_CHARACTERS = 4000
REASON_CHARACTERS = 1000
PROGRAM_LIMIT = "54"  # class of SQLSTATE: a value too large or too complex, and it will be so again


def passes(error: Exception) -> bool:
    """Whether the same message may fare better later: the database or Redis is away, locked or full."""
    if isinstance(error, redis.RedisError | InterfaceError):
        return True
    state = getattr(error.__cause__, "sqlstate", None) or ""
    return isinstance(error, OperationalError) and not state.startswith(PROGRAM_LIMIT)


def bury(entry: str, body: object, error: Exception, sender: str = "") -> None:
    """Keep what could not be taken in: a message's bytes, or the part of one that could not be."""
    reason = str(error) if isinstance(error, BadMessageError) else f"{type(error).__name__}: {error}"
    raw = body if isinstance(body, bytes) else repr(body).encode(errors="replace")
    text, named = _readable(body)
    letter = DeadLetter.objects.create(
        entry=entry,
        sender=_plain(sender or named, 100),
        reason=_plain(reason, REASON_CHARACTERS),
        body=_plain(text, BODY_CHARACTERS),
        num_bytes=len(raw),
    )
    _keep_newest(DeadLetter.objects.filter(sender=letter.sender), MOST_OF_A_SENDER)
    forget_oldest()
    log.warning("Event %s could not be processed and is stored as a dead letter: %s", entry, _plain(reason, 300))


def forget_oldest() -> int:
    """Keep the newest `MOST`; returns how many went."""
    return _keep_newest(DeadLetter.objects.all(), MOST)


def count_of(sender: str) -> str:
    """How many there were of a sender, in words where some are no longer kept or may not be."""
    return counts_of([sender])[sender]


def counts_of(senders: Iterable[str]) -> dict[str, str]:
    """`count_of` each of these, asked at once."""
    names = list(senders)
    rows = DeadLetter.objects.filter(sender__in=names).order_by().values_list("sender").annotate(Count("id"))
    kept, full = dict(rows), DeadLetter.objects.count() >= MOST
    told = {name: kept.get(name, 0) for name in names}
    return {name: f"{n} or more" if full or n >= MOST_OF_A_SENDER else str(n) for name, n in told.items()}


def _keep_newest(letters: QuerySet[DeadLetter], most: int) -> int:
    last = letters.order_by("-id").values_list("id", flat=True)[most - 1 : most].first()
    return 0 if last is None else letters.filter(id__lt=last).delete()[0]


def _readable(body: object) -> tuple[str, str]:
    """A message as text, and the host it names as far as that can be told."""
    if not isinstance(body, bytes):
        return repr(body), ""
    try:
        told = msgpack.unpackb(body, strict_map_key=False, unicode_errors="replace")
        named = told.get("host", "") if isinstance(told, dict) else ""
        return repr(told), named if isinstance(named, str) else ""
    except Exception:  # no bytes may do harm here: they have failed once already
        return repr(body[:BODY_CHARACTERS]), ""


def _plain(text: str, most: int) -> str:
    """What every database takes as text: no NUL, no lone surrogate, at most so many characters."""
    return text[:most].replace("\0", "\\0").encode(errors="replace").decode()[:most]
