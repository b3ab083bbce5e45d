"""The responses of all operations match the OpenAPI document, and all changes are audited."""

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
from tests.contracts.test_archives import make_file, pack_tar
from tests.jobs.api.document_client import DocumentClient, list_differences
from tests.jobs.audited_routes import record_audited_routes
from tests.jobs.history.sample_telemetry import generate_run, record_batches
from tests.jobs.hosts.test_join import request as machine
from tests.jobs.planning.test_calibration import PROFILE
from tests.jobs.planning.test_measured_runs import end_run, make_summary
from tests.jobs.reporting.nodes import Node, fall_silent
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


PLANS = "computes without a change"
TELEMETRY = "adds telemetry of a run with its token, and openRun is audited"
IMPORTS = "adds a private file, whose row has its owner and time"
# Operations that do not write an audit entry.
UNAUDITED = {
    **dict.fromkeys(("plan", "searchPlans", "explainPlan", "importModel", "importLayout"), PLANS),
    **dict.fromkeys(("joinRun", "meetRun", "sendBatch", "reportRun"), TELEMETRY),
    **dict.fromkeys(("openImport", "sendPart", "readImport", "deleteImport"), IMPORTS),
    **dict.fromkeys(("openUpload", "sendUploadPart", "finishUpload", "deleteUpload"), IMPORTS),
    "askForTrace": "adds a trace that expires within an hour",
}


def test_responses_match_the_document(
    owner: User,
    staff: User,
    api: Api,
    make_host: Callable[..., Host],
    live_redis: redis.Redis,
    tmp_path: Path,
    settings: Any,
) -> None:
    call = DocumentClient(api(owner).get("/api/v1/schema").json())
    Project.objects.get_or_create(name=DEFAULT_PROJECT)  # Tests with real transactions delete this project.
    make_host()
    Host.objects.update(profile=PROFILE, profiled=timezone.now())
    with record_audited_routes() as audited:
        plans(call, api(owner))
        jobs(call, api(owner), owner)
        baselines(call, api(owner), owner)
        smaller(call, api(owner))
        traces(call, api(owner), owner, live_redis)
        histories(call, api(owner), owner, tmp_path, settings)
        more(call, api(owner), owner)
        hosts(call, api(owner), api(staff), api(None))
        runs(call, api(owner))
        script_uploads(call, api(owner), api(None))
        queue(call, api(owner), api(staff))
        people(call, api(owner))
        notifications(call, api(owner))
        settings.EMAIL_HOST = "mail.example"
        User.objects.filter(pk=owner.pk).update(email="owner@people.example")
        owner.refresh_from_db()
        end_mail(call, api(owner), actions.submit(owner, GOOD)[0].id)
        settings.EMAIL_HOST = ""
        projects(call, api(owner), api(staff))
        webhooks(call, api(owner))
    call(api(owner), "getSchema")
    call(api(None), "listJobs", code=401)
    assert call.untested == set(), "each operation needs a call in this test"
    assert call.list_changing_operations() - call.find_operations(audited) == set(UNAUDITED), (
        "each change is audited or listed in UNAUDITED"
    )


def script_uploads(call: DocumentClient, user: APIClient, nobody: APIClient) -> None:
    archive = pack_tar([make_file("train.py")])
    announced = {"name": "demo.tar.gz", "size": len(archive)}
    key = call(user, "openUpload", announced, code=201)["id"]
    path = call.operations["sendUploadPart"][0].format(key=key)
    for offset, code in ((0, 200), (9, 409)):
        sent = user.put(f"{path}?offset={offset}", archive, content_type="application/octet-stream")
        call.check("sendUploadPart", sent, code)
    sha256 = call(user, "finishUpload", {}, key=key)["sha256"]
    assert call(user, "openUpload", {**announced, "sha256": sha256})["id"] == key
    call(user, "getUpload", key=key)
    assert len(call(user, "listUploads")) == 1
    assert user.get(call.operations["downloadUpload"][0].format(key=key)).content == archive
    call.untested.discard("downloadUpload")  # no JSON
    spec = {"kind": "script", "layout": {"dp": 2}, "script": {"path": "train.py", "upload": sha256}}
    job = call(user, "submitJob", spec, code=201)["id"]
    call(user, "deleteUpload", key=key, code=409)
    call(nobody, "downloadRunUpload", run=job, attempt=1, code=401)
    call(user, "cancelJob", job_id=job)
    call(user, "deleteUpload", key=key, code=204)


