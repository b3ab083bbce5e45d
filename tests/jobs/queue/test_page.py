"""The queue on its page and over REST, with the actions of staff."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone
from rest_framework.test import APIClient

from jobs.models import AuditEntry, Host, Job, Pool, StateChange, Status
from jobs.queue.scheduling.placement import (
    MAX_FORECAST_JOBS,
    RunningAttempt,
    decide,
    forecast,
    plan_pass,
)
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.scheduling.states import Quota, Share
from jobs.queue.scheduling.waiting_reasons import put_fact_first
from tests.jobs.queue.scheduling_cases import host, job
from tests.jobs.queue.test_scheduler import busy, queued

MakeHost = Callable[..., Host]
SPEC = {"kind": "train", "name": "x", "layout": {"dp": 1, "pp": 1, "tp": 1, "zero": 0, "sequence_parallel": False}}


def waiting(owner: User, *names: str, **fields: Any) -> list[Job]:
    return [queued(owner, name=name, spec={**SPEC, "train": {"steps": 10}}, **fields)[0] for name in names]


def test_predicts_starts_from_ends_of_running_jobs() -> None:
    running = [
        RunningAttempt("first", "default", (Share("host-a", (0, 1)),), 60.0),
        RunningAttempt("second", "default", (Share("host-a", (2, 3)),), 200.0),
        RunningAttempt("unknown", "default", (Share("host-b", (0, 1, 2, 3)),), None),
    ]
    queue = [job("large", 4, age=3), job("next", 2, age=2), job("late", 4, age=1)]
    hosts = [host("host-a", 4, free=0), host("host-b", 4, free=0)]
    told = forecast(queue, hosts, running, {"large": 100.0, "next": 50.0}, {})
    assert told == {"large": (200.0, "second"), "next": (300.0, "large"), "late": (350.0, "next")}
    del told["late"]
    assert forecast(queue, hosts, running, {"large": 100.0}, {}) == told, "the end of `next` is unknown"
    quotas = {"default": Quota(4, 8)}
    assert forecast(queue, hosts, running, {}, quotas) == {}, "the quota is full until an unknown end"


def test_forecasts_do_not_change_wait_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts simulate many passes, in which computing reasons would double the time."""

    def worded(*_: object) -> str:
        raise AssertionError("nobody reads this")

    monkeypatch.setattr("jobs.queue.scheduling.placement.explain_wait", worded)
    queue, hosts = [job("large", 4, age=2), job("late", 4, age=1)], [host("host-a", 4, free=0)]
    running = [RunningAttempt("first", "default", (Share("host-a", (0, 1, 2, 3)),), 60.0)]
    assert forecast(queue, hosts, running, {}, {}) == {"large": (60.0, "first")}
    assert [placement.job for placement in decide(queue, [host("host-a", 4)]).placements] == ["large"]
    with pytest.raises(AssertionError, match="nobody reads this"):
        plan_pass(queue, hosts)


def test_page_shows_all_jobs_to_staff_only(
    owner: User, stranger: User, staff: User, client: Client, make_host: MakeHost
) -> None:
    busy(make_host(), owner, 0, 1, 2, 3)
    theirs, mine = waiting(stranger, "theirs", num_slots=4)[0], waiting(owner, "mine", num_slots=4)[0]
    schedule()
    client.force_login(owner)
    page = client.get("/queue/").content.decode()
    assert "mine" in page
    assert theirs.id not in page
    assert "theirs" not in page
    assert '<td class="place" data-label="Position">2</td>' in page, "its place in the whole queue"
    client.force_login(staff)
    page = client.get("/queue/").content.decode()
    assert page.index(theirs.id) < page.index(mine.id)
    assert "Host host-a has 0 of 4 slots free." in page


