"""The controller's stage of deliveries: claims those that are due, has them carried in a thread of its own, and writes
down how it went. No receiver is waited for here, and the thread has no database.

A delivery is sent at least once: cut off between sending and writing that down, it is sent again, under the same key.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections import Counter, deque
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Min
from django.utils import timezone

from jobs.models import Delivery, Outcome, Webhook
from jobs.people.notifications.deliveries import MOST_TRIES_KEPT, give_up
from jobs.people.notifications.outbox import may_read, why_silent
from jobs.people.notifications.post import Sent
from jobs.people.notifications.routes import HookRoute, MailRoute, Route, Wires
from jobs.people.notifications.shapes import Try
from jobs.people.notifications.verdicts import add_verdicts

log = logging.getLogger(__name__)

MOST_ROUTES = 64  # at once
MOST_OF_PROJECT = 8  # of these, so that one project's dead receivers take no others' place
BATCH = 32  # deliveries of a receiver that are claimed at once
ROUTE_S = 30.0  # after which a batch begins no other; what is left is due again
CLAIMED_FOR = timedelta(minutes=5)  # longer than any batch: then whoever claimed it is dead
FIRST_PAUSE_S, LONGEST_PAUSE_S = 10.0, 4 * 3600.0
TRIED_FOR = timedelta(days=1)
MAIL = "mail"  # the one receiver that is no webhook


def next_try(tries: int, since: datetime, now: datetime) -> datetime | None:
    """When to try again after so many tries: twice as long after each, give or take a quarter. None: given up."""
    pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(tries - 1, 20)) * random.uniform(0.75, 1.25)
    due = now + timedelta(seconds=pause)
    return due if due - since <= TRIED_FOR else None


class Postman:
    """Hands out and takes in; made once a controller, used by its thread alone."""

    def __init__(self) -> None:
        self._on_the_way: dict[str, str] = {}  # receiver -> project
        self._heard: deque[tuple[str, int, Sent] | str] = deque()  # how one went; a receiver whose batch is over
        self._claimed: dict[str, set[int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wires: Wires | None = None

    def turn(self) -> None:
        """Once a tick; never waits for a receiver."""
        self.take_in()
        self._hand_out(timezone.now())

    def close(self) -> None:
        """What is on its way is cut off; it is due again later."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._wires is not None:
            self._wires.resolvers.shutdown(wait=False, cancel_futures=True)

    def take_in(self) -> None:
        """How it went, also of who hands out no more: else the next one sends it again. Each leaves the queue once it
        is written down: the database may be away just now."""
        while self._heard:
            match self._heard[0]:
                case str(receiver):
                    self._over(receiver)
                case receiver, key, sent:
                    _write_down(key, sent)
                    self._claimed[receiver].discard(key)
            self._heard.popleft()

    def _over(self, receiver: str) -> None:
        """What it claimed and did not send is due as before."""
        Delivery.objects.filter(pk__in=self._claimed[receiver], due__isnull=False).update(due=timezone.now())
        del self._claimed[receiver], self._on_the_way[receiver]

    def _hand_out(self, now: datetime) -> None:
        due = Delivery.objects.filter(due__lte=now)
        if MAIL not in self._on_the_way and settings.EMAIL_HOST:
            mails = _claim(list(due.filter(person__isnull=False).select_related("person").order_by("id")[:BATCH]), now)
            give_up([mail for mail in mails if not may_read(mail)])
            if mails := [mail for mail in mails if mail.due is not None]:
                self._start(MAIL, "", mails, MailRoute(mails))
        of_projects = Counter(self._on_the_way.values())
        for hook in self._hooks_due(now):
            if len(self._on_the_way) >= MOST_ROUTES:
                break
            if of_projects[hook.project] >= MOST_OF_PROJECT:
                continue
            claimed = _claim(list(due.filter(webhook=hook).order_by("id")[:BATCH]), now)
            if why_silent(hook):
                give_up(claimed)
            elif claimed:
                of_projects[hook.project] += 1
                self._wires = self._wires or Wires(lookups=MOST_ROUTES)
                self._start(hook.id, hook.project, claimed, HookRoute(hook, claimed, self._wires))

    def _hooks_due(self, now: datetime) -> list[Webhook]:
        """Those with something to send that nobody carries to, who waited longest first."""
        due = Webhook.objects.filter(active=True, deliveries__due__lte=now).select_related("owner")
        waiting = due.exclude(id__in=list(self._on_the_way))
        return list(waiting.annotate(first=Min("deliveries__due")).order_by("first")[: 4 * MOST_ROUTES])

    def _start(self, receiver: str, project: str, claimed: list[Delivery], route: Route) -> None:
        self._on_the_way[receiver] = project
        self._claimed[receiver] = {delivery.pk for delivery in claimed}
        asyncio.run_coroutine_threadsafe(self._carry(receiver, route), self._running())

    async def _carry(self, receiver: str, route: Route) -> None:
        began = time.monotonic()
        try:
            async for key, sent in route.carry():
                self._heard.append((receiver, key, sent))
                if time.monotonic() - began > ROUTE_S:
                    break
        except Exception:
            log.exception("Deliveries to %s failed", receiver)
        finally:
            self._heard.append(receiver)

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="postman", daemon=True).start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cuts off what is still on its way
        runner.get_loop().run_forever()


def _claim(deliveries: list[Delivery], now: datetime) -> list[Delivery]:
    """Those that nobody else took meanwhile: none where somebody took any."""
    if not deliveries:
        return []
    keys = [delivery.pk for delivery in deliveries]
    with transaction.atomic():
        taken = Delivery.objects.filter(pk__in=keys, due__lte=now).update(due=now + CLAIMED_FOR)
        if taken != len(keys):
            transaction.set_rollback(True)
            return []
        add_verdicts(deliveries)
    return deliveries


def _write_down(key: int, sent: Sent) -> None:
    now = timezone.now()
    delivery = Delivery.objects.filter(pk=key, due__isnull=False).first()
    if delivery is None:
        return
    told: Try = {"at": now.isoformat(), "seconds": sent.seconds, "status": sent.status, "words": sent.words}
    since = delivery.since
    tries = [*delivery.tries, told]
    failed_since = sum(datetime.fromisoformat(each["at"]) >= since for each in tries)
    due = None if sent.delivered else next_try(failed_since, since, now)
    outcome = Outcome.DELIVERED if sent.delivered else Outcome.WAITING if due else Outcome.GIVEN_UP
    Delivery.objects.filter(pk=key, due__isnull=False).update(due=due, outcome=outcome, tries=tries[-MOST_TRIES_KEPT:])