def people(call: DocumentClient, user: APIClient) -> None:
    made = call(user, "makeToken", {"name": "ci", "scopes": ["read"]}, code=201)
    call(user, "makeToken", {"name": "ci", "scopes": []}, code=422)
    assert call(user, "listTokens")[0]["key"] == made["key"]
    call(user, "revokeToken", key=made["key"], code=204)
    call(user, "revokeToken", key=made["key"], code=404)


def notifications(call: DocumentClient, user: APIClient) -> None:
    wish = {"project": "default", "states": ["failed"]}
    assert wish in call(user, "setNotifications", {"wishes": [wish]})["wishes"]
    assert wish in call(user, "getNotifications")["wishes"]
    call(user, "setNotifications", {"wishes": [wish, wish]}, code=422)


def end_mail(call: DocumentClient, user: APIClient, job: str) -> None:
    assert call(user, "askForEndMail", job_id=job)["asked"] is True
    assert call(user, "getEndMail", job_id=job)["email"] == "owner@people.example"
    call(user, "forgetEndMail", code=204, job_id=job)
    call(user, "askForEndMail", {"to": "x"}, code=422, job_id=job)
    call(user, "cancelJob", job_id=job)
    call(user, "askForEndMail", code=409, job_id=job)


def projects(call: DocumentClient, user: APIClient, staff: APIClient) -> None:
    call(staff, "makeProject", {"name": "team", "slots": 8}, code=201)
    call(staff, "makeProject", {"name": "team"}, code=422)
    call(user, "makeProject", {"name": "mine"}, code=403)
    assert call(staff, "changeProject", {"own_slots": 4}, project="team")["own_slots"] == 4
    call(staff, "changeProject", {"own_slots": 9}, project="team", code=422)
    made = call(staff, "invite", {"role": "viewer"}, project="team", code=201)
    call(staff, "listInvitations", project="team")
    assert call(user, "acceptInvitation", {"token": made["token"]})["role"] == "viewer"
    call(user, "acceptInvitation", {"token": made["token"]}, code=409)
    call(staff, "setRole", {"role": "submitter"}, project="team", user="owner")
    assert call(user, "listMembers", project="team")
    call(user, "setRole", {"role": "admin"}, project="team", user="owner", code=403)
    other = call(staff, "invite", {"role": "viewer", "email": "ann@acme.example"}, project="team", code=201)
    call(staff, "revokeInvitation", project="team", key=str(other["id"]), code=204)
    call(staff, "setVariable", {"value": "x"}, project="team", variable="JOB_X")
    call(staff, "setVariable", {"value": "x"}, project="team", variable="PATH", code=422)
    assert call(staff, "listVariables", project="team")
    call(user, "listVariables", project="team", code=403)
    call(staff, "removeVariable", project="team", variable="JOB_X", code=204)
    call(user, "getProject", project="team")
    assert len(call(user, "listProjects")) == 2
    call(user, "removeMember", project="team", user="owner", code=204)
    call(user, "getProject", project="team", code=404)


