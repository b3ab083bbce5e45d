"""Send due deliveries in a thread without database access, one receiver after another.

A delivery is sent at least once. After a crash between the send and its record, it is sent again with its old key.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Protocol

from django.conf import settings
from django.db import transaction
from django.db.models import Min
from django.utils import timezone

from jobs.models import Delivery, Outcome, Webhook
from jobs.people.notifications.mail import Mail, build_mail, send_mail
from jobs.people.notifications.outbox import (
    MAX_STORED_TRIES,
    abandon_deliveries,
    add_verdicts,
    get_silent_reason,
    may_receive,
)
from jobs.people.notifications.payloads import DeliveryTry
from jobs.people.notifications.webhook_transport import SendResult, WebhookMessage, get_valid_secrets, post_message


class DeliveryRoute(Protocol):
    """Sends deliveries to one receiver. It has all data, because its thread has no database."""

    def send_all(self) -> AsyncIterator[tuple[int, SendResult]]:
        """Yield the primary key and result of each sent delivery."""


class WebhookClient:
    """Certificates and name resolvers that all webhooks share."""

    def __init__(self, *, lookups: int) -> None:
        self.trust = ssl.create_default_context()
        self.resolvers = ThreadPoolExecutor(lookups, "webhook-lookup")


class WebhookRoute:
    """Sends deliveries to a webhook, and stops at the first failure."""

    def __init__(self, hook: Webhook, deliveries: Sequence[Delivery], wires: WebhookClient) -> None:
        self._url, self._secrets, self._wires = hook.url, get_valid_secrets(hook), wires
        self._allowed = list(settings.WEBHOOK_NETWORKS)
        self._letters = [(each.pk, WebhookMessage(each.key, each.event, each.body.encode())) for each in deliveries]

    async def send_all(self) -> AsyncIterator[tuple[int, SendResult]]:
        for key, letter in self._letters:
            wires = self._wires
            sent = await post_message(
                letter, self._url, self._secrets, allowed=self._allowed, trust=wires.trust, resolvers=wires.resolvers
            )
            yield key, sent
            if not sent.delivered:
                return


class MailRoute:
    """Sends deliveries to the mail server."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self._mails: list[tuple[int, Mail]] = [(each.pk, build_mail(each)) for each in deliveries]

    async def send_all(self) -> AsyncIterator[tuple[int, SendResult]]:
        for key, mail in self._mails:
            yield key, await asyncio.to_thread(send_mail, mail)


log = logging.getLogger(__name__)

MAX_ROUTES = 64  # at once
MAX_PROJECT_ROUTES = 8  # limits the effect of failing receivers of a project
BATCH_SIZE = 32  # deliveries of a receiver that are claimed at once
MAX_BATCH_S = 30.0  # after which a batch begins no other; what is left is due again
CLAIM_DURATION = timedelta(minutes=5)  # longer than any batch, so its controller has failed
MIN_RETRY_S, MAX_RETRY_S = 10.0, 4 * 3600.0
RETRY_DURATION = timedelta(days=1)
MAIL_RECEIVER = "mail"


def compute_next_try(tries: int, since: datetime, now: datetime) -> datetime | None:
    """Return the time of the next try, None to give up. The pause doubles with each try, with 25% jitter."""
    pause = min(MAX_RETRY_S, MIN_RETRY_S * 2 ** min(tries - 1, 20)) * random.uniform(0.75, 1.25)
    due = now + timedelta(seconds=pause)
    return due if due - since <= RETRY_DURATION else None


