"""The job page of a queued job: position, reason, estimated start, and next action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib.auth.models import User
from django.test import Client

from jobs.models import Host, Job, QueueState
from jobs.queue import actions
from jobs.queue.scheduling.scheduler import schedule
from tests.jobs.queue.test_scheduler import busy

SPEC: dict[str, Any] = {"name": "waits", "model": {"preset": "gpt-tiny"}, "layout": {"dp": 4}}


def wait_of(client: Client, job: Job) -> Any:
    return client.get(f"/jobs/{job.id}/?part=waiting").json()


def test_queued_job_shows_position_reason_and_advice(
    owner: User, stranger: User, client: Client, make_host: Callable[..., Host]
) -> None:
    busy(make_host(), owner, 0, 1, 2, 3)
    first, second = (actions.submit(owner, {**SPEC, "name": name})[0] for name in ("first", "second"))
    schedule()
    client.force_login(owner)
    shown = wait_of(client, second)
    assert (shown["place"], shown["total"]) == (2, 2)
    assert shown["reason"]
    assert shown["starts"] is None
    assert shown["next"] == "Open the queue to see the jobs ahead of this job."
    page = client.get(f"/jobs/{second.id}/").content.decode()
    assert "2 of 2 in the queue" in page
    assert 'data-nothing="queued"' in page
    QueueState.objects.update_or_create(defaults={"paused": True})
    assert wait_of(client, first)["next"] == "Ask an administrator to resume the queue."
    client.force_login(stranger)
    assert client.get(f"/jobs/{first.id}/?part=waiting").status_code == 404


def test_unplaceable_job_shows_advice(owner: User, client: Client, make_host: Callable[..., Host]) -> None:
    script, _ = actions.submit(owner, {"kind": "script", "script": {"path": "train.py"}, "layout": {"dp": 2}})
    job, _ = actions.submit(owner, SPEC)
    client.force_login(owner)
    assert wait_of(client, job)["next"] == "Add a host with enough slots for the job, or find a smaller layout."
    assert wait_of(client, script)["next"] == "Add a host with enough slots for the job, or use fewer ranks."
    Host.objects.filter(pk=make_host().pk).update(drained=True)
    assert wait_of(client, job)["next"] == "Undrain a host, or add a host with enough slots for the job."
    Job.objects.filter(id=job.id).update(held=True)
    assert wait_of(client, job)["next"] == "Ask an operator of the project to release the job."
