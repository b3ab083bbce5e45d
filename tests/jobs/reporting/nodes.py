"""Send the reports of a node of an external run."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgpack
from django.contrib.auth.models import User
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import Job, Member
from tests.jobs.conftest import report

Api = Callable[[User | None], APIClient]
CLAIM = "the-secret-of-this-process"


class Node:
    """Send the reports of one node of an external run."""

    def __init__(self, run: str, token: str, node: int = 0, claim: str = CLAIM, attempt: int = 1) -> None:
        self.run, self.node, self.attempt = run, node, attempt
        self.client = APIClient()
        self.headers = {"HTTP_AUTHORIZATION": f"Run {token}", "HTTP_MESHBOARD_CLAIM": claim}
        self.claim = claim

    def join(self, name: str = "", **secure: Any) -> Any:
        body = {"node": self.node, "name": name or f"gpu-{self.node}", "claim": self.claim}
        path = f"/api/v1/runs/{self.run}/{self.attempt}/members"
        return self.client.post(path, body, format="json", **{**self.headers, **secure})

    def batch(self, number: int = 0, rank: int = 0, told: Any = None, **changes: Any) -> Any:
        item = {"kind": "phase", "rank": rank, "time": 1.0, "phase": "step"}
        whole = {"v": 1, "job": self.run, "attempt": self.attempt, "time": 1.0, "items": [item], **changes}
        return self._send(f"batches?n={number}", msgpack.packb(whole) if told is None else told)

    def report(self, state: str = "running", outcome: str | None = None, **changes: Any) -> Any:
        return self.raw_report(report(self.run, self.attempt, state, outcome, slots=[], **changes))

    def raw_report(self, told: Any, **headers: Any) -> Any:
        return self._send("report", told if isinstance(told, bytes) else msgpack.packb(told), **headers)

    def _send(self, path: str, body: bytes, **headers: Any) -> Any:
        address = f"/api/v1/runs/{self.run}/{self.attempt}/members/{self.node}/{path}"
        return self.client.post(address, body, content_type="application/msgpack", **{**self.headers, **headers})


def drop_time(answer: Any) -> Any:
    """Return a response without the time of the board."""
    told = answer.json()
    assert abs(told.pop("now") - time.time()) < 60
    return told


def get_job(node: Node) -> Job:
    return Job.objects.get(id=node.run)


def list_changes(node: Node) -> list[tuple[str, str]]:
    return [(change.status, change.reason) for change in get_job(node).history.all()]


def fall_silent(node: Node, seconds: float = 31.0) -> None:
    Member.objects.filter(attempt__job_id=node.run).update(heard=timezone.now() - timedelta(seconds=seconds))
