"""The ways that deliveries take: each receiver's are sent one after another, apart from everybody else's."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from django.conf import settings

from jobs.models import Delivery, Webhook
from jobs.people.notifications.mail import Mail, mail_of, send
from jobs.people.notifications.post import Letter, Sent, post
from jobs.people.notifications.signing import secrets_of


class Route(Protocol):
    """Carries letters to one receiver. It knows all it needs: it runs beside the controller, without a database."""

    def carry(self) -> AsyncIterator[tuple[int, Sent]]:
        """How each went, by its delivery's key in the database, as it goes; what is not told of was not sent."""


class Wires:
    """What all webhooks are sent with."""

    def __init__(self, *, lookups: int) -> None:
        self.trust = ssl.create_default_context()
        self.resolvers = ThreadPoolExecutor(lookups, "webhook-lookup")


class HookRoute:
    """To a webhook. Behind the first that does not arrive, the others wait for the next turn."""

    def __init__(self, hook: Webhook, deliveries: Sequence[Delivery], wires: Wires) -> None:
        self._url, self._secrets, self._wires = hook.url, secrets_of(hook), wires
        self._allowed = list(settings.WEBHOOK_NETWORKS)
        self._letters = [(each.pk, Letter(each.key, each.event, each.body.encode())) for each in deliveries]

    async def carry(self) -> AsyncIterator[tuple[int, Sent]]:
        for key, letter in self._letters:
            wires = self._wires
            sent = await post(
                letter, self._url, self._secrets, allowed=self._allowed, trust=wires.trust, resolvers=wires.resolvers
            )
            yield key, sent
            if not sent.delivered:
                return


class MailRoute:
    """To the mail server, for whoever the mails are for."""

    def __init__(self, deliveries: Sequence[Delivery]) -> None:
        self._mails: list[tuple[int, Mail]] = [(each.pk, mail_of(each)) for each in deliveries]

    async def carry(self) -> AsyncIterator[tuple[int, Sent]]:
        for key, mail in self._mails:
            yield key, await asyncio.to_thread(send, mail)
