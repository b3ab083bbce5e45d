"""Secrets of webhooks, and signatures made with them.

The scheme is Stripe's (https://docs.stripe.com/webhooks#verify-manually): `t=SECONDS,v1=HEX`, HMAC-SHA256 of
`SECONDS.BODY`, and one v1 more for each secret that still holds. A secret is made from the board's own secret key and
the webhook's generation, as a host's key is: nothing secret lies in the database.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import timedelta

from django.conf import settings
from django.utils import timezone
from django.utils.crypto import salted_hmac

from jobs.models import Webhook

PREFIX = "mbw_"
OLD_HOLDS = timedelta(days=1)  # after another took its place


def secret_of(hook: Webhook) -> str:
    """The newest, which is shown once."""
    return _made(settings.SECRET_KEY, hook.id, hook.generation)


def secrets_of(hook: Webhook) -> list[str]:
    """All that a receiver may know it by: of the last day's rotation, and of earlier secret keys of the board."""
    recent = hook.rotated is not None and timezone.now() - hook.rotated < OLD_HOLDS
    generations = [hook.generation, hook.generation - 1] if recent else [hook.generation]
    keys = [settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS]
    return [_made(key, hook.id, generation) for generation in generations for key in keys]


def signature(secrets: list[str], seconds: int, body: bytes) -> str:
    """The header's value."""
    signed = b"%d.%s" % (seconds, body)
    made = [hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest() for secret in secrets]
    return ",".join([f"t={seconds}", *(f"v1={one}" for one in made)])


def _made(key: str, hook: str, generation: int) -> str:
    told = salted_hmac("meshboard.webhook", f"{generation}:{hook}", key, algorithm="sha256")
    return PREFIX + told.hexdigest()