def test_predicted_start_names_only_visible_jobs(
    owner: User, stranger: User, client: Client, make_host: MakeHost
) -> None:
    attempt = busy(make_host(), stranger, 0, 1, 2, 3)
    estimate = {"time": {"step_s": 6.0}}
    Job.objects.filter(id=attempt.job_id).update(
        spec={**SPEC, "train": {"steps": 10}}, estimate=estimate, name="secret"
    )
    StateChange.objects.create(job_id=attempt.job_id, attempt=1, status=Status.RUNNING)
    waiting(owner, "mine")
    client.force_login(owner)
    page = client.get("/queue/?part=rows").content.decode()
    assert "after another job ends" in page
    assert "secret" not in page
    Job.objects.filter(id=attempt.job_id).update(owner=owner)
    assert "after job &quot;secret&quot; ends" in client.get("/queue/?part=rows").content.decode()
    Job.objects.filter(id=attempt.job_id).update(status=Status.UNREACHABLE)
    assert "secret" not in client.get("/queue/?part=rows").content.decode(), "who knows when it ends"


@pytest.mark.parametrize(("step_s", "words"), [(5.0, "any moment"), (60.0, "<time")])
def test_start_within_a_minute_is_shown_as_any_moment(
    owner: User, client: Client, make_host: MakeHost, step_s: float, words: str
) -> None:
    """The page shows minutes, so the time would soon be in the past."""
    attempt = busy(make_host(), owner, 0, 1, 2, 3)
    estimate = {"time": {"step_s": step_s}}
    Job.objects.filter(id=attempt.job_id).update(spec={**SPEC, "train": {"steps": 10}}, estimate=estimate)
    StateChange.objects.create(job_id=attempt.job_id, attempt=1, status=Status.RUNNING)
    waiting(owner, "mine")
    client.force_login(owner)
    page = client.get("/queue/?part=rows").content.decode()
    left_s, start = re.findall(r'data-in-s="([^"]+)">(.*?)</span>', page)[0]
    assert 0 < float(left_s) <= 10 * step_s
    assert words in start


def test_bulk_actions_are_confirmed_and_audited(owner: User, staff: User, client: Client) -> None:
    first, second = waiting(owner, "first", "second")
    client.force_login(staff)
    asked = {"action": "hold", "job": [first.id, second.id]}
    page = client.post("/queue/act/", asked).content.decode()
    assert "Hold 2 jobs?" in page
    assert not Job.objects.filter(held=True).exists(), "it only asked"
    client.post("/queue/act/", {**asked, "confirmed": "1"}, REMOTE_ADDR="10.1.2.3")
    assert Job.objects.filter(held=True).count() == 2
    assert set(AuditEntry.objects.values_list("who", "address", "what")) == {("staff", "10.1.2.3", "hold")}
    client.post("/queue/act/", {"action": "priority", "priority": "-7", "job": [first.id], "confirmed": "1"})
    assert Job.objects.get(id=first.id).priority == -7
    for wrong in ("--5", "1_0", "5x", "100000000"):
        refused = client.post(
            "/queue/act/", {"action": "priority", "priority": wrong, "job": [first.id], "confirmed": "1"}
        )
        assert refused.status_code == 302, wrong
    assert Job.objects.get(id=first.id).priority == -7
    client.post("/queue/act/", {"action": "cancel", "job": [second.id], "confirmed": "1"})
    assert Job.objects.get(id=second.id).status == Status.CANCELLED
    page = client.get("/queue/audit/").content.decode()
    assert page.index("Canceled job") < page.index("Changed the priority of job") < page.index("Held job")


@pytest.mark.parametrize(
    ("posted", "told"),
    [
        ({"action": "hold"}, "Select jobs first."),
        ({"action": "burn", "job": ["abc"]}, "<code>action</code> is"),
        ({"action": "priority", "job": ["abc"], "priority": "high"}, "Use a whole number"),
        ({"action": "priority", "job": ["abc"], "priority": "5000"}, "Use at most 1000."),
        ({"action": "priority", "job": ["abc"], "priority": ""}, "Use a whole number"),
        ({"action": "hold", "job": ["<script>"]}, "Select jobs first."),
    ],
)
def test_invalid_action_shows_an_error(posted: dict[str, Any], told: str, staff: User, client: Client) -> None:
    client.force_login(staff)
    assert told in client.post("/queue/act/", posted, follow=True).content.decode()


@pytest.mark.parametrize("path", ["/queue/act/", "/queue/move/", "/queue/pause/"])
def test_only_staff_with_rights_change_the_queue(path: str, owner: User, viewer: User, client: Client) -> None:
    for user in (owner, viewer):
        client.force_login(user)
        assert client.post(path, "{}", content_type="application/json").status_code == 403
        assert client.get("/queue/audit/").status_code == 403