def plans(call: DocumentClient, user: APIClient) -> None:
    for layout in (GOOD["layout"], {"dp": 3}, PIPELINE, "auto"):
        call(user, "plan", {**GOOD, "layout": layout})
    assert call(user, "plan", TOO_LARGE)["suggestions"], "one plan does not fit"
    assert call(user, "searchPlans", SEARCH)["neighbours"]
    call(user, "searchPlans", {"spec": []}, code=422)
    call(user, "explainPlan", {"spec": GOOD})
    call(user, "listClusters")
    call(user, "listTemplates")
    call(user, "listPresets")
    config = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    config |= {"num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True}
    imported = call(user, "importModel", {**config, "max_position_embeddings": 131072, "frobnication": 3})
    assert (imported["parameters"], imported["assumed"]) == (494_032_768, False)
    assert [problem["field"] for problem in imported["not_runnable"]] == ["model.block"]
    assert call(user, "plan", {"model": imported["model"]})["estimate"]
    refused = call(user, "importModel", config, code=422)
    assert [error["pointer"] for error in refused["errors"]] == ["/max_position_embeddings"]
    file = "[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n[mystery]\nknob = 1\n"
    layout = call(user, "importLayout", {"text": file, "ranks": 8})
    assert (layout["tool"], layout["ranks"], layout["not_understood"]) == ("torchtitan", 8, ["mystery.knob"])
    assert layout["spec"]["layout"]["dp"] == 4
    assert call(user, "plan", {"model": {"preset": "llama3-8b"}, **layout["spec"]})["estimate"]
    refused = call(user, "importLayout", {"text": file}, code=422)
    assert [error["pointer"] for error in refused["errors"]] == ["/text"]


def jobs(call: DocumentClient, user: APIClient, owner: User) -> None:
    chosen = call(user, "submitJob", {**GOOD, "layout": "auto"}, code=201)
    assert chosen["chosen"]["runners_up"]
    call(user, "submitJob", {**GOOD, "layout": {"dp": 3}}, code=422)
    call(user, "cancelJob", job_id=chosen["id"])
    call(user, "cancelJob", job_id=chosen["id"], code=409)
    call(user, "requeueJob", job_id=chosen["id"])
    call(user, "changeJob", {"archived": True}, job_id=chosen["id"], code=409)
    call(user, "cancelJob", job_id=chosen["id"])
    changed = call(user, "changeJob", {"archived": True, "add_tags": ["ci", "nightly"]}, job_id=chosen["id"])
    assert (changed["archived"], changed["tags"]) == (True, ["ci", "nightly"])
    call(user, "changeJob", {"colour": "red"}, job_id=chosen["id"], code=422)
    assert call(user, "actOnJobs", {"action": "restore", "jobs": [chosen["id"]]})["changed"] == [chosen["id"]]
    call(user, "actOnJobs", {"action": "tag", "jobs": []}, code=422)
    run = end_run(owner, {**make_summary(0.3), "losses": [{"step": 1, "loss": 4.0, "time": 1.0}]}, layout={"tp": 4})
    detail = call(user, "getJob", job_id=run.job_id)
    assert detail["exit"]["summary"]["cells"]
    assert detail["members"]
    assert len(call(user, "listJobs")) == 2
    advice = call(user, "adviseJob", job_id=run.job_id)
    assert advice["options"] or advice["unsure"]
    call(user, "adviseJob", job_id=chosen["id"], code=409)
    call(user, "getJob", job_id="nobodys", code=404)
    call(user, "readLog", job_id=chosen["id"], rank="0", code=409)
    assert call(user, "waitForJob", job_id=run.job_id)["job"]["finished"]
    call(user, "followJob", job_id="nobodys", code=404)


def baselines(call: DocumentClient, user: APIClient, owner: User) -> None:
    run, main = end_run(owner, make_summary(0.3)).job_id, {"project": "default", "branch": "main"}
    assert call(user, "setBaseline", {"job": run}, **main)["runs"][0]["facts"]["sent"]
    call(user, "setBaseline", {"job": "none"}, code=422, **main)
    assert call(user, "setBaseline", {"job": end_run(owner, make_summary(0.3), layout={"tp": 4}).job_id}, **main)[
        "left_aside"
    ]
    call(user, "getBaseline", **main)
    assert call(user, "listBaselines", project="default")
    call(user, "forgetBaseline", code=204, **main)
    call(user, "getBaseline", code=404, **main)


def traces(call: DocumentClient, user: APIClient, owner: User, client: redis.Redis) -> None:
    """Call the trace operations for a traced step and for a requested step."""
    run = end_run(owner, make_summary(0.3), layout={"tp": 2})
    stream = telemetry_stream(run.job_id, run.number)
    client.xadd(stream, {"b": msgpack.packb(build_timeline_batch(run.job_id, *build_late_rank_step())), "n": 0})
    path = call.operations["getTrace"][0].format(job_id=run.job_id)
    call.check("getTrace", user.get(path, {"format": "chrome"}))
    call.check("getTrace", user.get(path, {"format": "columns"}))
    call.check("getTrace", user.get(path, {"step": 99}), 404)
    assert call(user, "listTracedSteps", job_id=run.job_id) == {"steps": [8]}
    call(user, "askForTrace", {"step": 5}, job_id=run.job_id, code=409)
    waiting = call(user, "submitJob", GOOD, code=201)["id"]
    call(user, "askForTrace", {"step": 5}, job_id=waiting, code=202)
    call(user, "cancelJob", job_id=waiting)


def histories(call: DocumentClient, user: APIClient, owner: User, folder: Path, settings: Any) -> None:
    settings.HISTORY_DIR = folder
    run = end_run(owner, make_summary(0.3)).job_id
    call(user, "getSnapshot", job_id=run, code=404)
    call(user, "getEventFile", job_id=run, code=404)
    slow = call.operations["explainSlowSteps"][0].format(job_id=run)
    call.check("explainSlowSteps", user.get(f"{slow}?from=1&to=2"), 404)
    record_batches(folder, list(generate_run(2, 4)), run)
    other = end_run(owner, make_summary(0.3), layout={"tp": 2}).job_id
    call.check("compareJobs", user.get("/api/v1/compare", {"jobs": f"{run},{other}"}))
    call.check("compareJobs", user.get("/api/v1/compare", {"jobs": run}), 400)
    call.check("compareJobs", user.get("/api/v1/compare", {"jobs": f"{run},{run}"}), 422)
    assert call(user, "getHistory", job_id=run)["attempts"]
    call.check("explainSlowSteps", user.get(f"{slow}?from=1&to=1"))
    call.check("explainSlowSteps", user.get(f"{slow}?from=0"), 400)
    assert call(user, "getSnapshot", job_id=run)["ranks"]
    for table in TABLES:
        call(user, "getHistoryTable", job_id=run, table=table)


def smaller(call: DocumentClient, user: APIClient) -> None:
    """Call the operations that restart a lost job with fewer ranks."""
    large = {**GOOD, "layout": {"dp": 2, "tp": 2, "pp": 2}, "train": {"global_batch": 8, "micro_batches": 2}}
    Host.objects.update(slots=8)
    job = call(user, "submitJob", large, code=201)["id"]
    Attempt.objects.create(job_id=job, number=1, checkpoint=f"{job}/1/step-00000020", ended=timezone.now())
    assert lifecycle.start_jobs({job: (1, "placed")})
    assert lifecycle.change_status(job, 1, Status.LOST, "its host was marked as lost")
    call(user, "offerSmaller", job_id=job, code=409)
    Host.objects.update(slots=4)
    assert call(user, "offerSmaller", job_id=job)["ranks"] <= 4
    assert call(user, "betweenHosts", job_id=job)["levels"] == []
    call(user, "runSmaller", job_id=job)
    call(user, "cancelJob", job_id=job)


def more(call: DocumentClient, user: APIClient, owner: User) -> None:
    """Call the operations for results, checkpoints, copies, imports, and benchmarks."""
    parts = {"parameters": 1, "gradients": 1, "optimizer": 2, "copies": 0, "gradients_then": None, "beside": 3}
    run = end_run(owner, {**make_summary(0.3), "checkpoints": [CHECKPOINT], "memory": {"0": parts}}).job_id
    call(user, "getMetrics", job_id=run, code=404)
    record_batches(settings.HISTORY_DIR, list(generate_run(2, 4)), run)
    for operation, groups in (("getMetrics", ("job", "rank")), ("getTraffic", ("job", "rank", "axis", "collective"))):
        path = call.operations[operation][0].format(job_id=run)
        for by in groups:
            assert call.check(operation, user.get(path, {"by": by, "points": 3}))["columns"]["time"]
    assert call(user, "getResults", job_id=run)["memory"] == {"0": parts}
    call(user, "getScriptPrediction", job_id=run, code=404)
    script = {"path": "train.py", "plan": {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2}}}
    planned = call(user, "submitJob", {"kind": "script", "script": script, "layout": {"dp": 2}}, code=201)["id"]
    assert call(user, "getScriptPrediction", job_id=planned)["values"]
    call(user, "cancelJob", job_id=planned)
    call(user, "listCheckpoints", job_id=run)
    call(user, "resumeJob", job_id=run, code=409)
    Attempt.objects.filter(job_id=run).update(checkpoint=f"{run}/1/step-00000015")
    assert call(user, "listCheckpoints", job_id=run)[0]["name"] == f"{run}/1/step-00000015"
    copied = call(user, "copyJob", {"name": "again"}, job_id=run, code=201)
    call(user, "cancelJob", job_id=copied["id"])
    resumed = call(user, "resumeJob", {"change": {"name": "on"}}, job_id=run, code=201)
    call(user, "cancelJob", job_id=resumed["id"])
    opened = call(user, "openImport", {"files": [{"name": "trace_rank0.json", "size": 2}]}, code=201)["id"]
    path = call.operations["sendPart"][0].format(key=opened, place=0)
    call.check("sendPart", user.put(f"{path}?offset=0", b"{}", content_type="application/octet-stream"))
    call.check("sendPart", user.put(f"{path}?offset=9", b"{}", content_type="application/octet-stream"), 409)
    call(user, "getImportedTrace", key=opened, code=404)
    call(user, "getImport", key=opened)
    call(user, "listImports")
    call(user, "readImport", key=opened, code=422)
    again = call(user, "openImport", {"files": [{"name": "a", "size": 2}]}, code=201)["id"]
    call(user, "deleteImport", key=again, code=204)
    call(user, "listPrimitives")
    call(user, "getPrimitive", name="all_reduce")
    call(user, "getPrimitive", name="all_rduce", code=404)
    call(user, "cancelJob", job_id=call(user, "runPrimitive", {"ranks": 2}, name="all_reduce", code=201)["id"])


