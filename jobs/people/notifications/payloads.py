"""JSON of webhook messages, email settings, and webhooks."""

from __future__ import annotations

from typing_extensions import TypedDict


class JobPayload(TypedDict):
    """The job at the time of the event. `url` is a path if the address of the board is not set."""

    id: str
    name: str
    kind: str
    project: str
    owner: str
    attempt: int
    status: str
    url: str


class VerdictSummary(TypedDict):
    """The verdict of an attempt that has ended, with the names and texts of the field `diagnosis` in REST."""

    state: str
    sentence: str
    reason: str
    next: str


class WebhookPayload(TypedDict):
    """The body of a webhook. `job` and `reason` are of event "job.state" alone.

    `verdict` is null until an attempt has ended, and for jobs without a verdict.
    """

    id: str
    event: str
    created: str
    reason: str
    job: JobPayload | None
    verdict: VerdictSummary | None


class HostMailBody(TypedDict):
    """An email about a host. `problem`: why the host is sick, empty if the host can start jobs again."""

    host: str
    problem: str
    created: str
    url: str


class HostEventPayload(HostMailBody):
    """The body of a webhook about a host."""

    id: str
    event: str
    job: None
    verdict: None


class DeliveryTry(TypedDict):
    """A try of a delivery. `status`: HTTP status, null without a response."""

    at: str
    seconds: float
    status: int | None
    words: str


class EmailSetting(TypedDict):
    """Job statuses for which a user receives emails. `project`: null for own jobs in all projects."""

    project: str | None
    states: list[str]


class EmailSettings(TypedDict):
    """Email settings of a user.

    `email`: address, null if the account has none. `sends`: true if this board can send emails.
    """

    email: str | None
    sends: bool
    wishes: list[EmailSetting]


class EndEmail(TypedDict):
    """Email at the end of a job. `asked`: true if it is requested. `email`, `sends`: see `EmailSettings`."""

    asked: bool
    email: str | None
    sends: bool


class WebhookDetail(TypedDict):
    """A webhook without its secret.

    `waiting`: number of unfinished deliveries. `silent`: why an active webhook sends nothing, empty if it sends.
    """

    id: str
    project: str
    owner: str
    name: str
    url: str
    states: list[str]
    job: str
    everybody: bool
    active: bool
    created: str
    rotated: str | None
    waiting: int
    silent: str


class NewWebhook(WebhookDetail):
    """A new webhook with its secret, which is shown only once."""

    secret: str


class WebhookDelivery(TypedDict):
    """A message to a webhook. `due`: time of the next try, null if there is no further try."""

    id: str
    event: str
    job: str
    created: str
    outcome: str
    due: str | None
    tries: list[DeliveryTry]