class DeliveryWorker:
    """Stage of the controller that claims due deliveries, starts sending them, and stores the results."""

    def __init__(self) -> None:
        self._active: dict[str, str] = {}  # receiver -> project
        self._results: deque[tuple[str, int, SendResult] | str] = (
            deque()
        )  # how one went; a receiver whose batch is over
        self._claimed: dict[str, set[int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wires: WebhookClient | None = None

    def run_once(self) -> None:
        """Run once per tick, without waiting for a receiver."""
        self.store_results()
        self._start_due(timezone.now())

    def close(self) -> None:
        """Stop sending. Unfinished deliveries become due again."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        if self._wires is not None:
            self._wires.resolvers.shutdown(wait=False, cancel_futures=True)

    def store_results(self) -> None:
        """Store the results so far. A result is removed only after the database stored it."""
        while self._results:
            match self._results[0]:
                case str(receiver):
                    self._finish(receiver)
                case receiver, key, sent:
                    _store_result(key, sent)
                    self._claimed[receiver].discard(key)
            self._results.popleft()

    def _finish(self, receiver: str) -> None:
        Delivery.objects.filter(pk__in=self._claimed[receiver], due__isnull=False).update(due=timezone.now())
        del self._claimed[receiver], self._active[receiver]

    def _start_due(self, now: datetime) -> None:
        due = Delivery.objects.filter(due__lte=now)
        if MAIL_RECEIVER not in self._active and settings.EMAIL_HOST:
            mails = _claim(
                list(due.filter(person__isnull=False).select_related("person").order_by("id")[:BATCH_SIZE]), now
            )
            abandon_deliveries([mail for mail in mails if not may_receive(mail)])
            if mails := [mail for mail in mails if mail.due is not None]:
                self._start(MAIL_RECEIVER, "", mails, MailRoute(mails))
        of_projects = Counter(self._active.values())
        for hook in self._get_due_webhooks(now):
            if len(self._active) >= MAX_ROUTES:
                break
            if of_projects[hook.project] >= MAX_PROJECT_ROUTES:
                continue
            claimed = _claim(list(due.filter(webhook=hook).order_by("id")[:BATCH_SIZE]), now)
            if get_silent_reason(hook):
                abandon_deliveries(claimed)
            elif claimed:
                of_projects[hook.project] += 1
                self._wires = self._wires or WebhookClient(lookups=MAX_ROUTES)
                self._start(hook.id, hook.project, claimed, WebhookRoute(hook, claimed, self._wires))

    def _get_due_webhooks(self, now: datetime) -> list[Webhook]:
        due = Webhook.objects.filter(active=True, deliveries__due__lte=now).select_related("owner")
        waiting = due.exclude(id__in=list(self._active))
        return list(waiting.annotate(first=Min("deliveries__due")).order_by("first")[: 4 * MAX_ROUTES])

    def _start(self, receiver: str, project: str, claimed: list[Delivery], route: DeliveryRoute) -> None:
        self._active[receiver] = project
        self._claimed[receiver] = {delivery.pk for delivery in claimed}
        asyncio.run_coroutine_threadsafe(self._send(receiver, route), self._get_loop())

    async def _send(self, receiver: str, route: DeliveryRoute) -> None:
        began = time.monotonic()
        try:
            async for key, sent in route.send_all():
                self._results.append((receiver, key, sent))
                if time.monotonic() - began > MAX_BATCH_S:
                    break
        except Exception:
            log.exception("Deliveries to %s failed", receiver)
        finally:
            self._results.append(receiver)

    def _get_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="postman", daemon=True).start()
        return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cuts off what is still on its way
        runner.get_loop().run_forever()


def _claim(deliveries: list[Delivery], now: datetime) -> list[Delivery]:
    """Claim all of these deliveries, or none if another controller claimed one."""
    if not deliveries:
        return []
    keys = [delivery.pk for delivery in deliveries]
    with transaction.atomic():
        taken = Delivery.objects.filter(pk__in=keys, due__lte=now).update(due=now + CLAIM_DURATION)
        if taken != len(keys):
            transaction.set_rollback(True)
            return []
        add_verdicts(deliveries)
    return deliveries


def _store_result(key: int, sent: SendResult) -> None:
    now = timezone.now()
    delivery = Delivery.objects.filter(pk=key, due__isnull=False).first()
    if delivery is None:
        return
    delivery_try: DeliveryTry = {
        "at": now.isoformat(),
        "seconds": sent.seconds,
        "status": sent.status,
        "words": sent.words,
    }
    since = delivery.since
    tries = [*delivery.tries, delivery_try]
    failed_since = sum(datetime.fromisoformat(each["at"]) >= since for each in tries)
    due = None if sent.delivered else compute_next_try(failed_since, since, now)
    outcome = Outcome.DELIVERED if sent.delivered else Outcome.WAITING if due else Outcome.GIVEN_UP
    Delivery.objects.filter(pk=key, due__isnull=False).update(due=due, outcome=outcome, tries=tries[-MAX_STORED_TRIES:])