def hosts(call: DocumentClient, user: APIClient, staff: APIClient, nobody: APIClient) -> None:
    made = call(staff, "makeJoinToken", {"uses": 1, "note": "the new rack"}, code=201)
    call(nobody, "joinHost", machine("gpu-7", token=made["token"]), code=201)
    call(nobody, "joinHost", machine("gpu-7"))
    call(nobody, "joinHost", machine("gpu-8"), code=401)
    (changed,) = call(staff, "listJoinTokens")
    call(staff, "revokeJoinToken", key=changed["id"])
    assert len(call(user, "listHosts")) == 2
    for client in (user, staff):
        call(client, "getHost", name="host-a")
    call(user, "getHostProfile", name="host-a")
    call(staff, "drainHost", name="host-a")
    call(staff, "undrainHost", name="host-a")
    call(user, "calibrateHost", name="host-a", code=403)
    call(staff, "calibrateHost", name="host-a", code=201)
    Host.objects.update(last_seen=timezone.now())
    call(staff, "giveUpHost", name="host-a", code=409)
    Host.objects.update(last_seen=timezone.now() - timedelta(hours=1))
    call(staff, "giveUpHost", name="host-a")
    call(staff, "removeHost", name="gpu-7", code=204)


def queue(call: DocumentClient, user: APIClient, staff: APIClient) -> None:
    first, second = (call(user, "submitJob", GOOD, code=201)["id"] for _ in range(2))
    assert call(user, "getQueue")["jobs"]
    call(user, "pauseQueue", code=403)
    call.check("whatWouldStart", staff.get(f"/api/v1/queue/what-if?job={first}&priority=1"))
    call(staff, "whatWouldStart", code=400)
    call(staff, "pauseQueue")
    call(staff, "resumeQueue")
    Pool.objects.create(name="racks")
    call(staff, "pausePool", name="racks")
    call(staff, "resumePool", name="racks")
    call(staff, "moveInQueue", {"before": first}, job_id=second)
    call(staff, "actOnQueue", {"action": "cancel", "jobs": [first]})
    assert call(staff, "listAudit")
    call(staff, "moveInQueue", {"to": "top"}, job_id=first, code=409)


