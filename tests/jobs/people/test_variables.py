"""Secret variables of projects, which only their jobs can read."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.test import APIClient

from contracts.names import host_queue
from contracts.security import MAX_VARIABLE_BYTES, MAX_VARIABLES, DecryptionError, decrypt_variables
from jobs.core.credentials import derive_signing_keys
from jobs.models import Attempt, Host, Job, Member, Membership, Project, Status
from jobs.people import variables
from jobs.queue import actions
from jobs.queue.orders import deliver
from jobs.queue.scheduling.scheduler import schedule
from planner.facts.validation import SpecError
from tests.jobs.people.plaintext import find_tables_with
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
Members = dict[str, User]
SECRET = "not-to-be-seen-7f3a"


def set_variable(api: Api, members: Members, name: str = "HF_TOKEN", value: str = SECRET) -> Any:
    path = f"/api/v1/projects/team/variables/{name}"
    return api(members["admin"]).put(path, {"value": value}, format="json")


def test_no_page_or_log_contains_a_value(
    members: Members, staff: User, api: Api, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    response = set_variable(api, members)
    assert response.status_code == 200
    client.force_login(members["admin"])
    client.post("/projects/team/variables/", {"name": "JOB_KEY", "value": SECRET + "-too"})
    assert api(members["admin"]).post("/api/v1/jobs", {**GOOD, "project": "team"}, format="json").status_code == 201
    job = Job.objects.get()
    texts = [response.content.decode(), caplog.text]
    for who in (members["admin"], staff):
        client.force_login(who)
        paths = (
            *("/projects/team/", f"/jobs/{job.id}/", "/api/v1/projects/team/variables", "/api/v1/projects/team"),
            *(f"/api/v1/jobs/{job.id}", "/api/v1/projects"),
        )
        texts += [client.get(path).content.decode() for path in paths]
    client.force_login(staff)
    texts.append(client.get("/api/v1/audit").content.decode())
    assert "HF_TOKEN" in texts[-1]
    assert not any(SECRET in text for text in texts)


def test_database_contains_no_readable_value(
    members: Members, api: Api, make_host: Callable[..., Host], live_redis: redis.Redis
) -> None:
    """The value stays encrypted from its creation to the launch of a job."""
    set_variable(api, members)
    actions.submit(members["submitter"], {**GOOD, "project": "team"})
    make_host()
    schedule()
    assert find_tables_with(SECRET) == []
    get_launch_order(live_redis)
    assert find_tables_with(SECRET) == []


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "as it is": bytes,
    "base64": base64.b64encode,
    "urlsafe base64 behind a prefix": lambda raw: b"v1:" + base64.urlsafe_b64encode(b"k" + raw),
    "base32": base64.b32encode,
    "hexadecimal": lambda raw: raw.hex().encode(),
    "backwards": lambda raw: raw[::-1],
    "in JSON": lambda raw: json.dumps({"value": raw.decode()}).encode(),
}


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS.keys())
def test_search_finds_encoded_values(
    encode: Callable[[bytes], bytes], team: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search of the previous test finds values in other encodings."""
    monkeypatch.setattr(variables, "get_cipher", lambda _purpose: SimpleNamespace(encrypt=encode))
    variables.set_variable(team, "HF_TOKEN", SECRET, "admin")
    assert find_tables_with(SECRET) == ["jobs_projectvariable"]


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHON_EXEC", "PET_RDZV_ENDPOINT", "MASTER_ADDR"),
        *("NCCL_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "MESHBOARD_HOST_KEY", "HOME", "OMP_NUM_THREADS"),
        *("hf_token", "HF-TOKEN", "HF_TOKEN\n", "HF_TOKEN=x", " HF_TOKEN", "JOB_" + "X" * 100, "XJOB_A"),
    ],
)
def test_rejects_names_that_are_not_allowed(name: str, team: Project) -> None:
    with pytest.raises(SpecError) as refused:
        variables.set_variable(team, name, "x", "admin")
    assert refused.value.problems[0].field == "variable"
    assert not team.variables.exists()


