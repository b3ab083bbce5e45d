"""What is told of a job, and of the telling itself."""

from __future__ import annotations

from typing_extensions import TypedDict


class ToldJob(TypedDict):
    """The job as it stood then. `url` is a path where the board does not know its own address."""

    id: str
    name: str
    kind: str
    project: str
    owner: str
    attempt: int
    status: str
    url: str


class VerdictTold(TypedDict):
    """The verdict of an attempt that has ended, with the names and texts of the field `diagnosis` in REST."""

    state: str
    sentence: str
    reason: str
    next: str


class Told(TypedDict):
    """The body of a webhook. `job` and `reason` are of event "job.state" alone.

    `verdict` is null until an attempt has ended, and for jobs without a verdict.
    """

    id: str
    event: str
    created: str
    reason: str
    job: ToldJob | None
    verdict: VerdictTold | None


class Try(TypedDict):
    """One time that a delivery was sent. `status`: HTTP's, or null where no answer came."""

    at: str
    seconds: float
    status: int | None
    words: str


class EmailSetting(TypedDict):
    """Of which states one is mailed: of a project's jobs, or of one's own in any project where `project` is null."""

    project: str | None
    states: list[str]


class EmailSettings(TypedDict):
    """What a person is mailed of. `email`: where to, null where the account has no address; `sends`: whether this board
    sends mail at all."""

    email: str | None
    sends: bool
    wishes: list[EmailSetting]


class EndEmail(TypedDict):
    """Whether one is mailed when a job has ended. `email`, `sends`: as `MailsTold` has them."""

    asked: bool
    email: str | None
    sends: bool


class WebhookDetail(TypedDict):
    """A webhook, without its secret. `waiting`: deliveries on their way. `silent`: why it is told of nothing though
    it is active, "" where it is told."""

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
    """With the secret, which is shown here and never again."""

    secret: str


class WebhookDelivery(TypedDict):
    """A message to a webhook. `due`: when it is tried next, null where it is over."""

    id: str
    event: str
    job: str
    created: str
    outcome: str
    due: str | None
    tries: list[Try]
