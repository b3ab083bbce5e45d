"""What the database keeps encrypted: with keys made of the board's secret key, one for each purpose."""

from __future__ import annotations

import base64

from cryptography.fernet import Fernet, MultiFernet
from django.conf import settings
from django.utils.crypto import salted_hmac


def board(purpose: str) -> MultiFernet:
    """The newest secret key encrypts; what the ones before encrypted is read all the same."""
    keys = [
        salted_hmac(f"meshboard.{purpose}", "board", secret, algorithm="sha256").digest()
        for secret in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS)
    ]
    return MultiFernet([Fernet(base64.urlsafe_b64encode(key)) for key in keys])
