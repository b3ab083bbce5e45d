"""Every answer of the API is what the document says of it: no field missing, of another type, or left unsaid."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from django.conf import settings
from django.contrib.auth.models import User
from django.core.cache import cache
from django.utils import timezone
from rest_framework.test import APIClient

from contracts.names import telemetry_stream
from jobs.models import DEFAULT_PROJECT, Attempt, Delivery, Host, Job, Pool, Project, Status
from jobs.queue import actions, lifecycle
from jobs.queue.inbound.reconcile import check_external_runs
from jobs.runs.history.store.schema import TABLES
from tests.jobs.api.asked import Asked, wrong
from tests.jobs.history.sample_telemetry import generate_run, record_batches
from tests.jobs.hosts.test_join import request as machine
from tests.jobs.planning.test_calibration import PROFILE
from tests.jobs.planning.test_measured_runs import end_run, make_summary
from tests.jobs.reporting.nodes import Node, fall_silent
from tests.jobs.written import written
from tests.planner.wrong_specs import GOOD
from tests.support.telemetry import build_late_rank_step, build_timeline_batch

Api = Callable[[User | None], APIClient]

PIPELINE = {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}
TOO_LARGE: dict[str, Any] = {
    "model": {"preset": "llama3-8b"},
    "layout": {"dp": 8},
    "train": {"global_batch": 64, "micro_batches": 8, "seq_len": 4096, "precision": "bf16"},
    "resources": {"device": "cuda"},
}
CHECKPOINT = {
    "kind": "checkpoint",
    "rank": 0,
    "time": 1.0,
    "step": 10,
    "name": None,
    "num_bytes": 0,
    "stall_s": 0.1,
    "save_s": 0.2,
    "problem": "the disk is full",
}
SEARCH = {"spec": {"model": {"preset": "gpt-tiny"}}, "ranks": 4, "cluster": "h100"}


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


PLANS = "computes, and changes nothing"
SPEAKS = "a run's own word by its own token: what it says is its history, and openRun was written down"
IMPORTS = "a file of one's own for 30 days, with its owner and time in its row; nothing of the board's changes"
# What changes nothing that the audit is about.
UNWRITTEN = {
    **dict.fromkeys(("plan", "searchPlans", "explainPlan"), PLANS),
    **dict.fromkeys(("joinRun", "meetRun", "sendBatch", "reportRun"), SPEAKS),
    **dict.fromkeys(("openImport", "sendPart", "readImport", "deleteImport"), IMPORTS),
    "askForTrace": "what a run tells of one step besides, forgotten in an hour",
}


def test_every_answer_is_what_the_document_says(
    owner: User,
    staff: User,
    api: Api,
    make_host: Callable[..., Host],
    live_redis: redis.Redis,
    tmp_path: Path,
    settings: Any,
) -> None:
    asked = Asked(api(owner).get("/api/v1/schema").json())
    Project.objects.get_or_create(name=DEFAULT_PROJECT)  # tests that write for real empty the database
    make_host()
    Host.objects.update(profile=PROFILE, profiled=timezone.now())
    with written() as wrote:
        plans(asked, api(owner))
        jobs(asked, api(owner), owner)
        baselines(asked, api(owner), owner)
        smaller(asked, api(owner))
        traces(asked, api(owner), owner, live_redis)
        histories(asked, api(owner), owner, tmp_path, settings)
        more(asked, api(owner), owner)
        hosts(asked, api(owner), api(staff), api(None))
        runs(asked, api(owner))
        queue(asked, api(owner), api(staff))
        people(asked, api(owner))
        notifications(asked, api(owner))
        settings.EMAIL_HOST = "mail.example"
        User.objects.filter(pk=owner.pk).update(email="owner@people.example")
        owner.refresh_from_db()
        end_mail(asked, api(owner), actions.submit(owner, GOOD)[0].id)
        settings.EMAIL_HOST = ""
        projects(asked, api(owner), api(staff))
        webhooks(asked, api(owner))
    asked(api(owner), "getSchema")
    asked(api(None), "listJobs", code=401)
    assert asked.unasked == set(), "what a new operation answers is asked here too"
    assert asked.changing() - asked.named(wrote) == set(UNWRITTEN), "what changes something is written down, or why not"


def people(asked: Asked, user: APIClient) -> None:
    made = asked(user, "makeToken", {"name": "ci", "scopes": ["read"]}, code=201)
    asked(user, "makeToken", {"name": "ci", "scopes": []}, code=422)
    assert asked(user, "listTokens")[0]["key"] == made["key"]
    asked(user, "revokeToken", key=made["key"], code=204)
    asked(user, "revokeToken", key=made["key"], code=404)


def notifications(asked: Asked, user: APIClient) -> None:
    given = {"project": "default", "states": ["failed"]}
    assert given in asked(user, "setNotifications", {"wishes": [given]})["wishes"]
    assert given in asked(user, "getNotifications")["wishes"]
    asked(user, "setNotifications", {"wishes": [given, given]}, code=422)


def end_mail(asked: Asked, user: APIClient, job: str) -> None:
    assert asked(user, "askForEndMail", job_id=job)["asked"] is True
    assert asked(user, "getEndMail", job_id=job)["email"] == "owner@people.example"
    asked(user, "forgetEndMail", code=204, job_id=job)
    asked(user, "askForEndMail", {"to": "x"}, code=422, job_id=job)
    asked(user, "cancelJob", job_id=job)
    asked(user, "askForEndMail", code=409, job_id=job)


def projects(asked: Asked, user: APIClient, staff: APIClient) -> None:
    asked(staff, "makeProject", {"name": "team", "slots": 8}, code=201)
    asked(staff, "makeProject", {"name": "team"}, code=422)
    asked(user, "makeProject", {"name": "mine"}, code=403)
    assert asked(staff, "changeProject", {"own_slots": 4}, project="team")["own_slots"] == 4
    asked(staff, "changeProject", {"own_slots": 9}, project="team", code=422)
    made = asked(staff, "invite", {"role": "viewer"}, project="team", code=201)
    asked(staff, "listInvitations", project="team")
    assert asked(user, "acceptInvitation", {"token": made["token"]})["role"] == "viewer"
    asked(user, "acceptInvitation", {"token": made["token"]}, code=409)
    asked(staff, "setRole", {"role": "submitter"}, project="team", user="owner")
    assert asked(user, "listMembers", project="team")
    asked(user, "setRole", {"role": "admin"}, project="team", user="owner", code=403)
    other = asked(staff, "invite", {"role": "viewer", "email": "ann@acme.example"}, project="team", code=201)
    asked(staff, "revokeInvitation", project="team", key=str(other["id"]), code=204)
    asked(staff, "setVariable", {"value": "x"}, project="team", variable="JOB_X")
    asked(staff, "setVariable", {"value": "x"}, project="team", variable="PATH", code=422)
    assert asked(staff, "listVariables", project="team")
    asked(user, "listVariables", project="team", code=403)
    asked(staff, "removeVariable", project="team", variable="JOB_X", code=204)
    asked(user, "getProject", project="team")
    assert len(asked(user, "listProjects")) == 2
    asked(user, "removeMember", project="team", user="owner", code=204)
    asked(user, "getProject", project="team", code=404)


def plans(asked: Asked, user: APIClient) -> None:
    for layout in (GOOD["layout"], {"dp": 3}, PIPELINE, "auto"):
        asked(user, "plan", {**GOOD, "layout": layout})
    assert asked(user, "plan", TOO_LARGE)["suggestions"], "a plan that does not fit is among them"
    assert asked(user, "searchPlans", SEARCH)["neighbours"]
    asked(user, "searchPlans", {"spec": []}, code=422)
    asked(user, "explainPlan", {"spec": GOOD})
    asked(user, "listClusters")
    asked(user, "listTemplates")
    asked(user, "listPresets")


def jobs(asked: Asked, user: APIClient, owner: User) -> None:
    chosen = asked(user, "submitJob", {**GOOD, "layout": "auto"}, code=201)
    assert chosen["chosen"]["runners_up"]
    asked(user, "submitJob", {**GOOD, "layout": {"dp": 3}}, code=422)
    asked(user, "cancelJob", job_id=chosen["id"])
    asked(user, "cancelJob", job_id=chosen["id"], code=409)
    asked(user, "requeueJob", job_id=chosen["id"])
    asked(user, "changeJob", {"archived": True}, job_id=chosen["id"], code=409)
    asked(user, "cancelJob", job_id=chosen["id"])
    kept = asked(user, "changeJob", {"archived": True, "add_tags": ["ci", "nightly"]}, job_id=chosen["id"])
    assert (kept["archived"], kept["tags"]) == (True, ["ci", "nightly"])
    asked(user, "changeJob", {"colour": "red"}, job_id=chosen["id"], code=422)
    assert asked(user, "actOnJobs", {"action": "restore", "jobs": [chosen["id"]]})["changed"] == [chosen["id"]]
    asked(user, "actOnJobs", {"action": "tag", "jobs": []}, code=422)
    run = end_run(owner, {**make_summary(0.3), "losses": [{"step": 1, "loss": 4.0, "time": 1.0}]}, layout={"tp": 4})
    detail = asked(user, "getJob", job_id=run.job_id)
    assert detail["exit"]["summary"]["cells"]
    assert detail["members"]
    assert len(asked(user, "listJobs")) == 2
    advice = asked(user, "adviseJob", job_id=run.job_id)
    assert advice["options"] or advice["unsure"]
    asked(user, "adviseJob", job_id=chosen["id"], code=409)
    asked(user, "getJob", job_id="nobodys", code=404)
    asked(user, "readLog", job_id=chosen["id"], rank="0", code=409)
    assert asked(user, "waitForJob", job_id=run.job_id)["job"]["finished"]
    asked(user, "followJob", job_id="nobodys", code=404)


def baselines(asked: Asked, user: APIClient, owner: User) -> None:
    run, main = end_run(owner, make_summary(0.3)).job_id, {"project": "default", "branch": "main"}
    assert asked(user, "setBaseline", {"job": run}, **main)["runs"][0]["facts"]["sent"]
    asked(user, "setBaseline", {"job": "none"}, code=422, **main)
    assert asked(user, "setBaseline", {"job": end_run(owner, make_summary(0.3), layout={"tp": 4}).job_id}, **main)[
        "left_aside"
    ]
    asked(user, "getBaseline", **main)
    assert asked(user, "listBaselines", project="default")
    asked(user, "forgetBaseline", code=204, **main)
    asked(user, "getBaseline", code=404, **main)


def traces(asked: Asked, user: APIClient, owner: User, client: redis.Redis) -> None:
    """A step that its ranks told of, and one that is asked for."""
    run = end_run(owner, make_summary(0.3), layout={"tp": 2})
    stream = telemetry_stream(run.job_id, run.number)
    client.xadd(stream, {"b": msgpack.packb(build_timeline_batch(run.job_id, *build_late_rank_step())), "n": 0})
    path = asked.operations["getTrace"][0].format(job_id=run.job_id)
    asked.holds("getTrace", user.get(path, {"format": "chrome"}))
    asked.holds("getTrace", user.get(path, {"format": "columns"}))
    asked.holds("getTrace", user.get(path, {"step": 99}), 404)
    assert asked(user, "listTracedSteps", job_id=run.job_id) == {"steps": [8]}
    asked(user, "askForTrace", {"step": 5}, job_id=run.job_id, code=409)
    waiting = asked(user, "submitJob", GOOD, code=201)["id"]
    asked(user, "askForTrace", {"step": 5}, job_id=waiting, code=202)
    asked(user, "cancelJob", job_id=waiting)


def histories(asked: Asked, user: APIClient, owner: User, folder: Path, settings: Any) -> None:
    settings.HISTORY_DIR = folder
    run = end_run(owner, make_summary(0.3)).job_id
    asked(user, "getSnapshot", job_id=run, code=404)
    asked(user, "getEventFile", job_id=run, code=404)
    slow = asked.operations["explainSlowSteps"][0].format(job_id=run)
    asked.holds("explainSlowSteps", user.get(f"{slow}?from=1&to=2"), 404)
    record_batches(folder, list(generate_run(2, 4)), run)
    other = end_run(owner, make_summary(0.3), layout={"tp": 2}).job_id
    asked.holds("compareJobs", user.get("/api/v1/compare", {"jobs": f"{run},{other}"}))
    asked.holds("compareJobs", user.get("/api/v1/compare", {"jobs": run}), 400)
    asked.holds("compareJobs", user.get("/api/v1/compare", {"jobs": f"{run},{run}"}), 422)
    assert asked(user, "getHistory", job_id=run)["attempts"]
    asked.holds("explainSlowSteps", user.get(f"{slow}?from=1&to=1"))
    asked.holds("explainSlowSteps", user.get(f"{slow}?from=0"), 400)
    assert asked(user, "getSnapshot", job_id=run)["ranks"]
    for table in TABLES:
        asked(user, "getHistoryTable", job_id=run, table=table)


def smaller(asked: Asked, user: APIClient) -> None:
    """A job that was lost, with more ranks than what is left has slots."""
    large = {**GOOD, "layout": {"dp": 2, "tp": 2, "pp": 2}, "train": {"global_batch": 8, "micro_batches": 2}}
    Host.objects.update(slots=8)
    job = asked(user, "submitJob", large, code=201)["id"]
    Attempt.objects.create(job_id=job, number=1, checkpoint=f"{job}/1/step-00000020", ended=timezone.now())
    assert lifecycle.start_jobs({job: (1, "placed")})
    assert lifecycle.change_status(job, 1, Status.LOST, "its host was given up")
    asked(user, "offerSmaller", job_id=job, code=409)
    Host.objects.update(slots=4)
    assert asked(user, "offerSmaller", job_id=job)["ranks"] <= 4
    assert asked(user, "betweenHosts", job_id=job)["levels"] == []
    asked(user, "runSmaller", job_id=job)
    asked(user, "cancelJob", job_id=job)


def more(asked: Asked, user: APIClient, owner: User) -> None:
    """Of a run that is over: what it measured and proved, and jobs made of it."""
    parts = {"parameters": 1, "gradients": 1, "optimizer": 2, "copies": 0, "gradients_then": None, "beside": 3}
    run = end_run(owner, {**make_summary(0.3), "checkpoints": [CHECKPOINT], "memory": {"0": parts}}).job_id
    asked(user, "getMetrics", job_id=run, code=404)
    record_batches(settings.HISTORY_DIR, list(generate_run(2, 4)), run)
    for operation, groups in (("getMetrics", ("job", "rank")), ("getTraffic", ("job", "rank", "axis", "collective"))):
        path = asked.operations[operation][0].format(job_id=run)
        for by in groups:
            assert asked.holds(operation, user.get(path, {"by": by, "points": 3}))["columns"]["time"]
    assert asked(user, "getResults", job_id=run)["memory"] == {"0": parts}
    asked(user, "listCheckpoints", job_id=run)
    asked(user, "resumeJob", job_id=run, code=409)
    Attempt.objects.filter(job_id=run).update(checkpoint=f"{run}/1/step-00000015")
    assert asked(user, "listCheckpoints", job_id=run)[0]["name"] == f"{run}/1/step-00000015"
    copied = asked(user, "copyJob", {"name": "again"}, job_id=run, code=201)
    asked(user, "cancelJob", job_id=copied["id"])
    resumed = asked(user, "resumeJob", {"change": {"name": "on"}}, job_id=run, code=201)
    asked(user, "cancelJob", job_id=resumed["id"])
    opened = asked(user, "openImport", {"files": [{"name": "trace_rank0.json", "size": 2}]}, code=201)["id"]
    path = asked.operations["sendPart"][0].format(key=opened, place=0)
    asked.holds("sendPart", user.put(f"{path}?offset=0", b"{}", content_type="application/octet-stream"))
    asked.holds("sendPart", user.put(f"{path}?offset=9", b"{}", content_type="application/octet-stream"), 409)
    asked(user, "getImportedTrace", key=opened, code=404)
    asked(user, "getImport", key=opened)
    asked(user, "listImports")
    asked(user, "readImport", key=opened, code=422)
    again = asked(user, "openImport", {"files": [{"name": "a", "size": 2}]}, code=201)["id"]
    asked(user, "deleteImport", key=again, code=204)
    asked(user, "listPrimitives")
    asked(user, "getPrimitive", name="all_reduce")
    asked(user, "getPrimitive", name="all_rduce", code=404)
    asked(user, "cancelJob", job_id=asked(user, "runPrimitive", {"ranks": 2}, name="all_reduce", code=201)["id"])


def hosts(asked: Asked, user: APIClient, staff: APIClient, nobody: APIClient) -> None:
    made = asked(staff, "makeJoinToken", {"uses": 1, "note": "the new rack"}, code=201)
    asked(nobody, "joinHost", machine("gpu-7", token=made["token"]), code=201)
    asked(nobody, "joinHost", machine("gpu-7"))
    asked(nobody, "joinHost", machine("gpu-8"), code=401)
    (kept,) = asked(staff, "listJoinTokens")
    asked(staff, "revokeJoinToken", key=kept["id"])
    assert len(asked(user, "listHosts")) == 2
    for client in (user, staff):
        asked(client, "getHost", name="host-a")
    asked(user, "getHostProfile", name="host-a")
    asked(staff, "drainHost", name="host-a")
    asked(staff, "undrainHost", name="host-a")
    asked(user, "calibrateHost", name="host-a", code=403)
    asked(staff, "calibrateHost", name="host-a", code=201)
    Host.objects.update(last_seen=timezone.now())
    asked(staff, "giveUpHost", name="host-a", code=409)
    Host.objects.update(last_seen=timezone.now() - timedelta(hours=1))
    asked(staff, "giveUpHost", name="host-a")
    asked(staff, "removeHost", name="gpu-7", code=204)


def queue(asked: Asked, user: APIClient, staff: APIClient) -> None:
    first, second = (asked(user, "submitJob", GOOD, code=201)["id"] for _ in range(2))
    assert asked(user, "getQueue")["jobs"]
    asked(user, "pauseQueue", code=403)
    asked.holds("whatWouldStart", staff.get(f"/api/v1/queue/what-if?job={first}&priority=1"))
    asked(staff, "whatWouldStart", code=400)
    asked(staff, "pauseQueue")
    asked(staff, "resumeQueue")
    Pool.objects.create(name="racks")
    asked(staff, "pausePool", name="racks")
    asked(staff, "resumePool", name="racks")
    asked(staff, "moveInQueue", {"before": first}, job_id=second)
    asked(staff, "actOnQueue", {"action": "cancel", "jobs": [first]})
    assert asked(staff, "listAudit")
    asked(staff, "moveInQueue", {"to": "top"}, job_id=first, code=409)


def runs(asked: Asked, user: APIClient) -> None:
    opened = asked(user, "openRun", {"world_size": 2, "name": "by hand"}, code=201)
    node = Node(opened["run"], opened["token"])
    asked.holds("joinRun", node.join("gpu-7"))
    asked.holds("reportRun", node.report())
    where = asked.operations["meetRun"][0].format(run=node.run, attempt=1, node=0)
    asked.holds("meetRun", node.client.post(where, {}, format="json", **node.headers))
    asked.holds("sendBatch", node.batch())
    asked.holds("sendBatch", node.batch(1, told=b"no batch"), 422)
    asked(user, "giveUpRun", job_id=node.run, code=409)
    fall_silent(node)
    check_external_runs()
    asked(user, "giveUpRun", job_id=node.run)
    asked.holds("reportRun", node.report(), 410)


def webhooks(asked: Asked, user: APIClient) -> None:
    wanted = {"name": "chat", "url": "https://chat.example/7", "states": ["failed"]}
    made = asked(user, "makeWebhook", wanted, code=201, project="default")
    names = {"project": "default", "key": made["id"]}
    asked(user, "makeWebhook", {**wanted, "url": "http://2130706433/"}, code=422, project="default")
    assert asked(user, "listWebhooks", project="default")
    assert "secret" not in asked(user, "getWebhook", **names)
    asked(user, "changeWebhook", {"active": False}, **names)
    assert asked(user, "rotateWebhook", **names)["secret"] != made["secret"]
    sent = asked(user, "pingWebhook", code=202, **names)
    asked(user, "pingWebhook", code=409, **names)
    asked(user, "redeliver", code=409, **names, delivery=sent["id"])
    Delivery.objects.update(due=None, outcome="delivered")
    asked(user, "redeliver", code=202, **names, delivery=sent["id"])
    assert asked(user, "listDeliveries", **names)
    asked(user, "deleteWebhook", code=204, **names)
    asked(user, "getWebhook", code=404, **names)


def test_a_job_that_an_older_version_stored_is_described_too(
    owner: User, api: Api, make_host: Callable[..., Host]
) -> None:
    """Fields that came later are missing from it: a client that trusts the document must not fall over."""
    client = api(owner)
    document = client.get("/api/v1/schema").json()
    make_host()
    run = end_run(owner, make_summary(0.3))
    run.exit = {"outcome": "succeeded", "summary": None}
    run.save()
    Job.objects.update(estimate={"world_size": 4})
    answer = client.get(f"/api/v1/jobs/{run.job_id}").json()
    described = {"$ref": "#/components/schemas/JobDetail", "components": document["components"]}
    assert wrong(described, answer) == []
