"""Mails about jobs. Text of users becomes a header only as the text of the subject."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.core.mail import EmailMessage, get_connection

from jobs.models import Delivery, describe_status
from jobs.people.notifications.post import LONGEST_WORDS, Sent
from jobs.people.notifications.shapes import Told

LONGEST_NAME = 60  # of a job, in a subject
PATIENCE_S = 10.0  # of each step of a conversation with the mail server


@dataclass(frozen=True)
class Mail:
    """As it leaves."""

    to: str
    subject: str
    text: str
    key: str


def mail_of(delivery: Delivery) -> Mail:
    """Return the mail of a delivery to a person."""
    assert delivery.person is not None, "an email has a recipient"
    told: Told = json.loads(delivery.body)
    job = told["job"]
    assert job is not None, "an email reports on a job"
    lines = [
        f"{job['name']} ({job['id']}) {describe_status(job['status'])}.",
        *_why(told),
        "",
        f"Job page: {job['url']}",
        "",
        f"Project: {job['project']}",
        f"Owner: {job['owner']}",
        f"Attempt: {job['attempt']}",
        f"Time: {datetime.fromisoformat(told['created']):%Y-%m-%d %H:%M:%S} UTC",
        "",
        "You requested this email on the page Notifications or on the job page.",
    ]
    subject = f"{_one_line(job['name'])} {describe_status(job['status'])}"
    return Mail(delivery.person.email, subject, "\n".join(lines), delivery.key)


def _why(told: Told) -> list[str]:
    """Return the verdict, its reason, and the next step, or the reason of the status if the verdict lacks it."""
    verdict = told.get("verdict")
    if not verdict:
        return ["", f"Reason: {told['reason']}"] if told["reason"] else []
    lines = ["", verdict["sentence"]]
    lines += [f"{label}: {text}" for label, text in (("Why", verdict["reason"]), ("Next", verdict["next"])) if text]
    if verdict["state"] != "failed" and told["reason"].rstrip(".") not in " ".join(lines):
        lines += ["", f"Reason: {told['reason']}"]
    return lines


def send(mail: Mail) -> Sent:
    """Never raises: whatever happens on the way is how it went. Blocks as long as the mail server does."""
    began = time.monotonic()
    try:
        headers = {
            "Message-ID": f"<{mail.key}@{settings.DEFAULT_FROM_EMAIL.rpartition('@')[2]}>",
            "Auto-Submitted": "auto-generated",
        }
        connection = get_connection(timeout=PATIENCE_S)
        message = EmailMessage(mail.subject, mail.text, to=[mail.to], headers=headers, connection=connection)
        message.send()
    except Exception as error:
        words = f"{type(error).__name__}: {error}"[:LONGEST_WORDS]
        return Sent(False, round(time.monotonic() - began, 3), None, words)
    return Sent(True, round(time.monotonic() - began, 3), None, "the mail server accepted the message")


def _one_line(name: str) -> str:
    """Printable and short: a line break in it would be another header, and Django refuses the whole mail."""
    shown = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    return shown if len(shown) <= LONGEST_NAME else shown[: LONGEST_NAME - 1] + "…"
