"""Rules for every page: full times, valid links, an icon, and colors of the product."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.staticfiles import finders
from django.urls import reverse

from jobs.models import Attempt, Job
from jobs.pages.jobs.compare import list_axis_figures, list_figures
from jobs.queue import actions
from jobs.templatetags.meshboard import in_unit, instant, moment
from tests.planner.wrong_specs import GOOD
from webapp.admin_theme import build_color_ramps, read_color_tokens

FULL_TIME = re.compile(r"\d{1,2} [A-Z][a-z]{2} \d{4} \d{2}:\d{2}(:\d{2})? UTC")


@pytest.fixture
def job(owner: User) -> Job:
    made, _ = actions.submit(owner, GOOD)
    return made


def test_times_have_date_and_zone() -> None:
    assert moment("2026-11-02T04:04:09+01:00").endswith(">2 Nov 2026 03:04 UTC</time>")
    assert instant("2026-11-02T04:04:09+01:00").endswith(">2 Nov 2026 03:04:09 UTC</time>")
    assert moment(None) == ""


def test_all_pages_show_full_times(job: Job, make_host: Any, client: Any, staff: User) -> None:
    make_host()
    client.force_login(staff)
    seen = 0
    for path in ("/", f"/jobs/{job.id}/", "/hosts/", "/hosts/host-a/", "/collectives/"):
        page = client.get(path).content.decode()
        times = re.findall(r"<time[^>]*>([^<]*)</time>", page) + re.findall(r'data-age="[^"]*" title="([^"]*)"', page)
        assert [text for text in times if not FULL_TIME.fullmatch(text)] == [], path
        seen += len(times)
    assert seen >= 4


def test_job_cancelled_before_its_start_has_no_charts(job: Job, client: Any, owner: User) -> None:
    client.force_login(owner)
    page = client.get(f"/jobs/{job.id}/").content.decode()
    sections = re.findall(r"<section.*?</section>", page, re.DOTALL)
    empty = [section for section in sections if 'class="waiting"' in section]
    assert len(empty) >= 4
    assert [section[:80] for section in empty if not re.search('data-needs="(measured|sent)"', section)] == []
    assert 'data-nothing="queued"' in page
    actions.cancel(job, owner.get_username())
    assert 'data-nothing="ran"' in client.get(f"/jobs/{job.id}/").content.decode()


@pytest.mark.parametrize(("capacity", "shown"), [(None, True), (1.0, False)])
def test_all_to_all_bandwidth_notes_equal_parts(capacity: float | None, shown: bool, client: Any, owner: User) -> None:
    moe = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 64, "capacity_factor": capacity}
    model = {"preset": "llama-tiny", "moe": moe}
    job, _ = actions.submit(owner, {**GOOD, "model": model, "layout": {"dp": 2, "ep": 2}})
    client.force_login(owner)
    page = client.get(reverse("job-detail", args=[job.id])).content.decode()
    assert ("The bus bandwidth (busbw) of an all-to-all assumes messages of equal size" in page) is shown


def test_compare_page_has_the_step_values_of_the_job_page(job: Job, client: Any, owner: User) -> None:
    """Parts are means, scaled to the median step time of the exit report."""
    again, _ = actions.submit(owner, GOOD)
    data = {"name": "data", "kind": "data", "seconds": 0.15, "waiting_s": 0.0}
    result = {"step_s": 0.3, "sure": 0.0, "steps": 64, "parts": [data]}
    exit_told = {"summary": {"measured": {"steps": 500, "step_s": 0.4}, "steps": 503, "tokens_per_s": 9.0}}
    for one in (job, again):
        Job.objects.filter(pk=one.pk).update(attempt=1)
        Attempt.objects.create(job=one, number=1, exit=exit_told, diagnosis={"planned": None, "measured": result})
    client.force_login(owner)
    page = client.get(f"/compare/?jobs={job.id},{again.id}").content.decode()
    [embedded] = re.findall(r'<script id="compared" type="application/json">(.*?)</script>', page)
    shown = [one["diagnosis"]["measured"] for one in json.loads(embedded)["jobs"]]
    assert [(one["step_s"], one["steps"], one["parts"][0]["seconds"]) for one in shown] == [(0.4, 500, 0.2)] * 2
    assert "are equally fast." in page
    assert "median step time of the last 500 steps (or fewer)" in page
    assert "tokens per second at the median step time" in page


ONE_RANK = {"layout": {"dp": 1, "tp": 1, "pp": 1}}


def test_compare_page_shows_traffic_per_step(job: Job) -> None:
    """A resumed run counts only its own steps."""
    row = {"phase": "step", "axis": "dp", "predicted_bytes": 0, "measured_bytes": 0}
    runs = [(30, {"steps": 30}), (40, {"steps": 90, "ran_steps": 40})]
    exits = {
        str(place): {**shown, "verdict": {"0": [{**row, "predicted_bytes": 7 * ran, "measured_bytes": 7 * ran}]}}
        for place, (ran, shown) in enumerate(runs)
    }
    [figure] = list_axis_figures([Job(id=place, spec=ONE_RANK) for place in exits], exits)
    assert (figure.title, figure.planned, figure.measured) == (
        "dp payload bytes per step, sum of all ranks",
        [7, 7],
        [7, 7],
    )
    assert [in_unit(value, figure.unit) for value in (64, 15_368_192)] == ["64 B", "15.37 MB"]  # as on the job page
    assert in_unit(0.0004, "seconds") == "400.0 µs"


def test_compare_page_shows_traffic_of_scripts_without_a_plan() -> None:
    def summarize(*payloads: int) -> dict[str, Any]:
        cell = {"axis": "world", "op": "all_reduce", "count": 4}
        rows = {str(rank): [{**cell, "phase": "step", "payload_bytes": n}] for rank, n in enumerate(payloads)}
        return {"steps": 4, "cells": rows}

    two = {"layout": {"dp": 2, "tp": 1, "pp": 1}}
    exits = {"1": summarize(400, 200), "2": summarize(400), "3": {**summarize(400, 200), "cells_left_out": 1}}
    [figure] = list_axis_figures([Job(id=job_id, spec=two) for job_id in exits], exits)
    assert (figure.planned, figure.measured) == ([None] * 3, [150, None, None])


def test_compare_page_has_no_totals_for_missing_ranks(job: Job) -> None:
    row = {"phase": "step", "axis": "dp", "predicted_bytes": 7, "measured_bytes": 7}
    shown = {"steps": 1, "verdict": {"0": [row]}, "peak_bytes": {"0": 5}}
    two = {"layout": {"dp": 2, "tp": 1, "pp": 1}}
    jobs = [Job(id="1", spec=ONE_RANK, estimate={}), Job(id="2", spec=two, estimate={})]
    exits = {"1": shown, "2": shown}
    [sent] = list_axis_figures(jobs, exits)
    assert sent.measured == [7, None]
    assert next(one for one in list_figures(jobs, exits, [None, None]) if "highest peak" in one.title).measured == [
        5,
        None,
    ]


@pytest.mark.parametrize(
    ("steps", "title", "measured"),
    [
        (((40,), (40, 120)), "loss at step 40, the last common step", [0.4, 0.4]),
        (((40,), (40,)), "loss at step 40", [0.4, 0.4]),
        (((6,), (12,)), "loss at the last step of each run", [0.06, 0.12]),
        (((), (12,)), "loss at step 12", [None, 0.12]),
    ],
)
def test_compares_losses_at_the_last_common_step(
    job: Job, steps: Any, title: str, measured: list[float | None]
) -> None:
    jobs = [Job(id=str(place), spec=ONE_RANK, estimate={}) for place in (1, 2)]
    exits = {
        one.id: {"losses": [{"step": step, "loss": step / 100, "time": 1.0} for step in ran]}
        for one, ran in zip(jobs, steps, strict=True)
    }
    row = next(one for one in list_figures(jobs, exits, [None, None]) if one.title.startswith("loss"))
    assert (row.title, row.measured) == (title, measured)


def test_admin_shows_the_time_zone(job: Job, client: Any, db: None) -> None:
    client.force_login(User.objects.create_superuser("root", password="root-password"))
    page = client.get("/admin/jobs/job/").content.decode()
    assert FULL_TIME.search(page)


def test_admin_link_is_shown_to_staff_only(staff: User, client: Any) -> None:
    link = "/admin/jobs/"
    staff.user_permissions.clear()
    client.force_login(staff)
    assert f'href="{link}"' not in client.get("/queue/").content.decode()
    staff.user_permissions.set(Permission.objects.filter(codename__in=("change_job", "view_project")))
    assert f'href="{link}"' in client.get("/queue/").content.decode()
    assert client.get(link).status_code == 200


def test_page_icons_exist(client: Any, db: None) -> None:
    client.force_login(User.objects.create_superuser("root", password="root-password"))
    for path in ("/", "/login/?next=/", "/admin/", "/admin/jobs/host/"):
        icons = re.findall(
            r'<link rel="icon"[^>]*href="/?static/([^"]+)"', client.get(path, follow=True).content.decode()
        )
        assert icons, path
        assert all(finders.find(name) for name in icons), path
    assert client.get("/favicon.ico")["Location"] == "/static/img/mark.svg"


def test_admin_uses_the_design_tokens(client: Any, db: None) -> None:
    light, dark = read_color_tokens()["accent"]
    primary = build_color_ramps()["primary"]
    assert (primary["600"], primary["400"]) == (light, dark)
    client.force_login(User.objects.create_superuser("root", password="root-password"))
    page = client.get("/admin/").content.decode()
    red, green, blue = (int(light[i : i + 2], 16) for i in (1, 3, 5))
    assert re.search(rf"--color-primary-600: rgb\({red},\s*{green},\s*{blue}\)", page)


@pytest.mark.parametrize("name", ["../x", "a/b", "<script>"])
def test_host_page_exists_for_any_name(client: Any, owner: User, make_host: Any, name: str) -> None:
    """An older installation can have host names that are invalid now."""
    make_host(name=name)
    client.force_login(owner)
    page = client.get("/hosts/")
    assert page.status_code == 200
    assert name == "<script>" or name in page.content.decode()
    assert client.get(reverse("host", args=[name])).status_code == 200