def test_what_if_lists_jobs_that_would_start(
    owner: User, staff: User, client: Client, make_host: MakeHost, api: Callable[[User], APIClient]
) -> None:
    busy(make_host(), owner, 0, 1)
    Pool.objects.create(name="shut", labels=["x"], paused=True)
    large, small = waiting(owner, "large", num_slots=4)[0], waiting(owner, "small", num_slots=2)[0]
    client.force_login(staff)
    for query, names in (
        ("slots=4", [large.id, small.id]),
        ("slots=2", [small.id]),
        (f"job={small.id}&priority=1", [small.id]),
        ("pool=shut", []),
    ):
        assert [row["id"] for row in client.get(f"/queue/?{query}").context["started"]] == names, query
        told = api(staff).get(f"/api/v1/queue/what-if?{query}")
        assert [row["id"] for row in told.json()["jobs"]] == names, query
    for query, field in (
        ("slots=many", "slots"),
        ("slots=65537", "slots"),
        ("job=none&priority=1", "job"),
        (f"job={small.id}&priority=1e9", "priority"),
        (f"job={small.id}", "priority"),
        ("priority=-1", "job"),
        ("pool=none", "pool"),
        ("pool=%00", "pool"),
    ):
        assert field in client.get(f"/queue/?{query}").context["problem"], query
        refused = api(staff).get(f"/api/v1/queue/what-if?{query}")
        assert (refused.status_code, [each["field"] for each in refused.json()["errors"]]) == (400, [field]), query
    for query, field in (("", "slots"), ("?slots=", "slots"), ("?slots=1&slots=2", "slots"), ("?slot=1", "slot")):
        refused = api(staff).get(f"/api/v1/queue/what-if{query}")
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (400, field), query
    assert api(owner).get("/api/v1/queue/what-if?slots=4").status_code == 403, "the result can show jobs of all users"


def test_moves_a_job_on_the_page_and_over_rest(
    owner: User, staff: User, client: Client, api: Callable[[User], APIClient]
) -> None:
    a, b, c = waiting(owner, "a", "b", "c")
    for number, each in enumerate((a, b, c)):
        Job.objects.filter(id=each.id).update(created=timezone.now() - timedelta(hours=9 - number))
    rest = api(staff)

    def order() -> list[str]:
        return [row["name"] for row in rest.get("/api/v1/queue").json()["jobs"]]

    assert order() == ["a", "b", "c"]
    client.force_login(staff)
    told = client.post("/queue/move/", {"job": c.id, "to": "up"}, content_type="application/json")
    assert (told.json(), order()) == ({"moved": True}, ["a", "c", "b"])
    assert rest.post(f"/api/v1/queue/jobs/{b.id}/move", {"before": a.id}, format="json").json() == {
        "moved": True,
        "reason": "",
    }
    assert order() == ["b", "a", "c"]
    (raised,) = waiting(owner, "raised")
    (ran,) = waiting(owner, "ran")
    Job.objects.filter(id=raised.id).update(priority=2)
    Job.objects.filter(id=ran.id).update(status=Status.RUNNING)
    for asked, why in (
        ({"to": "up"}, "The job already has this place in the queue."),
        ({"before": "none"}, "Job none does not exist."),
        ({"before": raised.id}, f"Job {raised.id} has priority 2, but this job has 0. Use a job of equal priority."),
        ({"before": ran.id}, f"Job {ran.id} has no place in the queue because it is running."),
    ):
        answer = rest.post(f"/api/v1/queue/jobs/{b.id}/move", asked, format="json")
        assert answer.json() == {"moved": False, "reason": why}
    for body, status in (({}, 422), ({"to": "up", "before": a.id}, 422), ({"to": "left"}, 422)):
        assert rest.post(f"/api/v1/queue/jobs/{b.id}/move", body, format="json").status_code == status
    assert rest.post("/api/v1/queue/jobs/none/move", {"to": "up"}, format="json").status_code == 404
    Job.objects.filter(id=b.id).update(status=Status.FAILED)
    assert rest.post(f"/api/v1/queue/jobs/{b.id}/move", {"to": "up"}, format="json").status_code == 409
    for broken in ("[]", "{", '{"job": 7, "to": "up"}', '{"job": "\\u0000", "to": "up"}'):
        assert client.post("/queue/move/", broken, content_type="application/json").status_code == 400


