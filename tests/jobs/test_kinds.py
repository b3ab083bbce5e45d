"""Kinds of jobs: their tables, their pages, and their final status."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, get_args

import msgpack
import pytest
import redis
from django.contrib.auth.models import User
from django.template.loader import get_template
from django.test import Client
from django.urls import reverse

from contracts.names import telemetry_stream
from jobs.core import kinds
from jobs.models import Attempt, Host, Job, Status
from jobs.queue import actions
from jobs.queue.attempt_completion import evaluate_exit
from planner.facts.kinds import KINDS
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import JobKind
from planner.facts.validation import SpecError
from tests.jobs.collectives.test_benchmarks import POINT, RESULT
from tests.jobs.planning.test_calibration import PROFILE

SPECS: dict[str, dict[str, Any]] = {
    "train": {"model": {"preset": "llama-tiny"}, "layout": {"dp": 2, "tp": 2}},
    "script": {"layout": {"dp": 2}, "script": {"path": "a/train.py", "args": ["--name", "two words"]}},
    "dry_run": {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 8}, "dry_ranks": [0, 7]},
    "lab": {"layout": {"dp": 2}, "lab": {"primitives": ["barrier", "broadcast"]}},
    "calibrate": {"layout": {"dp": 4}, "resources": {"host": "host-a"}},
}
SUMMARY: dict[str, Any] = {
    "steps": 0,
    "tokens_per_s": None,
    "losses": [],
    "eval_losses": [],
    "cells": {},
    "verdict": {},
}


def make_spec(kind: str) -> dict[str, Any]:
    return {"kind": kind, "name": f"a {kind}", **copy.deepcopy(SPECS[kind])}


def test_every_kind_is_in_all_tables() -> None:
    assert set(KINDS) == set(kinds.KINDS) == set(get_args(JobKind)) == set(SPECS)
    for kind in kinds.KINDS.values():
        for tabs in (kind.tabs, kinds.get_external_tabs(kind)):
            assert list(tabs) == [tab for tab in kinds.TABS if tab in tabs], "tabs have one order"
            assert all(get_template(f"jobs/panels/{name}.html") for names in tabs.values() for name in names)
        assert kind.form is None or reverse(kind.form)


@pytest.mark.parametrize(
    ("kind", "slots", "head"),
    [
        ("train", 4, "training run · llama-tiny · dp 2 x tp 2"),
        ("script", 2, "script · a/train.py --name &#x27;two words&#x27; · 2 ranks"),
        ("dry_run", 1, "dry run · gpt-tiny · dp 8"),
        ("lab", 2, "benchmark · 2 collectives · 2 ranks"),
        ("calibrate", 4, "calibration · host-a · 4 ranks"),
    ],
)
def test_page_and_list_describe_the_job(
    client: Client, owner: User, make_host: Callable[..., Host], kind: str, slots: int, head: str
) -> None:
    make_host()
    User.objects.filter(id=owner.id).update(is_superuser=kind == "calibrate", is_staff=kind == "calibrate")
    job, _ = actions.submit(User.objects.get(id=owner.id), make_spec(kind))
    assert job.num_slots == slots
    client.force_login(owner)
    page = client.get(f"/jobs/{job.id}/").content.decode()
    visible = page.partition('<script id="job"')[0]
    assert head in page
    other = {"train": "gpt-tiny", "dry_run": "llama-tiny"}.get(kind, "-tiny")
    assert other not in visible
    assert ('id="progress"' in visible) == (kind == "train")
    assert ('id="fidelity"' in visible) == (kind == "train")
    job_list = client.get("/").content.decode()
    assert " · ".join(head.split(" · ")[:2]) in job_list
    assert ("of 50" in job_list) == (kind == "train")
    assert other not in job_list


def test_page_shows_a_module_with_its_arguments(client: Client, owner: User) -> None:
    job, _ = actions.submit(owner, {**make_spec("script"), "script": {"module": "package.train", "args": ["-v"]}})
    client.force_login(owner)
    assert "script · -m package.train -v · 2 ranks" in client.get(f"/jobs/{job.id}/").content.decode()


def test_list_shows_steps_of_an_ended_script(client: Client, owner: User) -> None:
    job, _ = actions.submit(owner, make_spec("script"))
    Attempt.objects.create(job=job, number=1, exit={"summary": {**SUMMARY, "steps": 1200}})
    Job.objects.update(status=Status.SUCCEEDED)
    client.force_login(owner)
    assert ">1,200</span>" in client.get("/?col=steps").content.decode()


def test_list_shows_steps_of_a_running_script(client: Client, owner: User, live_redis: redis.Redis) -> None:
    job, _ = actions.submit(owner, make_spec("script"))
    Attempt.objects.create(job=job, number=1)
    Job.objects.update(status=Status.RUNNING)
    for steps in (7, 12):
        phase = {"kind": "phase", "rank": 0, "time": float(steps), "phase": "step"}
        items = [phase, {**phase, "steps": steps}]
        live_redis.xadd(telemetry_stream(job.id, 1), {"b": msgpack.packb({"items": items})})
    client.force_login(owner)
    assert ">12</span>" in client.get("/?col=steps").content.decode()


def test_list_truncates_long_arguments(client: Client, owner: User) -> None:
    spec = make_spec("script")
    spec["script"]["args"] = ["x" * 4000] * 200
    actions.submit(owner, spec)
    client.force_login(owner)
    assert len(client.get("/").content) < 20_000


@pytest.mark.parametrize(("section", "owner_kind"), [("script", "script"), ("lab", "lab")])
@pytest.mark.parametrize("kind", list(SPECS))
def test_rejects_sections_of_other_kinds(kind: str, section: str, owner_kind: str) -> None:
    if kind == owner_kind:
        return
    with pytest.raises(
        SpecError, match=f"`{section}` is set, but the kind is {kind}. Omit it, or use kind {owner_kind}."
    ):
        parse_spec({**make_spec(kind), section: SPECS[owner_kind][section]})


@pytest.mark.parametrize("kind", ["script", "lab", "calibrate"])
def test_rejects_an_invalid_unused_model(kind: str) -> None:
    model = {"preset": "gpt-tiny", "num_heads": 8, "num_kv_heads": 3, "hidden_size": 1}
    with pytest.raises(SpecError, match="hidden_size 1 is not divisible by 8"):
        parse_spec({**make_spec(kind), "model": model})


def make_report(outcome: str = "succeeded", **summary: Any) -> Any:
    return {"outcome": outcome, "reason": f"it {outcome}", "log_tail": [], "summary": {**SUMMARY, **summary}}


@pytest.mark.parametrize(
    ("kind", "report", "status", "reason"),
    [
        ("train", make_report(), Status.SUCCEEDED, "it succeeded"),
        ("train", make_report("failed"), Status.FAILED, "it failed"),
        (
            "train",
            make_report("cancelled"),
            Status.FAILED,
            "canceled by a request in Redis that did not come from Meshboard",
        ),
        ("train", {**make_report("lost"), "summary": None}, Status.LOST, "it lost"),
        ("calibrate", make_report(profile=PROFILE), Status.SUCCEEDED, "it succeeded"),
        ("calibrate", make_report(), Status.FAILED, "the host sent no valid calibration profile"),
        ("calibrate", make_report("failed"), Status.FAILED, "it failed"),
        ("calibrate", {**make_report(), "summary": None}, Status.FAILED, "the host sent no valid calibration profile"),
        ("lab", make_report(lab=RESULT), Status.SUCCEEDED, "it succeeded"),
        ("lab", make_report(lab={**RESULT, "points": [{**POINT, "wrong": 3}]}), Status.FAILED, "3 elements are wrong"),
        ("lab", make_report(), Status.FAILED, "the host sent no valid benchmark result"),
        ("script", make_report(profile=PROFILE, lab=RESULT), Status.SUCCEEDED, "it succeeded"),
    ],
)
def test_final_status_depends_on_the_result_of_the_kind(kind: str, report: Any, status: Status, reason: str) -> None:
    before = copy.deepcopy(report)
    ending = evaluate_exit(make_spec(kind), report)
    assert (ending.status, ending.reason.split(":")[0]) == (status, reason)
    assert (ending.profile is not None) == (kind == "calibrate" and status == Status.SUCCEEDED)
    assert "profile" not in (ending.report["summary"] or {})
    assert report == before
