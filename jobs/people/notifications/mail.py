"""Send emails about jobs and hosts. User text appears in no header except the subject."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.core.mail import EmailMessage, get_connection

from jobs.models import Delivery, describe_status
from jobs.people.notifications.outbox import HOST_EVENT
from jobs.people.notifications.payloads import HostMailBody, WebhookPayload
from jobs.people.notifications.webhook_transport import MAX_RESULT_CHARACTERS, SendResult

MAX_SUBJECT_NAME = 60  # characters of the job name
MAIL_TIMEOUT_S = 10.0  # per response of the mail server


@dataclass(frozen=True)
class Mail:
    to: str
    subject: str
    text: str
    key: str


def build_mail(delivery: Delivery) -> Mail:
    """Return the mail of a delivery to a person."""
    assert delivery.person is not None, "an email has a recipient"
    if delivery.event == HOST_EVENT:
        return _build_host_mail(delivery, delivery.person.email)
    body: WebhookPayload = json.loads(delivery.body)
    job = body["job"]
    assert job is not None, "an email reports on a job"
    lines = [
        f"{job['name']} ({job['id']}) {describe_status(job['status'])}.",
        *_format_reason(body),
        "",
        f"Job page: {job['url']}",
        "",
        f"Project: {job['project']}",
        f"Owner: {job['owner']}",
        f"Attempt: {job['attempt']}",
        f"Time: {datetime.fromisoformat(body['created']):%Y-%m-%d %H:%M:%S} UTC",
        "",
        "You requested this email on the page Notifications or on the job page.",
    ]
    subject = f"{_one_line(job['name'])} {describe_status(job['status'])}"
    return Mail(delivery.person.email, subject, "\n".join(lines), delivery.key)


def _build_host_mail(delivery: Delivery, address: str) -> Mail:
    body: HostMailBody = json.loads(delivery.body)
    if body["problem"]:
        title = f"Host {body['host']} is sick"
        text = f"{title}, so it starts no jobs.\n\nReason: {body['problem']}"
    else:
        title = f"Host {body['host']} can start jobs again"
        text = f"{title}."
    lines = [
        text,
        "",
        f"Host page: {body['url']}",
        f"Time: {datetime.fromisoformat(body['created']):%Y-%m-%d %H:%M:%S} UTC",
        "",
        "All staff who can change hosts receive this email.",
    ]
    return Mail(address, _one_line(title), "\n".join(lines), delivery.key)


def _format_reason(body: WebhookPayload) -> list[str]:
    """Return the verdict, its reason, and the next step, or the reason of the status if the verdict lacks it."""
    verdict = body.get("verdict")
    if not verdict:
        return ["", f"Reason: {body['reason']}"] if body["reason"] else []
    lines = ["", verdict["sentence"]]
    lines += [f"{label}: {text}" for label, text in (("Why", verdict["reason"]), ("Next", verdict["next"])) if text]
    if verdict["state"] != "failed" and body["reason"].rstrip(".") not in " ".join(lines):
        lines += ["", f"Reason: {body['reason']}"]
    return lines


def send_mail(mail: Mail) -> SendResult:
    """Send an email and return the result. Never raises."""
    began = time.monotonic()
    try:
        headers = {
            "Message-ID": f"<{mail.key}@{settings.DEFAULT_FROM_EMAIL.rpartition('@')[2]}>",
            "Auto-Submitted": "auto-generated",
        }
        connection = get_connection(timeout=MAIL_TIMEOUT_S)
        message = EmailMessage(mail.subject, mail.text, to=[mail.to], headers=headers, connection=connection)
        message.send()
    except Exception as error:
        words = f"{type(error).__name__}: {error}"[:MAX_RESULT_CHARACTERS]
        return SendResult(False, round(time.monotonic() - began, 3), None, words)
    return SendResult(True, round(time.monotonic() - began, 3), None, "the mail server accepted the message")


def _one_line(name: str) -> str:
    # Django rejects a subject with a line break.
    shown = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    return shown if len(shown) <= MAX_SUBJECT_NAME else shown[: MAX_SUBJECT_NAME - 1] + "…"
