"""Submit jobs to the Slurm engine without a real Slurm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from jobs.models import Attempt, Host, Job, Member, Project, QueueState, Status
from jobs.queue import actions
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.scheduling.snapshot import OWNER_DISABLED, count_held_slots
from jobs.queue.slurm.engine import SlurmEngine
from jobs.queue.slurm.script import Site
from jobs.queue.slurm.states import format_job_name
from planner.facts.validation import SpecError
from tests.support.processes import wait_until

SPEC: dict[str, Any] = {
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 4},
    "resources": {"engine": "slurm", "slurm": {"nodes": 2}},
}


@pytest.fixture
def site(settings: Any, tmp_path: Path) -> Site:
    made = Site(str(tmp_path), "/usr/bin/python3", "https://board")
    settings.SLURM = made._asdict()
    return made


def problems(owner: User, spec: dict[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(SpecError) as error:
        actions.submit(owner, spec)
    return [tuple(problem) for problem in error.value.problems]  # type: ignore[misc]


def test_rejects_slurm_if_it_is_not_configured(owner: User, client: Client) -> None:
    text = "`resources.engine` is slurm, but `MESHBOARD_SLURM_FOLDER` is not set on this board. Use hosts."
    assert problems(owner, SPEC) == [("resources.engine", text)]
    client.force_login(owner)
    assert 'name="resources.engine"' not in client.get("/jobs/new/").content.decode()


def test_rejects_auto_layout_for_unknown_hardware(owner: User, site: Site) -> None:
    text = "`layout.auto` needs known hosts, but Slurm nodes are unknown. Set `layout.auto.cluster` or `layout`."
    assert problems(owner, {**SPEC, "layout": "auto", "resources": {"engine": "slurm"}}) == [("layout.auto", text)]


def test_form_sends_slurm_fields_only_with_slurm(owner: User, client: Client, site: Site) -> None:
    client.force_login(owner)
    fields = {"name": "x", "model.preset": "gpt-tiny", "layout.dp": "2", "resources.slurm.nodes": "2"}
    assert client.post("/jobs/new/", {**fields, "resources.engine": "hosts"}).status_code == 302
    assert client.post("/jobs/new/", {**fields, "resources.engine": "slurm"}).status_code == 302
    engines = owner.jobs.order_by("created").values_list("engine", "spec__resources__slurm__nodes")
    assert list(engines) == [("hosts", None), ("slurm", 2)]


def test_jobs_wait_while_slurm_is_unreachable(owner: User, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin/none")
    job, _ = actions.submit(owner, SPEC)
    engine = SlurmEngine(site)

    def told() -> bool:
        for step in (engine.place, engine.observe, engine.cancel, engine.start):
            step()
        job.refresh_from_db()
        return job.wait_reason.startswith("Cannot query Slurm: the command squeue cannot start")

    wait_until(told, "the reason is told", 20)
    assert job.status == Status.QUEUED
    ranks = Member.objects.filter(attempt__job=job).values_list("node", "first_rank", "num_ranks")
    assert list(ranks) == [(0, 0, 2), (1, 2, 2)]
    assert actions.cancel(job, "owner")
    job.refresh_from_db()
    assert job.status == Status.CANCELLING, "Slurm may have it: only Slurm can say"
    assert Attempt.objects.get().engine_ended is None


def test_blocked_job_gets_no_slurm_attempt(owner: User, stranger: User, site: Site) -> None:
    held, first = actions.submit(owner, SPEC)[0], actions.submit(owner, SPEC)[0]
    after = actions.submit(owner, {**SPEC, "after": [first.id]})[0]
    theirs, _ = actions.submit(stranger, SPEC)
    User.objects.filter(pk=stranger.pk).update(is_active=False)
    Job.objects.filter(id=held.id).update(held=True)
    SlurmEngine(site).place()
    assert list(Attempt.objects.values_list("job", flat=True)) == [first.id]
    reasons = dict(Job.objects.values_list("id", "wait_reason"))
    assert reasons[theirs.id] == OWNER_DISABLED
    assert reasons[held.id] == "The job is held until staff release it."
    assert reasons[after.id] == f"The job waits until job {first.id} has ended."
    QueueState.objects.update_or_create(defaults={"paused": True})
    Job.objects.filter(id=held.id).update(held=False)
    SlurmEngine(site).place()
    assert Attempt.objects.count() == 1
    assert Job.objects.get(id=held.id).wait_reason == "The queue is paused, so no job starts."


def test_job_blocked_later_is_not_submitted_to_slurm(owner: User, site: Site) -> None:
    """The account of the owner is disabled between the query and the submission."""
    job, _ = actions.submit(owner, SPEC)
    engine, sent = SlurmEngine(site), []
    engine._start_round = lambda _followed, start=(): sent.append(start)  # type: ignore[method-assign]
    engine.place()
    engine._absent = {format_job_name(job.id, 1)}
    User.objects.filter(pk=owner.pk).update(is_active=False)
    engine.start()
    assert sent == []
    job.refresh_from_db()
    assert job.wait_reason == OWNER_DISABLED
    User.objects.filter(pk=owner.pk).update(is_active=True)
    engine.start()
    assert len(sent) == 1


def test_slurm_places_more_ranks_than_a_host_has_slots(owner: User, site: Site, make_host: Callable[..., Host]) -> None:
    make_host(slots=2)
    assert actions.submit(owner, SPEC)[0].engine == "slurm"


def test_quota_limits_slots_in_slurm(owner: User, site: Site, make_host: Callable[..., Host]) -> None:
    """A job in the queue of Slurm counts with all of its slots."""
    make_host(slots=4)
    Project.objects.update_or_create(name="default", defaults={"slots": 4})
    first, second = (actions.submit(owner, SPEC)[0] for _ in range(2))
    here, _ = actions.submit(owner, {**SPEC, "resources": {}})
    engine = SlurmEngine(site)
    engine.place()
    assert list(Attempt.objects.values_list("job", flat=True)) == [first.id]
    text = (
        "The job needs 4 slots. Project default is limited to 4 slots. "
        "Other jobs of the project use or reserve 4 slots."
    )
    assert Job.objects.get(id=second.id).wait_reason == text
    assert schedule() == 0
    assert Job.objects.get(id=here.id).wait_reason == text
    assert count_held_slots(["default"]) == {}, "a share counts what is used"
    Attempt.objects.update(ended=timezone.now())
    engine.place()
    assert Attempt.objects.filter(job=second).exists()
