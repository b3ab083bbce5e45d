"""Handler of a test mail server."""

from __future__ import annotations

import email
import email.policy
from email.message import EmailMessage
from typing import Any

from aiosmtpd.handlers import Message


class MailStore(Message):
    """Stores each received mail, parsed from its bytes."""

    def __init__(self) -> None:
        super().__init__(EmailMessage)
        self.mails: list[EmailMessage] = []

    def handle_message(self, message: Any) -> None:
        self.mails.append(email.message_from_bytes(bytes(message), policy=email.policy.default))
