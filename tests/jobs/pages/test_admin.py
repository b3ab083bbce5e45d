"""The admin: staff control the queue, and no status is editable."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin import site
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from jobs.models import DEFAULT_PROJECT, AuditEntry, DeadLetter, Host, Job, Pool, Project, Reservation, Status
from jobs.queue import actions
from jobs.queue.inbound import event_handlers
from jobs.queue.scheduling.scheduler import schedule
from tests.planner.wrong_specs import GOOD

JOBS, HOSTS = "/admin/jobs/job/", "/admin/jobs/host/"


@pytest.fixture
def admin(client: Any, db: None) -> Any:
    client.force_login(User.objects.create_superuser("root", password="root-password"))
    return client


@pytest.fixture
def job(owner: User) -> Job:
    made, _ = actions.submit(owner, GOOD)
    return made


def act(client: Any, page: str, action: str, *keys: Any) -> str:
    answer = client.post(page, {"action": action, "_selected_action": keys}, follow=True)
    assert answer.status_code == 200
    return str(answer.content.decode())


def test_admin_cancels_and_requeues(admin: Any, job: Job) -> None:
    assert "1 of 1 cancelled" in act(admin, JOBS, "cancel", job.id)
    job.refresh_from_db()
    assert job.status == Status.CANCELLED
    assert "1 of 1 queued again" in act(admin, JOBS, "requeue", job.id)
    job.refresh_from_db()
    assert (job.status, job.attempt) == (Status.QUEUED, 2)
    assert "0 of 1 queued again" in act(admin, JOBS, "requeue", job.id)


def test_admin_edits_the_priority_only(admin: Any, job: Job) -> None:
    page = f"{JOBS}{job.id}/change/"
    form = {"priority": "7", "status": "succeeded", "name": "renamed", "_save": "Save"}
    for inline in ("history", "attempts"):
        form |= {f"{inline}-TOTAL_FORMS": "0", f"{inline}-INITIAL_FORMS": "0"}
    assert admin.post(page, form).status_code == 302
    job.refresh_from_db()
    assert (job.priority, job.status, job.name) == (7, Status.QUEUED, "good")


@pytest.mark.parametrize(
    "address",
    [
        "search/?s=job&page=x",
        "search/?s=job&page=99",
        "axes/accesslog/?attempt_time__year=99999999999&attempt_time__month=99",
        "auth/user/?date_joined__year=99999",
        "jobs/reservation/add/?starts=x&pool=%ff",
    ],
)
def test_invalid_admin_address_is_a_client_error(admin: Any, job: Job, address: str) -> None:
    admin.raise_request_exception = False
    answer = admin.get(f"/admin/{address}", follow=True)
    assert answer.status_code in (200, 400, 404), address


def test_deeply_nested_form_is_a_client_error(admin: Any) -> None:
    admin.raise_request_exception = False
    answer = admin.post("/admin/jobs/pool/add/", {"name": "deep", "labels": "[" * 3000})
    assert answer.status_code in (200, 400)
    assert not Pool.objects.exists()


def test_default_project_cannot_be_deleted(admin: Any, db: None) -> None:
    default, other = Project.objects.get_or_create(name=DEFAULT_PROJECT)[0], Project.objects.create(name="other")
    assert admin.post(f"/admin/jobs/project/{default.pk}/delete/", {"post": "yes"}).status_code == 403
    act(admin, "/admin/jobs/project/", "delete_selected", default.pk)
    admin.post("/admin/jobs/project/", {"action": "delete_selected", "_selected_action": [default.pk], "post": "yes"})
    assert Project.objects.filter(pk=default.pk).exists()
    assert admin.post(f"/admin/jobs/project/{other.pk}/delete/", {"post": "yes"}).status_code == 302


def test_job_with_slots_cannot_be_deleted(admin: Any, job: Job, make_host: Callable[..., Host]) -> None:
    make_host()
    schedule()
    assert admin.post(f"{JOBS}{job.id}/delete/", {"post": "yes"}).status_code == 403
    assert Job.objects.filter(id=job.id).exists()


def test_admin_drains_and_undrains_hosts(admin: Any, make_host: Callable[..., Host]) -> None:
    host = make_host()
    assert "1 drained" in act(admin, HOSTS, "drain", host.pk)
    host.refresh_from_db()
    assert host.drained
    act(admin, HOSTS, "undrain", host.pk)
    host.refresh_from_db()
    assert not host.drained
    assert admin.get(f"{HOSTS}add/").status_code == 403


def test_admin_is_for_staff_only(client: Any, owner: User, job: Job) -> None:
    client.force_login(owner)
    for page in (JOBS, HOSTS, f"{JOBS}{job.id}/change/"):
        assert client.get(page).status_code == 302
    assert client.post(JOBS, {"action": "cancel", "_selected_action": [job.id]}).status_code == 302
    job.refresh_from_db()
    assert job.status == Status.QUEUED


def test_admin_marks_silent_hosts_as_lost_after_confirmation(
    admin: Any, job: Job, make_host: Callable[..., Host]
) -> None:
    host = make_host()
    schedule()
    requests = act(admin, HOSTS, "give_up", host.pk)
    assert f"good ({job.id}), attempt 1, on host-a" in requests
    confirmed = {"action": "give_up", "_selected_action": [host.pk], "confirmed": "yes"}
    assert "had contact at" in admin.post(HOSTS, confirmed, follow=True).content.decode()
    Host.objects.update(last_seen=timezone.now() - timedelta(minutes=1))
    assert "and 1 attempt as lost" in admin.post(HOSTS, confirmed, follow=True).content.decode()
    job.refresh_from_db()
    assert job.status == Status.LOST


def test_dead_letters_are_read_only(admin: Any, make_host: Callable[..., Host]) -> None:
    make_host()
    letter = DeadLetter.objects.create(entry="1-0", sender="host-a", reason="slots: too few", body="{}", num_bytes=2)
    page = "/admin/jobs/deadletter/"
    assert "slots: too few" in admin.get(page).content.decode()
    assert admin.get(f"{page}{letter.pk}/change/").status_code == 200
    assert admin.post(f"{page}{letter.pk}/change/", {"reason": "other"}).status_code == 403
    assert admin.post(f"{page}{letter.pk}/delete/", {"post": "yes"}).status_code == 403
    assert admin.get(f"{page}add/").status_code == 403
    assert "events that failed" in admin.get(HOSTS).content.decode().lower()


def test_counts_stored_dead_letters(
    admin: Any, make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_host()
    monkeypatch.setattr(event_handlers, "MAX_DEAD_LETTERS_PER_SENDER", 3)
    for count, shown in enumerate(["1", "2", "3 or more", "3 or more"], 1):
        event_handlers.store_dead_letter(f"{count}-0", b"", ValueError("slots"), "host-a")
        assert event_handlers.count_dead_letters(["host-a"]) == {"host-a": shown}
        assert ("or more" in admin.get(HOSTS).content.decode()) == (count >= 3)
    assert event_handlers.count_dead_letters(["host-b"]) == {"host-b": "0"}


def test_host_list_of_the_admin_has_search_and_few_queries(admin: Any, make_host: Callable[..., Host]) -> None:
    first = make_host()
    for n in range(30):
        make_host(f"rack-{n}")
    event_handlers.store_dead_letter("1-0", b"", ValueError("slots"), first.name)
    with CaptureQueriesContext(connection) as requests:
        page = admin.get(HOSTS).content.decode()
    assert len(requests) < 15
    assert page.count("field-free") == 31
    assert admin.get(f"{HOSTS}?q=rack-2").content.decode().count("field-free") == 11
    form = admin.get("/admin/jobs/reservation/add/").content.decode()
    assert "rack-7" not in form, "hosts are found as one types"
    found = admin.get("/admin/autocomplete/?app_label=jobs&model_name=reservation&field_name=host&term=rack-7").json()
    assert [one["text"] for one in found["results"]] == ["rack-7"]


def test_filters_jobs_by_one_of_many_users(admin: Any, job: Job) -> None:
    User.objects.bulk_create(User(username=f"person-{n}", password="!") for n in range(2000))
    other, _ = actions.submit(User.objects.get(username="person-7"), GOOD)
    with CaptureQueriesContext(connection) as requests:
        page = admin.get(JOBS).content.decode()
    assert len(requests) < 15
    assert len(page) < 200_000
    assert "person-8" not in page, "people are found as one types"
    assert 'data-placeholder="Any owner"' in page, "what is empty has a name all the same"
    found = admin.get("/admin/autocomplete/?app_label=jobs&model_name=job&field_name=owner&term=person-1999").json()
    assert [one["text"] for one in found["results"]] == ["person-1999"]
    listed = admin.get(f"{JOBS}?owner__id__exact={other.owner_id}").content.decode()
    assert (str(other.id) in listed, str(job.id) in listed) == (True, False)
    assert admin.get(f"{JOBS}?owner__id__exact=nobody", follow=True).status_code == 200
    every = admin.get(f"{JOBS}?owner__id__exact=&status__exact=queued").content.decode()
    assert (str(other.id) in every, str(job.id) in every) == (True, True)


def test_admin_creates_audited_projects_pools_and_reservations(admin: Any) -> None:
    answer = admin.post("/admin/jobs/project/add/", {"name": "vision", "slots": "8", "weight": "2"}, follow=True)
    assert Project.objects.get(name="vision").slots == 8, answer.content.decode()
    admin.post("/admin/jobs/pool/add/", {"name": "big", "labels": '["a100"]'}, follow=True)
    pool, project = Pool.objects.get(), Project.objects.get(name="vision")
    admin.post(f"/admin/jobs/project/{project.pk}/change/", {"slots": "4", "weight": "2"}, follow=True)
    when = {"starts_0": "2026-12-01", "starts_1": "08:00", "ends_0": "2026-12-02", "ends_1": "08:00"}
    both = {"project": project.pk, "pool": pool.pk, "host": "", **when}
    wrong = {**both, "ends_0": "2026-11-30"}
    refused = admin.post("/admin/jobs/reservation/add/", wrong).content.decode()
    assert "The end of the reservation needs to be later than its start." in refused
    neither = admin.post("/admin/jobs/reservation/add/", {**both, "pool": ""}).content.decode()
    assert "Set either a pool or a host for the reservation" in neither
    admin.post("/admin/jobs/reservation/add/", both, follow=True)
    assert Reservation.objects.get().pool == pool
    admin.post(f"/admin/jobs/pool/{pool.pk}/delete/", {"post": "yes"}, follow=True)
    shown = AuditEntry.objects.order_by("id").values_list("who", "what", "kind", "name")
    assert [row[1:3] for row in shown] == [
        ("add", "project"),
        ("add", "pool"),
        ("edit", "project"),
        ("add", "reservation"),
        ("delete", "pool"),
    ]
    edit = AuditEntry.objects.get(what="edit")
    assert (edit.who, edit.before["slots"], edit.after["slots"]) == ("root", 8, 4)
    for labels in ('["no spaces please"]', '{"a": 1}', '"text"'):
        admin.post("/admin/jobs/pool/add/", {"name": "wrong", "labels": labels}, follow=True)
    assert not Pool.objects.filter(name="wrong").exists()


def test_priority_change_is_audited(admin: Any, job: Job) -> None:
    management = {"history": 1, "attempts": 0}
    page: dict[str, Any] = {"priority": 7}
    for name, count in management.items():
        page |= {f"{name}-TOTAL_FORMS": count, f"{name}-INITIAL_FORMS": count}
    admin.post(f"{JOBS}{job.id}/change/", page, follow=True)
    assert Job.objects.get(id=job.id).priority == 7
    entry = AuditEntry.objects.get(what="priority")
    assert (entry.kind, entry.name, entry.before, entry.after) == ("job", job.id, 0, 7)


@pytest.mark.parametrize("name", ["\u3164", "\u115f\u1160"])
def test_rejects_unreadable_user_names(admin: Any, name: str) -> None:
    page = "/admin/auth/user/add/"
    new = {"username": name, "password1": "quite-another-1", "password2": "quite-another-1", "usable_password": "true"}
    assert "The name has no visible character." in admin.post(page, new).content.decode()
    assert User.objects.count() == 1
    assert admin.post(page, {**new, "username": "名前"}).status_code == 302
    assert User.objects.filter(username="名前").exists()


def test_objects_with_old_names_can_be_edited(admin: Any) -> None:
    made = User.objects.create_user("ann", last_name="a\u202eb")
    page = f"/admin/auth/user/{made.pk}/change/"
    joined = {"date_joined_0": "2026-11-01", "date_joined_1": "08:00:00"}
    form = {"username": "ann", "first_name": "", "last_name": "a\u202eb", "email": "", "is_active": "on", **joined}
    turned = admin.post(page, {**form, "first_name": "b\u2066"}).content.decode()
    assert turned.count("changes the direction of the text") == 1
    assert (
        "The name contains the character U+2066, which changes the direction of the text. Remove the character."
        in turned
    )
    assert admin.post(page, {**form, "first_name": "Läufer"}).status_code == 302
    made.refresh_from_db()
    assert (made.first_name, made.last_name) == ("Läufer", "a\u202eb")


def test_rejects_invalid_project_names(admin: Any) -> None:
    for name in ("a\u202eb", "\u3164", "n\u0430me"):
        shown = admin.post("/admin/jobs/project/add/", {"name": name, "weight": "1"}).content.decode()
        assert "Use letters, digits, and . _ = -, with a letter or digit first." in shown
    assert not Project.objects.filter(name__in=("a\u202eb", "\u3164", "n\u0430me")).exists()


def test_menu_marks_only_the_open_page(admin: Any) -> None:
    request = admin.get("/admin/jobs/project/").wsgi_request
    groups = site.get_sidebar_list(request)  # type: ignore[attr-defined]
    assert [str(item["title"]) for group in groups for item in group["items"] if item["active"]] == ["Projects"]
