"""Combine the reports of Slurm nodes with the state of Slurm."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User

from contracts.codec import validate_allocation_order
from jobs.core.credentials import issue_run_token
from jobs.models import Attempt, Job, Status
from jobs.queue import actions, lifecycle
from jobs.queue.slurm import attempts as slurm_attempts
from jobs.queue.slurm.script import Site
from jobs.queue.slurm.states import SlurmJob, format_job_name
from tests.jobs.conftest import report
from tests.jobs.reporting.nodes import Node

SPEC: dict[str, Any] = {
    "model": {"preset": "gpt-tiny"},
    "layout": {"dp": 4},
    "resources": {"engine": "slurm", "slurm": {"nodes": 2}},
}
SITE = Site("/cluster", "/usr/bin/python3", "https://board")


@pytest.fixture
def attempt(owner: User, live_redis: redis.Redis, settings: Any) -> Attempt:
    """Return an attempt that is pending in the queue of Slurm."""
    settings.SLURM = SITE._asdict()
    job, _ = actions.submit(owner, SPEC)
    slurm_attempts.create_attempt(job)
    return Attempt.objects.get()


@pytest.fixture
def nodes(attempt: Attempt) -> list[Node]:
    token = issue_run_token(attempt)
    return [Node(attempt.job_id, token, node=n, claim=f"the-secret-of-process-{n}") for n in range(2)]


def slurm_s(attempt: Attempt, state: str) -> SlurmJob:
    return SlurmJob("17", state, "main", "node[0-1]", None, format_job_name(attempt.job_id, 1), "")


def finished(attempt: Attempt, state: str) -> Job:
    slurm_attempts.finish(Attempt.objects.select_related("job").get(), slurm_s(attempt, state), "")
    return Job.objects.get()


def test_first_node_starts_the_job(nodes: list[Node], attempt: Attempt) -> None:
    assert nodes[0].join("node0").status_code == 200
    assert Job.objects.get().status == Status.STARTING
    nodes[0].headers["HTTP_MESHBOARD_CLAIM"] = nodes[0].claim = "of-a-second-submission"
    assert nodes[0].join("node0").status_code == 409


def test_only_the_token_of_the_accepted_submission_is_valid(nodes: list[Node], attempt: Attempt) -> None:
    slurm_attempts.prepare_submission(attempt, SITE, "")
    assert nodes[1].join("node1").status_code == 200, "an earlier submission can have started"
    slurm_attempts.record_submission(attempt, "17")
    assert nodes[0].join("node0").status_code == 401


def test_nodes_of_a_gang_receive_addresses(nodes: list[Node]) -> None:
    for n, node in enumerate(nodes):
        node.join(f"node{n}")

    def meet(node: Node, **said: Any) -> Any:
        path = f"/api/v1/runs/{node.run}/1/members/{node.node}/meet"
        headers: dict[str, Any] = node.headers
        return node.client.post(path, said, format="json", **headers)

    assert meet(nodes[1], address="10.0.0.2").json()["ready"] == [{"node": 1, "address": "10.0.0.2", "port": 0}]
    meet(nodes[0], address="10.0.0.1", port=4711)
    ready = meet(nodes[1]).json()["ready"]
    assert sorted(one["node"] for one in ready) == [0, 1]
    assert {"node": 0, "address": "10.0.0.1", "port": 4711} in ready
    assert meet(nodes[0], address="node0").status_code == 422
    assert meet(nodes[0], port=65536).status_code == 422


def test_unexplained_end_waits_for_the_state_of_slurm(nodes: list[Node], attempt: Attempt) -> None:
    for n, node in enumerate(nodes):
        node.join(f"node{n}")
        node.report("running")
        assert node.report("exited", "lost").status_code == 200
    assert Job.objects.get().status == Status.RUNNING
    job = finished(attempt, "TIMEOUT")
    assert job.status == Status.FAILED
    told = Attempt.objects.get()
    assert told.exit is not None
    assert told.exit["reason"] == "Slurm: the job reached its time limit; job 17 on node[0-1], TIMEOUT"
    assert told.engine_ended is not None


def test_failed_node_ends_the_others_and_is_the_reason(nodes: list[Node], attempt: Attempt) -> None:
    for n, node in enumerate(nodes):
        node.join(f"node{n}")
    nodes[1].report("exited", "failed")
    assert nodes[0].report("running").json()["cancel"] is True
    nodes[0].report("exited", "cancelled")
    job = Job.objects.get()
    assert job.status == Status.FAILED
    assert job.history.values_list("reason", flat=True).last() == "it failed"


def test_completed_slurm_job_without_reports_succeeded(attempt: Attempt) -> None:
    lifecycle.start_jobs({attempt.job_id: (1, "Slurm runs it")})
    assert finished(attempt, "COMPLETED").status == Status.SUCCEEDED


def test_cancelled_job_stays_cancelled_in_any_slurm_state(attempt: Attempt, owner: User) -> None:
    actions.cancel(Job.objects.get(), "owner")
    assert finished(attempt, "CANCELLED").status == Status.CANCELLED


def test_next_attempt_resumes_from_the_checkpoint(nodes: list[Node], attempt: Attempt) -> None:
    name = f"{attempt.job_id}/1/step-00000005"
    nodes[0].join("node0")
    told = report(attempt.job_id, 1, "running", None, slots=[])
    assert nodes[0].raw_report({**told, "checkpoint": "other/1/step-00000005"}).status_code == 422
    assert nodes[0].raw_report({**told, "checkpoint": name}).status_code == 200
    finished(attempt, "NODE_FAIL")
    assert Job.objects.get().status == Status.LOST
    actions.requeue(Job.objects.get(), "owner")
    slurm_attempts.create_attempt(Job.objects.get())
    script = slurm_attempts.prepare_submission(Attempt.objects.get(number=2), SITE, "").script
    order = json.loads(base64.b64decode(script.partition("'END_OF_ORDER' &\n")[2].partition("END_OF_ORDER")[0]))
    assert validate_allocation_order(order)["checkpoint"] == {"name": name, "host": "node0"}


def exits(nodes: list[Node], attempt: Attempt, outcome: str, **told: Any) -> Job:
    """End the first node with an outcome, and the other node with success."""
    for n, node in enumerate(nodes):
        node.join(f"node{n}")
        node.report("running")
    nodes[1].report("exited", "succeeded")
    said = report(attempt.job_id, 1, "exited", outcome, slots=[])
    said["exit"].update(told)
    assert nodes[0].raw_report(said).status_code == 200
    return Job.objects.get()


def test_preempted_job_is_requeued_and_resumes(nodes: list[Node], attempt: Attempt) -> None:
    job = exits(nodes, attempt, "cancelled", preempted=True, reason="it stopped after step 7 as Slurm preempts it")
    assert (job.status, job.attempt) == (Status.QUEUED, 2)
    told = list(job.history.values_list("status", "reason"))[-3:]
    assert told == [
        ("cancelling", "it stopped after step 7 as Slurm preempts it"),
        ("cancelled", "it stopped after step 7 as Slurm preempts it"),
        ("queued", "preempted by a job with higher priority, and resumes from the latest checkpoint"),
    ]


def test_job_preempted_before_its_report_is_requeued(attempt: Attempt) -> None:
    job = finished(attempt, "PREEMPTED")
    assert (job.status, job.attempt) == (Status.QUEUED, 2)
    assert Attempt.objects.get(number=1).engine_ended is not None


def test_cancelled_job_that_slurm_preempts_stays_cancelled(nodes: list[Node], attempt: Attempt, owner: User) -> None:
    for n, node in enumerate(nodes):
        node.join(f"node{n}")
    actions.cancel(Job.objects.get(), "owner")
    assert finished(attempt, "PREEMPTED").status == Status.CANCELLED


def test_time_limit_is_retried_up_to_max_retries(nodes: list[Node], attempt: Attempt) -> None:
    Job.objects.update(spec={**Job.objects.get().spec, "retry": {"max_attempts": 2}})
    job = exits(nodes, attempt, "failed", reason="it stopped after step 7 as its time limit at Slurm is near")
    assert (job.status, job.attempt) == (Status.QUEUED, 2)
    assert job.history.values_list("reason", flat=True).last() == (
        "retry 2 of 2 from the latest checkpoint, because attempt 1 has failed"
    )
