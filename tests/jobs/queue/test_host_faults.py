"""Jobs whose host fails stay in the queue, and a host that fails several times closes."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from jobs.models import Attempt, Delivery, Host, Job, Member, StateChange, Status, Webhook
from jobs.people.notifications.mail import build_mail
from jobs.people.notifications.outbox import may_receive
from jobs.queue.attempt_completion import MAX_FAULTS_IN_ROW, MAX_RANK_FAULTS, end_member
from jobs.queue.hosts.presentation import get_contact_state
from jobs.queue.inbound.event_handlers import handle_event
from jobs.queue.scheduling.placement import plan_pass
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.scheduling.states import HostState
from tests.jobs.conftest import make_member
from tests.jobs.queue.scheduling_cases import host as build_host
from tests.jobs.queue.scheduling_cases import job as build_job
from tests.jobs.queue.scheduling_cases import places

MakeHost = Callable[..., Host]
DISK_FULL = "Not started on host-a: the disk is full"


@pytest.fixture
def job(owner: User) -> Job:
    spec = {"name": "x", "retry": {"max_attempts": 2}}
    return Job.objects.create(owner=owner, name="x", kind="train", device="cpu", num_slots=1, spec=spec, estimate={})


def end_attempt(job: Job, host: Host, host_fault: str | None = None, outcome: str = "failed") -> Job:
    """Start the current attempt of the job on the host, and end it with a report."""
    job.refresh_from_db()
    Job.objects.filter(id=job.id).update(status=Status.STARTING)
    member = make_member(Attempt.objects.create(job=job, number=job.attempt), host)
    exit: Any = {
        "v": 1, "job": job.id, "attempt": job.attempt, "outcome": outcome, "reason": DISK_FULL, "exit_code": None,
        "rank": None, "signal": None, "log_tail": [], "started": 1.0, "finished": 2.0, "summary": None,
    }  # fmt: skip
    if host_fault:
        exit["host_fault"] = host_fault
    with transaction.atomic():
        end_member(Member.objects.select_related("attempt__job").get(pk=member.pk), exit)
    job.refresh_from_db()
    return job


def test_failed_launch_counts_no_attempt(job: Job, make_host: MakeHost) -> None:
    host = make_host()
    for number in range(1, 6):
        end_attempt(job, host, "launch")
        assert (job.status, job.attempt) == (Status.QUEUED, number + 1)
    assert not StateChange.objects.filter(job=job, status=Status.FAILED).exists()
    assert DISK_FULL in StateChange.objects.filter(job=job).last().reason
    end_attempt(job, host)
    assert job.status == Status.QUEUED, "the own failure is retried once, as the spec asks"
    end_attempt(job, host)
    assert job.status == Status.FAILED


def test_own_failure_is_not_retried_by_default(job: Job, make_host: MakeHost) -> None:
    Job.objects.filter(id=job.id).update(spec={"name": "x"})
    assert end_attempt(job, make_host()).status == Status.FAILED


@pytest.mark.parametrize("fault", ["ranks", "restart"])
def test_faults_that_a_job_can_cause_are_limited(job: Job, make_host: MakeHost, fault: str) -> None:
    """A script can print any text, or exhaust its host, so it must not run forever."""
    Job.objects.filter(id=job.id).update(spec={"name": "x"})
    host = make_host()
    for _ in range(MAX_RANK_FAULTS):
        assert end_attempt(job, host, fault).status == Status.QUEUED
    assert end_attempt(job, host, fault).status == Status.FAILED
    host.refresh_from_db()
    assert get_contact_state(host) == "connected", "the text of a job closes no host"


def test_host_closes_after_faults_in_a_row(job: Job, make_host: MakeHost) -> None:
    host = make_host()
    for _ in range(MAX_FAULTS_IN_ROW - 1):
        end_attempt(job, host, "launch")
    end_attempt(job, host, outcome="failed")
    for _ in range(MAX_FAULTS_IN_ROW - 1):
        Job.objects.filter(id=job.id).update(status=Status.QUEUED)
        end_attempt(job, host, "launch")
    host.refresh_from_db()
    assert get_contact_state(host) == "connected", "another end is between the faults"
    end_attempt(job, host, "launch")
    host.refresh_from_db()
    assert get_contact_state(host) == "sick"
    assert DISK_FULL in host.get_problem()
    assert schedule() == 0
    job.refresh_from_db()
    assert job.wait_reason == "Every CPU host is closed, because launches on the host would fail."
    Host.objects.update(closed_until=timezone.now() - timedelta(seconds=1))
    assert schedule() == 1, "the next launch is the probe"


def test_host_with_a_failed_health_check_takes_no_jobs(job: Job, make_host: MakeHost) -> None:
    make_host()
    Host.objects.update(problem="The disk is full.")
    assert not Host.objects.accepting_jobs().exists()
    assert schedule() == 0
    Host.objects.update(problem="")
    assert schedule() == 1


def test_successful_health_check_opens_a_host(job: Job, make_host: MakeHost) -> None:
    """The launches failed because of a full disk, and then the disk has space again."""
    host = make_host()
    for sequence, problem in enumerate(["The disk is full.", ""], 1):
        send_heartbeat(host, sequence, problem)
        host.refresh_from_db()
        assert get_contact_state(host) == ("sick" if problem else "connected")
        if problem:
            for _ in range(MAX_FAULTS_IN_ROW):
                end_attempt(job, host, "launch")


@pytest.fixture
def admin_with_mail(staff: User, settings: Any) -> User:
    settings.EMAIL_HOST, settings.BOARD_URL = "mail.example", "https://board.example"
    User.objects.filter(pk=staff.pk).update(email="staff@people.example", is_superuser=True)
    return User.objects.get(pk=staff.pk)


def list_mails() -> list[str]:
    return [build_mail(mail).subject for mail in Delivery.objects.order_by("id").select_related("person")]


def send_heartbeat(host: Host, sequence: int, problem: str = "") -> None:
    event: Any = {
        "kind": "host", "v": 1, "host": host.name, "boot_id": "b", "incarnation": "i", "began": 0.5, "time": 1.0,
        "sequence": sequence, "slots": 4, "device": "cpu", "device_name": "test", "memory_bytes": 1, "attempts": [],
    }  # fmt: skip
    handle_event(event | ({"problem": problem} if problem else {}), "1000-0")


def test_staff_get_a_mail_when_a_host_becomes_sick_and_when_it_opens(
    admin_with_mail: User, stranger: User, make_host: MakeHost
) -> None:
    User.objects.filter(pk=stranger.pk).update(email="stranger@people.example")
    host = make_host()
    for sequence, problem in enumerate(
        ["The disk is full.", "The disk has 1 free byte.", "", "The disk is full.", ""], 1
    ):
        send_heartbeat(host, sequence, problem)
    assert list_mails() == ["Host host-a is sick", "Host host-a can start jobs again"], "one per state in 10 minutes"
    first = Delivery.objects.order_by("id").select_related("person")[0]
    text = build_mail(first).text
    assert "Reason: The disk is full." in text
    assert "https://board.example/hosts/host-a/" in text
    assert may_receive(first)
    User.objects.update(is_staff=False, is_superuser=False)
    assert not may_receive(Delivery.objects.select_related("person").get(pk=first.pk))


def test_webhooks_of_staff_report_hosts(staff: User, stranger: User, make_host: MakeHost) -> None:
    User.objects.filter(pk=staff.pk).update(is_superuser=True)
    cases: list[tuple[User, dict[str, Any]]] = [
        (staff, {}), (stranger, {}), (staff, {"states": ["failed"]}), (staff, {"active": False}),
    ]  # fmt: skip
    for owner, values in cases:
        Webhook.objects.create(project="default", owner_id=owner.pk, url="https://x", everybody=True, **values)
    host = make_host()
    for sequence, problem in enumerate(["The disk is full.", "The disk has 1 free byte.", ""], 1):
        send_heartbeat(host, sequence, problem)
    deliveries = Delivery.objects.order_by("id")
    bodies = [json.loads(delivery.body) for delivery in deliveries]
    assert [(body["event"], body["host"], body["problem"]) for body in bodies] == [
        ("host.state", "host-a", "The disk is full."),
        ("host.state", "host-a", ""),
    ]
    assert {delivery.webhook for delivery in deliveries} == {Webhook.objects.get(owner=staff, states=[], active=True)}
    assert [body["id"] for body in bodies] == [delivery.key for delivery in deliveries]


def test_staff_get_a_mail_when_faults_close_a_host(job: Job, admin_with_mail: User, make_host: MakeHost) -> None:
    host = make_host()
    for _ in range(MAX_FAULTS_IN_ROW + 1):
        end_attempt(job, host, "launch")
    assert list_mails() == ["Host host-a is sick"]
    assert DISK_FULL in build_mail(Delivery.objects.select_related("person").get()).text
    end_attempt(job, host)
    assert list_mails() == ["Host host-a is sick", "Host host-a can start jobs again"]


def test_job_goes_to_another_host(job: Job, make_host: MakeHost) -> None:
    bad, _ = make_host("host-a"), make_host("host-b")
    end_attempt(job, bad, "ranks")
    assert schedule() == 1
    assert Member.objects.get(attempt__job=job, attempt__number=2).host_name == "host-b"


def test_faulty_host_is_used_if_no_other_fits() -> None:
    wary = build_job("wary", faulty_hosts=frozenset({"host-a"}))
    one: HostState = build_host("host-a", 4)
    assert places(plan_pass([wary], [one, build_host("host-b", 8)])) == {"wary": "host-b"}
    assert places(plan_pass([wary], [one])) == {"wary": "host-a"}
    wide = build_job("wide", 4, faulty_hosts=frozenset({"host-a"}))
    assert places(plan_pass([wide], [one, build_host("host-b", 2)])) == {"wide": "host-a"}
