"""Every answer of the API is what the document says of it: no field missing, of another type, or left unsaid."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.cache import cache
from django.utils import timezone
from jsonschema import Draft202012Validator
from rest_framework.test import APIClient

from jobs.models import Host, Job
from tests.jobs.test_calibration import PROFILE
from tests.jobs.test_learned import ended, summary
from tests.planner.wrong_specs import GOOD

PIPELINE = {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2}
TOO_LARGE: dict[str, Any] = {
    "model": {"preset": "llama3-8b"},
    "layout": {"dp": 8},
    "train": {"global_batch": 64, "micro_batches": 8, "seq_len": 4096, "precision": "bf16"},
    "resources": {"device": "cuda"},
}
SEARCH = {"spec": {"model": {"preset": "gpt-tiny"}}, "ranks": 4, "cluster": "h100"}


@pytest.fixture(autouse=True)
def _fresh_throttle() -> None:
    cache.clear()


def closed(part: Any) -> Any:
    """A schema in which objects have the fields that are told of and no others, and what is stored is not older."""
    if isinstance(part, list):
        return [closed(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    told = {name: closed(inner) for name, inner in part.items()}
    if isinstance(told.get("properties"), dict):
        told.setdefault("additionalProperties", False)
    if any("$ref" in choice for choice in told.get("anyOf", [])):
        told["anyOf"] = [
            choice for choice in told["anyOf"] if choice != {"type": "object", "additionalProperties": True}
        ]
    return told


class Asked:
    """Asks as the document says one may, and holds each answer against it. `operations`: those not asked yet."""

    def __init__(self, document: Any) -> None:
        self._components = closed(document["components"])
        self._paths = document["paths"]
        self.operations = {
            operation["operationId"]: (path, method)
            for path, methods in self._paths.items()
            for method, operation in methods.items()
        }
        self.unasked = set(self.operations)

    def __call__(self, client: APIClient, operation: str, body: object = None, *, code: int = 200, **names: str) -> Any:
        path, method = self.operations[operation]
        answer = getattr(client, method)(path.format(**names), body, format="json")
        assert answer.status_code == code, answer.content
        content = self._paths[path][method]["responses"][str(code)]["content"]["application/json"]["schema"]
        validator = Draft202012Validator({**closed(content), "components": self._components})
        problems = [
            f"{operation}: {error.json_path}: {error.message[:300]}" for error in validator.iter_errors(answer.json())
        ]
        assert problems == []
        self.unasked -= {operation}
        return answer.json()


def test_every_answer_is_what_the_document_says(
    owner: User, staff: User, api: Callable[[User | None], APIClient], make_host: Callable[..., Host]
) -> None:
    user, chief = api(owner), api(staff)
    asked = Asked(user.get("/api/v1/schema").json())
    make_host()
    Host.objects.update(profile=PROFILE, profiled=timezone.now())

    asked(user, "getSchema")
    for plan in (
        GOOD,
        {**GOOD, "layout": {"dp": 3}},
        {**GOOD, "layout": PIPELINE},
        {**GOOD, "layout": "auto"},
        TOO_LARGE,
    ):
        told = asked(user, "plan", plan)
    assert told["suggestions"], "a plan that does not fit is among them"
    assert asked(user, "searchPlans", SEARCH)["neighbours"]
    asked(user, "searchPlans", {"spec": []}, code=422)
    asked(user, "explainPlan", {"spec": GOOD})
    asked(user, "listClusters")
    asked(user, "listTemplates")
    asked(user, "listPresets")

    chosen = asked(user, "submitJob", {**GOOD, "layout": "auto"}, code=201)
    assert chosen["chosen"]["runners_up"]
    asked(user, "submitJob", {**GOOD, "layout": {"dp": 3}}, code=422)
    asked(user, "cancelJob", job_id=chosen["id"])
    asked(user, "cancelJob", job_id=chosen["id"], code=409)
    asked(user, "requeueJob", job_id=chosen["id"])
    asked(user, "cancelJob", job_id=chosen["id"])
    run = ended(owner, {**summary(0.3), "losses": [{"step": 1, "loss": 4.0, "time": 1.0}]}, layout={"tp": 4})
    assert asked(user, "getJob", job_id=run.job_id)["exit"]["summary"]["cells"]
    assert len(asked(user, "listJobs")) == 2
    advice = asked(user, "adviseJob", job_id=run.job_id)
    assert advice["options"] or advice["unsure"]
    asked(user, "adviseJob", job_id=chosen["id"], code=409)
    asked(user, "getJob", job_id="nobodys", code=404)

    asked(user, "listHosts")
    asked(user, "getHostProfile", name="host-a")
    asked(user, "calibrateHost", name="host-a", code=403)
    asked(chief, "calibrateHost", name="host-a", code=201)
    asked(chief, "giveUpHost", name="host-a", code=409)
    Host.objects.update(last_seen=timezone.now() - timedelta(hours=1))
    asked(chief, "giveUpHost", name="host-a")
    asked(api(None), "listJobs", code=401)
    assert asked.unasked == set(), "what a new operation answers is asked here too"


def test_a_job_that_an_older_version_stored_is_described_too(
    owner: User, api: Callable[[User | None], APIClient], make_host: Callable[..., Host]
) -> None:
    """Fields that came later are missing from it: a client that trusts the document must not fall over."""
    client = api(owner)
    document = client.get("/api/v1/schema").json()
    make_host()
    run = ended(owner, summary(0.3))
    run.exit = {"outcome": "succeeded", "summary": None}
    run.save()
    Job.objects.update(estimate={"world_size": 4})
    answer = client.get(f"/api/v1/jobs/{run.job_id}").json()
    described = {"$ref": "#/components/schemas/JobDetail", "components": document["components"]}
    assert [error.message for error in Draft202012Validator(described).iter_errors(answer)] == []