def runs(call: DocumentClient, user: APIClient) -> None:
    opened = call(user, "openRun", {"world_size": 2, "name": "by hand"}, code=201)
    node = Node(opened["run"], opened["token"])
    call.check("joinRun", node.join("gpu-7"))
    call.check("reportRun", node.report())
    path = call.operations["meetRun"][0].format(run=node.run, attempt=1, node=0)
    call.check("meetRun", node.client.post(path, {}, format="json", **node.headers))
    call.check("sendBatch", node.batch())
    call.check("sendBatch", node.batch(1, told=b"no batch"), 422)
    call(user, "giveUpRun", job_id=node.run, code=409)
    fall_silent(node)
    check_external_runs()
    call(user, "giveUpRun", job_id=node.run)
    call.check("reportRun", node.report(), 410)


def webhooks(call: DocumentClient, user: APIClient) -> None:
    fields = {"name": "chat", "url": "https://chat.example/7", "states": ["failed"]}
    made = call(user, "makeWebhook", fields, code=201, project="default")
    names = {"project": "default", "key": made["id"]}
    call(user, "makeWebhook", {**fields, "url": "http://2130706433/"}, code=422, project="default")
    assert call(user, "listWebhooks", project="default")
    assert "secret" not in call(user, "getWebhook", **names)
    call(user, "changeWebhook", {"active": False}, **names)
    assert call(user, "rotateWebhook", **names)["secret"] != made["secret"]
    sent = call(user, "pingWebhook", code=202, **names)
    call(user, "pingWebhook", code=409, **names)
    call(user, "redeliver", code=409, **names, delivery=sent["id"])
    Delivery.objects.update(due=None, outcome="delivered")
    call(user, "redeliver", code=202, **names, delivery=sent["id"])
    assert call(user, "listDeliveries", **names)
    call(user, "deleteWebhook", code=204, **names)
    call(user, "getWebhook", code=404, **names)


def test_job_of_an_older_version_matches_the_document(owner: User, api: Api, make_host: Callable[..., Host]) -> None:
    """Clients must be able to parse jobs that lack newer fields."""
    client = api(owner)
    document = client.get("/api/v1/schema").json()
    make_host()
    run = end_run(owner, make_summary(0.3))
    run.exit = {"outcome": "succeeded", "summary": None}
    run.save()
    Job.objects.update(estimate={"world_size": 4})
    response = client.get(f"/api/v1/jobs/{run.job_id}").json()
    schema = {"$ref": "#/components/schemas/JobDetail", "components": document["components"]}
    assert list_differences(schema, response) == []
