"""Offer of a smaller layout after the loss of hosts, and its start."""

from __future__ import annotations

import queue
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from jobs.models import Attempt, Host, Job, Pool, Status
from jobs.planning import planner_processes
from jobs.planning.auto_layout import NoOfferError, find_smaller_layout
from jobs.queue import actions, lifecycle
from tests.planner.wrong_specs import GOOD

SPEC = {**GOOD, "layout": {"dp": 2, "tp": 2, "pp": 2}, "train": {"global_batch": 8, "micro_batches": 2}}


@pytest.fixture
def stranded(owner: User, make_host: Callable[..., Host]) -> Job:
    """Return a job that was lost with one of two hosts, after a checkpoint."""
    for name in ("host-a", "host-b"):
        make_host(name)
    job, _ = actions.submit(owner, SPEC)
    Attempt.objects.create(job=job, number=1, checkpoint=f"{job.id}/1/step-00000020", ended=timezone.now())
    assert lifecycle.start_jobs({job.id: (1, "placed")})
    assert lifecycle.change_status(job.id, 1, Status.LOST, "host host-b was given up")
    Host.objects.filter(name="host-b").update(last_seen=timezone.now() - timedelta(hours=1))
    job.refresh_from_db()
    return job


def test_offers_a_smaller_layout_with_speed_and_checkpoint(stranded: Job) -> None:
    offer = find_smaller_layout(stranded)
    assert "8 ranks" in offer["why"] or "= 8" in offer["why"]
    layout = offer["layout"]
    assert layout["dp"] * layout["pp"] * layout["tp"] * layout["cp"] == offer["ranks"] <= 4
    assert offer["step_s"] > 0
    assert offer["was_step_s"] == stranded.estimate["time"]["step_s"]
    assert offer["checkpoint"] == f"{stranded.id}/1/step-00000020"


def test_queues_a_new_attempt_with_the_smaller_layout(stranded: Job) -> None:
    offer = find_smaller_layout(stranded)
    assert actions.requeue_smaller(stranded, "owner")
    before = stranded.spec
    stranded.refresh_from_db()
    assert (stranded.status, stranded.attempt, stranded.num_slots) == ("queued", 2, offer["ranks"])
    assert stranded.spec["layout"] == offer["layout"]
    assert stranded.spec["train"] == {**before["train"], "micro_batches": offer["micro_batches"]}
    assert stranded.estimate["axes"]["dp"] == offer["layout"]["dp"]
    assert offer["words"] in stranded.history.last().reason
    with pytest.raises(NoOfferError, match="The current layout already fits"):
        find_smaller_layout(stranded)


def test_page_offers_a_smaller_layout_to_a_waiting_job(stranded: Job, owner: User, client: Client) -> None:
    client.force_login(owner)

    def is_offered() -> bool:
        panel = client.get(f"/jobs/{stranded.id}/").content.decode().partition('id="smaller"')[2].partition(">")[0]
        return "hidden" not in panel

    assert is_offered(), "it was lost"
    assert actions.requeue(stranded, "owner")
    assert is_offered(), "half of its hosts are gone"
    Host.objects.update(last_seen=timezone.now())
    assert not is_offered(), "there is room: it waits for its turn"
    stranded.refresh_from_db()
    actions.cancel(stranded, "owner")
    assert not is_offered()


def test_page_reports_busy_planners(
    stranded: Job, owner: User, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_processes, "_slots", queue.LifoQueue())
    monkeypatch.setattr(planner_processes, "MAX_QUEUE_S", 0.01)
    client.force_login(owner)
    answer = client.post(f"/jobs/{stranded.id}/smaller/")
    assert (answer.status_code, "planner processes are busy" in answer.content.decode()) == (503, True)


def test_fitting_or_running_job_gets_no_offer(stranded: Job) -> None:
    Host.objects.update(last_seen=timezone.now())
    with pytest.raises(NoOfferError, match="The current layout already fits the available hosts"):
        find_smaller_layout(stranded)
    assert actions.requeue(stranded, "owner")
    stranded.refresh_from_db()
    assert lifecycle.start_jobs({stranded.id: (2, "placed")})
    stranded.refresh_from_db()
    with pytest.raises(NoOfferError, match="`status` is starting"):
        actions.requeue_smaller(stranded, "owner")


def test_offer_ignores_drained_hosts(stranded: Job) -> None:
    Host.objects.update(last_seen=timezone.now())
    Host.objects.filter(name="host-b").update(drained=True)
    assert find_smaller_layout(stranded)["ranks"] <= 4


def test_no_offer_without_hosts(stranded: Job) -> None:
    Host.objects.update(last_seen=timezone.now() - timedelta(hours=1))
    with pytest.raises(NoOfferError):
        find_smaller_layout(stranded)


def test_only_users_with_rights_run_the_smaller_layout(stranded: Job, client: Client) -> None:
    viewer = User.objects.create_user("viewer", is_staff=True)
    client.force_login(viewer, backend="django.contrib.auth.backends.ModelBackend")
    assert client.get(f"/api/v1/jobs/{stranded.id}/smaller").json()["ranks"] <= 4
    assert client.post(f"/jobs/{stranded.id}/smaller/").status_code in (403, 404)
    client.force_login(stranded.owner, backend="django.contrib.auth.backends.ModelBackend")
    page = client.get(f"/jobs/{stranded.id}/").content.decode()
    assert "Smaller layout" in page
    assert client.post(f"/jobs/{stranded.id}/smaller/").status_code == 302
    stranded.refresh_from_db()
    assert (stranded.status, stranded.attempt) == ("queued", 2)
    assert client.get(f"/api/v1/jobs/{stranded.id}/smaller").status_code == 409


def test_slurm_jobs_get_no_offer(stranded: Job) -> None:
    Job.objects.update(spec={**stranded.spec, "resources": {**stranded.spec["resources"], "engine": "slurm"}})
    stranded.refresh_from_db()
    with pytest.raises(NoOfferError, match="slurm, and the free Slurm nodes are unknown") as refused:
        find_smaller_layout(stranded)
    assert refused.value.field == "resources.engine"


@pytest.mark.parametrize("asked", [{"labels": ["fast"]}, {"pool": "fast-ones"}])
def test_offer_respects_required_labels(stranded: Job, make_host: Callable[..., Host], asked: dict[str, Any]) -> None:
    """Offers must not count hosts on which the scheduler would not place the job."""
    Pool.objects.create(name="fast-ones", labels=["fast"])
    stranded.spec = {**stranded.spec, "resources": asked}
    stranded.save()
    make_host("host-c", slots=8)
    with pytest.raises(NoOfferError, match="No CPU host with the labels fast accepts jobs now"):
        find_smaller_layout(stranded)
    Host.objects.filter(name="host-a").update(labels=["fast"])
    assert find_smaller_layout(stranded)["ranks"] <= 4
