"""The kinds of job: each has its line in every table, its page shows what is its own, and its end is judged."""

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


def spec_of(kind: str) -> dict[str, Any]:
    return {"kind": kind, "name": f"a {kind}", **copy.deepcopy(SPECS[kind])}


def test_every_kind_stands_in_both_tables() -> None:
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
def test_a_page_and_a_line_of_the_list_say_what_the_job_is(
    client: Client, owner: User, make_host: Callable[..., Host], kind: str, slots: int, head: str
) -> None:
    make_host()
    User.objects.filter(id=owner.id).update(is_superuser=kind == "calibrate", is_staff=kind == "calibrate")
    job, _ = actions.submit(User.objects.get(id=owner.id), spec_of(kind))
    assert job.num_slots == slots
    client.force_login(owner)
    page = client.get(f"/jobs/{job.id}/").content.decode()
    shown = page.partition('<script id="job"')[0]
    assert head in page
    other = {"train": "gpt-tiny", "dry_run": "llama-tiny"}.get(kind, "-tiny")
    assert other not in shown
    assert ('id="progress"' in shown) == (kind == "train")
    assert ('id="fidelity"' in shown) == (kind == "train")
    listed = client.get("/").content.decode()
    assert " · ".join(head.split(" · ")[:2]) in listed
    assert ("of 50" in listed) == (kind == "train")
    assert other not in listed


def test_a_module_is_named_as_one_starts_it(client: Client, owner: User) -> None:
    job, _ = actions.submit(owner, {**spec_of("script"), "script": {"module": "package.train", "args": ["-v"]}})
    client.force_login(owner)
    assert "script · -m package.train -v · 2 ranks" in client.get(f"/jobs/{job.id}/").content.decode()


def test_a_script_lists_the_steps_it_was_seen_to_take(client: Client, owner: User) -> None:
    job, _ = actions.submit(owner, spec_of("script"))
    Attempt.objects.create(job=job, number=1, exit={"summary": {**SUMMARY, "steps": 1200}})
    Job.objects.update(status=Status.SUCCEEDED)
    client.force_login(owner)
    assert ">1,200</span>" in client.get("/?col=steps").content.decode()


def test_a_script_that_runs_lists_those_it_was_seen_to_take_so_far(
    client: Client, owner: User, live_redis: redis.Redis
) -> None:
    job, _ = actions.submit(owner, spec_of("script"))
    Attempt.objects.create(job=job, number=1)
    Job.objects.update(status=Status.RUNNING)
    for steps in (7, 12):
        began = {"kind": "phase", "rank": 0, "time": float(steps), "phase": "step"}
        said = [began, {**began, "steps": steps}]
        live_redis.xadd(telemetry_stream(job.id, 1), {"b": msgpack.packb({"items": said})})
    client.force_login(owner)
    assert ">12</span>" in client.get("/?col=steps").content.decode()


def test_arguments_of_a_megabyte_do_not_fill_the_list(client: Client, owner: User) -> None:
    spec = spec_of("script")
    spec["script"]["args"] = ["x" * 4000] * 200
    actions.submit(owner, spec)
    client.force_login(owner)
    assert len(client.get("/").content) < 20_000


@pytest.mark.parametrize(("section", "owner_kind"), [("script", "script"), ("lab", "lab")])
@pytest.mark.parametrize("kind", list(SPECS))
def test_a_part_of_one_kind_is_refused_to_the_others(kind: str, section: str, owner_kind: str) -> None:
    if kind == owner_kind:
        return
    with pytest.raises(
        SpecError, match=f"`{section}` is set, but the kind is {kind}. Omit it, or use kind {owner_kind}."
    ):
        parse_spec({**spec_of(kind), section: SPECS[owner_kind][section]})


@pytest.mark.parametrize("kind", ["script", "lab", "calibrate"])
def test_a_kind_that_needs_no_model_still_refuses_a_senseless_one(kind: str) -> None:
    model = {"preset": "gpt-tiny", "num_heads": 8, "num_kv_heads": 3, "hidden_size": 1}
    with pytest.raises(SpecError, match="hidden_size 1 is not divisible by 8"):
        parse_spec({**spec_of(kind), "model": model})


def told(outcome: str = "succeeded", **summary: Any) -> Any:
    return {"outcome": outcome, "reason": f"it {outcome}", "log_tail": [], "summary": {**SUMMARY, **summary}}


@pytest.mark.parametrize(
    ("kind", "report", "status", "reason"),
    [
        ("train", told(), Status.SUCCEEDED, "it succeeded"),
        ("train", told("failed"), Status.FAILED, "it failed"),
        ("train", told("cancelled"), Status.FAILED, "canceled by a request in Redis that did not come from Meshboard"),
        ("train", {**told("lost"), "summary": None}, Status.LOST, "it lost"),
        ("calibrate", told(profile=PROFILE), Status.SUCCEEDED, "it succeeded"),
        ("calibrate", told(), Status.FAILED, "the host sent no valid calibration profile"),
        ("calibrate", told("failed"), Status.FAILED, "it failed"),
        ("calibrate", {**told(), "summary": None}, Status.FAILED, "the host sent no valid calibration profile"),
        ("lab", told(lab=RESULT), Status.SUCCEEDED, "it succeeded"),
        ("lab", told(lab={**RESULT, "points": [{**POINT, "wrong": 3}]}), Status.FAILED, "3 elements are wrong"),
        ("lab", told(), Status.FAILED, "the host sent no valid benchmark result"),
        ("script", told(profile=PROFILE, lab=RESULT), Status.SUCCEEDED, "it succeeded"),
    ],
)
def test_an_end_is_judged_by_what_its_kind_must_bring(kind: str, report: Any, status: Status, reason: str) -> None:
    before = copy.deepcopy(report)
    ending = evaluate_exit(spec_of(kind), report)
    assert (ending.status, ending.reason.split(":")[0]) == (status, reason)
    assert (ending.profile is not None) == (kind == "calibrate" and status == Status.SUCCEEDED)
    assert "profile" not in (ending.report["summary"] or {})
    assert report == before