def test_rest_changes_the_queue(
    owner: User, staff: User, api: Callable[[User], APIClient], make_host: MakeHost
) -> None:
    make_host()
    Pool.objects.create(name="big", labels=["big"])
    (only,) = waiting(owner, "only")
    rest = api(staff)
    assert rest.post("/api/v1/queue/pause").json() == {"paused": True, "changed": True}
    assert rest.post("/api/v1/queue/pause").json() == {"paused": True, "changed": False}
    assert rest.get("/api/v1/queue").json()["paused"] is True
    assert rest.post("/api/v1/queue/resume").json() == {"paused": False, "changed": True}
    assert rest.post("/api/v1/pools/big/pause").json() == {"paused": True, "changed": True}
    assert rest.post("/api/v1/pools/none/pause").status_code == 404
    (ran,) = waiting(owner, "ran")
    Job.objects.filter(id=ran.id).update(status=Status.SUCCEEDED)
    for action, changed, whys in (
        ({"action": "hold"}, [only.id], ["The job is not queued because it succeeded."]),
        ({"action": "hold"}, [], ["The job is already held.", "The job is not queued because it succeeded."]),
        (
            {"action": "priority", "priority": 0},
            [],
            ["The job already has this priority.", "The job is not queued because it succeeded."],
        ),
        ({"action": "cancel"}, None, ["The job has already ended as succeeded."]),
    ):
        named = [ran.id, "none"] if changed is None else [only.id, ran.id, "none"]
        told = rest.post("/api/v1/queue/actions", {**action, "jobs": named}, format="json").json()
        assert told["changed"] == (changed or [])
        assert [each["reason"] for each in told["unchanged"]] == [*whys, "The job does not exist."]
    assert (
        rest.post("/api/v1/queue/actions", {"action": "priority", "jobs": [only.id]}, format="json").status_code == 422
    )
    (row,) = api(owner).get("/api/v1/queue").json()["jobs"]
    assert (row["place"], row["held"], row["reason"]) == (1, True, "The job is held until staff release it.")
    assert [entry["what"] for entry in rest.get("/api/v1/audit").json()] == ["hold", "pause", "resume", "pause"]
    assert rest.get("/api/v1/audit?before=0").status_code == 400
    for path in ("queue/pause", "queue/resume", "queue/actions", f"queue/jobs/{only.id}/move", "pools/big/pause"):
        assert api(owner).post(f"/api/v1/{path}", {}, format="json").status_code == 403
    assert api(owner).get("/api/v1/audit").status_code == 403


def test_page_of_an_empty_and_of_a_long_queue(owner: User, staff: User, client: Client, make_host: MakeHost) -> None:
    client.force_login(staff)
    assert "Queue is empty" in client.get("/queue/").content.decode()
    busy(make_host(), owner, 0, 1, 2, 3)
    queued(owner, 4, count=1000, spec={**SPEC, "train": {"steps": 10}})
    page = client.get("/queue/?page=10").content.decode()
    assert page.count("data-job=") == 100
    assert "901 to 1,000 of 1,000" in page
    assert MAX_FORECAST_JOBS < 1000


def test_short_reason_starts_with_the_fact() -> None:
    needs = "The job needs 4 CPU slots on one host."
    fact = "Host host-a has 0 of 4 slots free."
    assert put_fact_first(f"{needs} {fact}") == f"{fact} {needs}"
    assert put_fact_first(fact) == fact
    assert put_fact_first(needs) == needs
    assert put_fact_first("") == ""


def test_missing_estimate_of_a_start_has_a_reason(owner: User, client: Client, make_host: MakeHost) -> None:
    job = waiting(owner, "mine")[0]
    client.force_login(owner)
    assert "The time of enough free slots is not predictable." in client.get("/queue/?part=rows").content.decode()
    Job.objects.filter(id=job.id).update(held=True)
    assert "The job is held." in client.get("/queue/?part=rows").content.decode()
