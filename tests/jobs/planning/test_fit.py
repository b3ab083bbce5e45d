"""Memory check of jobs before submission, over REST, in the form, and in the badge next to Submit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from rest_framework.test import APIClient

from jobs.models import Host, Job
from jobs.pages.forms import spec_form
from jobs.planning.fit import compute_fit, format_bytes
from planner.facts.parse_spec import parse_spec

Api = Callable[[User | None], APIClient]

# 8 billion parameters on one rank: about 128 GB with the optimizer, on an H100 with 80 GB.
LARGE: dict[str, Any] = {
    "name": "large",
    "model": {"preset": "llama3-8b"},
    "layout": {"dp": 2},
    "train": {"global_batch": 8, "micro_batches": 4, "seq_len": 4096, "precision": "bf16"},
    "resources": {"device": "cuda"},
}


def estimate(*, peak: int, device: int, share: float, ranks: int = 2, per_node: int = 8) -> dict[str, Any]:
    fits = peak <= device
    return {
        "peak_memory_bytes": peak,
        "memory_interval": {"share": share},
        "fits": fits,
        "tight": fits and device < peak * (1 + share),
        "world_size": ranks,
        "cluster": {"memory_bytes": device, "nodes": 1, "per_node": per_node, "accelerator": "H100 SXM"},
    }


@pytest.mark.parametrize(
    ("peak", "share", "state"),
    [(50, 0.1, "fits"), (95, 0.1, "tight"), (105, 0.1, "uncertain"), (120, 0.1, "unfit"), (250, 2.0, "uncertain")],
)
def test_memory_interval_decides_the_state(peak: int, share: float, state: str) -> None:
    job_estimate = estimate(peak=peak * 2**30, device=100 * 2**30, share=share)
    assert compute_fit(parse_spec(LARGE), job_estimate, []).state == state


def test_slurm_jobs_are_never_unfit() -> None:
    spec = parse_spec({**LARGE, "resources": {"device": "cuda", "engine": "slurm"}})
    assert compute_fit(spec, estimate(peak=2**40, device=2**30, share=0.1), []).state == "uncertain"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1536, "1.50 KiB"), (79.1 * 2**30, "79.1 GiB"), (2**40, "1.00 TiB")]
)
def test_formats_bytes(number: float, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.django_db
def test_rest_rejects_a_job_that_does_not_fit(owner: User, api: Api) -> None:
    response = api(owner).post("/api/v1/jobs", LARGE, format="json")
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["field"] == "layout"
    assert "GiB of memory per rank (at least" in error["message"]
    assert "H100 SXM has 79.1 GiB" in error["message"]
    assert "`allow_unfit`" in error["message"]
    assert Job.objects.count() == 0


@pytest.mark.django_db
def test_rest_queues_an_unfit_job_with_allow_unfit(owner: User, api: Api) -> None:
    response = api(owner).post("/api/v1/jobs", {**LARGE, "allow_unfit": True}, format="json")
    assert response.status_code == 201
    assert "allow_unfit" not in Job.objects.get().spec
    refused = api(owner).post("/api/v1/jobs", {**LARGE, "allow_unfit": "yes"}, format="json")
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "allow_unfit"


@pytest.mark.django_db
def test_dry_runs_and_jobs_on_unknown_cpus_are_accepted(owner: User, api: Api) -> None:
    client = api(owner)
    dry_run = {**LARGE, "kind": "dry_run"}
    assert client.post("/api/v1/jobs", dry_run, format="json").status_code == 201
    cpu_job = {**LARGE, "resources": {"device": "cpu"}}
    assert client.post("/api/v1/jobs", cpu_job, format="json").status_code == 201


@pytest.mark.django_db
def test_form_asks_for_confirmation_of_an_unfit_job(owner: User, client: Client) -> None:
    client.force_login(owner)
    values = {name: text for name, text in spec_form.format_values(LARGE).items() if text != "false"}
    refused = client.post("/jobs/new/", values)
    assert refused.status_code == 422
    page = refused.content.decode()
    assert "at least" in refused.context["errors"]["layout"]
    assert 'name="allow_unfit"' in page
    assert client.post("/jobs/new/", {**values, "allow_unfit": "true"}).status_code == 302
    assert Job.objects.get().name == "large"


def get_badge(client: Client, spec: dict[str, Any], **more: str) -> dict[str, Any]:
    values = {name: text for name, text in spec_form.format_values(spec).items() if text != "false"}
    response: dict[str, Any] = client.post("/plan/", {**values, **more}).json()["readiness"]
    return response


@pytest.mark.django_db
def test_badge_shows_fit_host_and_start(owner: User, make_host: Callable[..., Host], client: Client) -> None:
    client.force_login(owner)
    host = make_host("vm", slots=2)
    Host.objects.update(device="cuda", memory_bytes=80 * 2**30)
    small = {**LARGE, "model": {"preset": "gpt-tiny"}, "train": {}, "resources": {"device": "cuda"}}
    ready = get_badge(client, small)
    assert (ready["state"], ready["message"], ready["confirm"]) == ("ready", f"Fits. Starts now on {host.name}.", False)
    Host.objects.update(drained=True)
    assert get_badge(client, small)["message"] == "Fits. Not enough slots are free now. The job would wait."
    Host.objects.update(drained=False, problem="The disk is full.")
    sick = get_badge(client, small)
    assert (sick["state"], sick["message"]) == ("waits", "Fits. Host vm is sick: The disk is full. The job would wait.")
    make_host("other", slots=1)
    Host.objects.update(device="cuda", problem="The disk is full.")
    assert "All 2 connected hosts are sick. For example, host vm is sick" in get_badge(client, small)["message"]
    Host.objects.filter(name="vm").update(problem="")
    assert get_badge(client, small)["message"] == "Fits. Starts now on vm."


@pytest.mark.django_db
def test_badge_shows_unfit_job_and_missing_host(owner: User, client: Client) -> None:
    client.force_login(owner)
    result = get_badge(client, LARGE)
    assert (result["state"], result["confirm"]) == ("unfit", True)
    assert result["message"].startswith("Does not fit: ")
    assert result["message"].endswith("of 79.1 GiB per rank. No CUDA host is connected. The job would wait.")
    # The badge is about the host of the job, whatever hardware the estimate is for.
    assert get_badge(client, LARGE, cluster="b200")["message"] == result["message"]