def test_limits_size_and_number_of_variables(team: Project) -> None:
    with pytest.raises(SpecError, match="16,386 bytes"):
        variables.set_variable(team, "JOB_A", "é" * (MAX_VARIABLE_BYTES // 2 + 1), "admin")
    for number in range(4):
        variables.set_variable(team, f"JOB_{number}", "x" * MAX_VARIABLE_BYTES, "admin")
    with pytest.raises(SpecError, match="the other variables have 65,536"):
        variables.set_variable(team, "JOB_MORE", "x", "admin")
    variables.set_variable(team, "JOB_3", "", "admin")
    for number in range(MAX_VARIABLES - 4):
        variables.set_variable(team, f"AWS_{number}", "", "admin")
    with pytest.raises(SpecError, match="already has 50 variables, the maximum"):
        variables.set_variable(team, "AWS_MORE", "", "admin")


def get_launch_order(client: redis.Redis) -> dict[str, Any]:
    """Return the launch order in Redis, and check that Redis contains no value."""
    deliver(client)
    everything = str([client.dump(key) for key in client.scan_iter()])
    assert SECRET not in everything
    sent = json.loads(client.rpop(host_queue("host-a")))
    body = base64.b64decode(sent["body"]).decode()
    assert SECRET not in body
    order: dict[str, Any] = json.loads(body)[0][0]
    return order


def start_job(members: Members, make_host: Callable[..., Host]) -> Job:
    make_host()
    Host.objects.update(generation=1)
    job, _ = actions.submit(members["submitter"], {**GOOD, "project": "team"})
    assert schedule() == 1
    return job


def test_order_encrypts_variables_for_host_and_attempt(
    members: Members, make_host: Callable[..., Host], live_redis: redis.Redis, api: Api
) -> None:
    set_variable(api, members)
    job = start_job(members, make_host)
    order = get_launch_order(live_redis)
    own, other = (bytes.fromhex(derive_signing_keys(name, 1)[0]) for name in ("host-a", "host-b"))
    assert decrypt_variables(own, job.id, 1, order["variables"]) == {"HF_TOKEN": SECRET}
    with pytest.raises(DecryptionError, match="the key of this host"):
        decrypt_variables(other, job.id, 1, order["variables"])
    with pytest.raises(DecryptionError, match="another attempt"):
        decrypt_variables(own, job.id, 2, order["variables"])


def test_former_member_gets_no_variables(
    members: Members, make_host: Callable[..., Host], live_redis: redis.Redis, api: Api
) -> None:
    set_variable(api, members)
    start_job(members, make_host)
    Membership.objects.filter(user=members["submitter"]).delete()
    assert "variables" not in get_launch_order(live_redis)


def test_job_of_another_project_gets_no_variables(
    members: Members, make_host: Callable[..., Host], live_redis: redis.Redis, api: Api
) -> None:
    set_variable(api, members)
    make_host()
    actions.submit(members["submitter"], GOOD)
    assert schedule() == 1
    assert "variables" not in get_launch_order(live_redis)


def test_reads_variables_after_a_key_rotation(members: Members, settings: Any, api: Api) -> None:
    set_variable(api, members)
    before, settings.SECRET_KEY = settings.SECRET_KEY, "another-0123456789-0123456789-0123456789-0123456789"
    settings.SECRET_KEY_FALLBACKS = [before]
    job, _ = actions.submit(members["submitter"], {**GOOD, "project": "team"})
    attempt = Attempt.objects.create(job=job, number=1)
    host = Host(name="host-a", generation=1)
    member = Member(attempt=attempt, host=host)
    sealed = variables.encrypt_for_host(member, job)
    old_host, new_host = (bytes.fromhex(key) for key in reversed(derive_signing_keys("host-a", 1)))
    assert (
        decrypt_variables(old_host, job.id, 1, sealed)
        == decrypt_variables(new_host, job.id, 1, sealed)
        == {"HF_TOKEN": SECRET}
    )


def test_job_with_unreadable_variables_fails(
    members: Members, make_host: Callable[..., Host], live_redis: redis.Redis, settings: Any, api: Api
) -> None:
    set_variable(api, members)
    job = start_job(members, make_host)
    settings.SECRET_KEY = "another-0123456789-0123456789-0123456789-0123456789"
    deliver(live_redis)
    job.refresh_from_db()
    assert job.status == Status.FAILED
    assert "Set the variables again" in job.history.last().reason


def test_sets_unreadable_variables_one_at_a_time(members: Members, settings: Any, api: Api) -> None:
    """An unreadable variable must not block the change of another one."""
    for name in ("JOB_A", "JOB_B"):
        set_variable(api, members, name)
    settings.SECRET_KEY = "another-0123456789-0123456789-0123456789-0123456789"
    assert [set_variable(api, members, name, "new").status_code for name in ("JOB_A", "JOB_B")] == [200, 200]


def test_rejects_slurm_jobs_in_projects_with_variables(members: Members, settings: Any, api: Api) -> None:
    settings.SLURM = {"folder": "/shared"}
    set_variable(api, members)
    spec = {**GOOD, "project": "team", "resources": {"engine": "slurm"}}
    with pytest.raises(SpecError) as refused:
        actions.submit(members["submitter"], spec)
    assert "resources.engine" in [problem.field for problem in refused.value.problems]
