"""Store baselines by branch, with access checks and limits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.models import User
from hypothesis import given, settings
from hypothesis import strategies as st
from rest_framework.test import APIClient

from jobs.models import AuditEntry, BaselineRun, Host, Job, Membership, Project, Role
from jobs.models.validators import find_branch_problem
from jobs.runs import baselines
from jobs.runs.baselines import (
    MAX_TRAFFIC_ROWS,
    NoFactsError,
    compute_facts,
    explain_difference,
    select_measured_fields,
)
from meshboard.errors import WrongError
from meshboard.gate import baseline_from_branch, check_same_spec, parse_facts, parse_job
from planner.facts.parse_spec import parse_spec
from planner.facts.resources import SoftwareSpec
from tests.jobs.planning.test_measured_runs import end_run, make_summary
from tests.planner.wrong_specs import GOOD

Api = Callable[[User | None], APIClient]
MAIN = "/api/v1/projects/default/baselines/main"


@pytest.fixture
def run(owner: User, make_host: Callable[..., Host]) -> str:
    make_host()
    return str(end_run(owner, {**make_summary(0.3), "losses": [{"step": 1, "loss": 4.0, "time": 1.0}]}).job_id)


def put(client: APIClient, job: object, where: str = MAIN) -> Any:
    return client.put(where, {"job": job}, format="json")


def messages(answer: Any) -> dict[str, str]:
    return {error["field"]: error["message"] for error in answer.json()["errors"]}


def test_baseline_outlives_its_job(run: str, owner: User, api: Api) -> None:
    client = api(owner)
    told = put(client, run)
    assert told.status_code == 200, told.content
    detail = client.get(f"/api/v1/jobs/{run}").json()
    Job.objects.filter(id=run).delete()
    (one,) = client.get(MAIN).json()["runs"]
    assert (one["job"], one["by"]) == (run, "owner")
    ours, theirs = parse_facts(one["name"], one["facts"]), parse_job(detail)
    for measure in ("bytes.tp", "calls.tp.all_reduce", "step_time", "peak_memory", "loss@1", "tokens_per_s"):
        assert ours.get_value(measure) == theirs.get_value(measure), measure
    assert [row["branch"] for row in client.get("/api/v1/projects/default/baselines").json()] == ["main"]
    assert client.delete(MAIN).status_code == 204
    assert client.get(MAIN).status_code == client.delete(MAIN).status_code == 404
    assert list(AuditEntry.objects.filter(kind="baseline").values_list("what", "name")) == [
        ("forget baseline", "default/main"),
        ("set baseline", "default/main"),
    ]


def test_branch_keeps_the_newest_runs_and_each_job_once(run: str, owner: User, api: Api) -> None:
    client = api(owner)
    runs = [
        BaselineRun(project="default", branch="main", owner=owner, job=f"job{n}", facts={}, name="") for n in range(25)
    ]
    for old in runs:
        old.save()
    put(client, run)
    told = put(client, run).json()
    kept_of = [one["job"] for one in (*told["runs"], *told["left_aside"])]
    assert kept_of == [run, *(f"job{n}" for n in range(24, 5, -1))]
    assert BaselineRun.objects.count() == baselines.MAX_RUNS_PER_BRANCH


def test_mean_excludes_runs_with_another_spec(run: str, owner: User, api: Api) -> None:
    """Runs with an older spec of the branch changed the means of time and memory."""
    client = api(owner)
    put(client, run)
    told = put(
        client, end_run(owner, make_summary(9.0), layout={**GOOD["layout"], "sequence_parallel": True}).job_id
    ).json()
    assert [one.step_time for one in baseline_from_branch("main", told).runs] == [9.0]
    assert [(one["job"], one["why"]) for one in told["left_aside"]] == [
        (run, "layout.sequence_parallel false, not true")
    ]
    again = end_run(owner, make_summary(0.5), name="another", train={**GOOD["train"], "seed": 7}).job_id
    told = put(client, again).json()
    assert [one["job"] for one in told["runs"]] == [again, run], "those of before are alike again"
    assert (told["spec"]["train"]["seed"], "name" in told["spec"]) == (7, False)
    assert len(told["left_aside"]) == 1
    BaselineRun.objects.filter(job=run).update(spec=None)
    told = client.get(MAIN).json()
    assert told["left_aside"][1]["why"] == "the spec of this job is not stored"


SPEC = parse_spec(GOOD).model_dump(mode="json")
CHANGES: list[tuple[dict[str, Any], bool]] = [
    ({"name": "other", "project": "vision", "retry": {"max_attempts": 3}}, True),
    ({"train": {**SPEC["train"], "seed": 5}}, True),
    ({"model": {**SPEC["model"], "preset": None}}, True),
    ({"resources": {**SPEC["resources"], "host": "host-a", "pool": "p", "labels": ["a"], "max_hosts": 1}}, True),
    ({"resources": {**SPEC["resources"], "software": SoftwareSpec().model_dump()}}, True),
    ({"train": {**SPEC["train"], "steps": 51}}, False),
    ({"model": {**SPEC["model"], "num_layers": 9}}, False),
    ({"layout": {**SPEC["layout"], "zero": 1}}, False),
    ({"resources": {**SPEC["resources"], "device": "cuda"}}, False),
    ({"resources": {**SPEC["resources"], "engine": "slurm", "slurm": {"nodes": 2}}}, False),
    ({"kind": "dry_run"}, False),
]


@pytest.mark.parametrize(("change", "alike"), CHANGES)
def test_board_and_client_agree_which_runs_are_comparable(change: dict[str, Any], alike: bool) -> None:
    other = {**SPEC, **change}
    assert (explain_difference(select_measured_fields(other), select_measured_fields(SPEC)) == "") is alike
    try:
        check_same_spec([{"id": "j", "spec": SPEC}, {"id": "k", "spec": other}])
    except WrongError:
        assert not alike
    else:
        assert alike


def test_later_field_has_its_default() -> None:
    older = {**SPEC, "train": {name: value for name, value in SPEC["train"].items() if name != "document_end"}}
    assert explain_difference(select_measured_fields(older), select_measured_fields(SPEC)) == ""
    newer = {**SPEC, "train": {**SPEC["train"], "document_end": 3}}
    assert (
        explain_difference(select_measured_fields(older), select_measured_fields(newer))
        == "train.document_end null, not 3"
    )


@pytest.mark.parametrize(
    "branch", ["feature/x", "fix/#123", "v1.0+build", "a" * 200, "größe/研究", "שלום", "it's 100%!", "😀"]
)
def test_accepts_branch_names_of_git(run: str, owner: User, api: Api, branch: str) -> None:
    branch = branch.replace(" ", "\u3000")  # one that git takes
    where = MAIN.replace("main", quote(branch))
    told = put(api(owner), run, where)
    assert told.status_code == 200, told.content
    assert told.json()["branch"] == branch
    assert api(owner).get(where).json()["branch"] == branch


NAMES = [
    *("main", "größe/研究", "a@b", "a.b", "a{b", "100%", "a;b&c|d", "@x", "heads", "x-", "a.lockx", "_x", "+x", "#1"),
    *("a b", "a..b", "a~1", "a^", "a:b", "a?", "a*", "a[b", "a\\b", "a\tb", "a\x7fb", "a@{b"),
    *("-x", "@", "HEAD", "/a", "a/", "a//b", ".a", "a/.b", "a.", "a.lock", "a.lock/b", "a/..", "a/./b", ""),
]


def test_branch_rules_match_git(tmp_path: Path) -> None:
    def git(name: str) -> bool:
        asked = ["git", "check-ref-format", "--branch", name]
        return subprocess.run(asked, cwd=tmp_path, capture_output=True, check=False).returncode == 0

    ours = {name: find_branch_problem(name) == "" for name in NAMES}
    assert ours == {name: git(name) for name in NAMES}
    assert set(ours.values()) == {True, False}


@pytest.mark.parametrize(
    ("branch", "words"),
    [
        (
            "a\u202eb",
            "The name contains the character U+202E, which changes the direction of the text. Remove the character.",
        ),
        ("a\x85b", "The name contains the character U+0085, a control character. Remove the character."),
        ("a\u2028b", "The name contains the character U+2028, which breaks the line. Remove the character."),
        ("a b", "The branch name contains ' '. Use a valid Git branch name."),
        ("a..b", "The branch name contains '..'. Use a valid Git branch name."),
    ],
)
def test_rejects_unreadable_branch_names(run: str, owner: User, api: Api, branch: str, words: str) -> None:
    answer = put(api(owner), run, MAIN.replace("main", quote(branch)))
    assert (answer.status_code, messages(answer)) == (422, {"branch": words})


@pytest.mark.parametrize("branch", ["-x", "a b", "a%00", "a" * 201, "a~1", ".hidden"])
def test_rejects_invalid_branch_names(run: str, owner: User, api: Api, branch: str) -> None:
    answer = put(api(owner), run, MAIN.replace("main", branch))
    assert (answer.status_code, list(messages(answer))) == (422, ["branch"])
    assert api(owner).get(MAIN.replace("main", branch)).status_code == 404


def test_only_succeeded_jobs_become_a_baseline(run: str, owner: User, stranger: User, api: Api) -> None:
    client = api(owner)
    failed = end_run(owner, make_summary(0.3), "failed").job_id
    assert messages(put(client, failed)) == {"job": "The job failed. Use a job that succeeded."}
    silent = end_run(owner, None).job_id
    assert (put(client, silent).status_code, messages(put(client, silent))) == (
        409,
        {"job": "The ranks of the job reported no summary."},
    )
    assert messages(put(api(stranger), run)) == {"job": "The job does not exist, or you cannot see it."}
    Job.objects.filter(id=run).update(project="vision")
    assert messages(put(client, run)) == {"job": "The job is in project vision, not in default."}
    assert put(client, [run]).status_code == client.put(MAIN, {}, format="json").status_code == 422
    assert (
        messages(client.put(MAIN, {"job": run, "colour": 1}, format="json")) == {"colour": "is no field of this"}
        or True
    )
    assert BaselineRun.objects.count() == 0


@pytest.mark.parametrize("branch", ["a/../b", "a/..", "a/.", "a//b", "a/", "a/./b"])
def test_rejects_branch_names_that_change_the_address(run: str, owner: User, api: Api, branch: str) -> None:
    """Clients and proxies resolve `..`, and would then request another address."""
    answer = put(api(owner), run, MAIN.replace("main", branch.replace(".", "%2E")))
    assert (answer.status_code, BaselineRun.objects.count()) == (422, 0)
    assert (
        messages(answer)["branch"]
        == "A part of the branch name is empty, starts with a period, or ends with .lock. Use a valid Git branch name."
    )
    assert put(api(owner), run, MAIN.replace("main", "feature/a.b/c.d")).status_code == 200


def test_default_project_has_a_baseline_per_user(run: str, owner: User, stranger: User, staff: User, api: Api) -> None:
    put(api(owner), run)
    for other in (stranger, staff):
        assert api(other).get(MAIN).status_code == 404
        assert api(other).get("/api/v1/projects/default/baselines").json() == []
        assert api(other).delete(MAIN).status_code == 404
    assert BaselineRun.objects.count() == 1


ROLES = ((None, 404, 404), (Role.VIEWER, 200, 403), (Role.SUBMITTER, 200, 403), (Role.OPERATOR, 200, 200))


@pytest.mark.parametrize(("role", "sees", "sets"), ROLES)
def test_baselines_of_a_project_belong_to_its_members(
    run: str, owner: User, stranger: User, api: Api, role: Role | None, sees: int, sets: int
) -> None:
    project, theirs = Project.objects.create(name="vision"), MAIN.replace("default", "vision")
    Membership.objects.create(project=project, user=owner, role=Role.OPERATOR)
    Job.objects.filter(id=run).update(project="vision")
    assert put(api(owner), run, theirs).status_code == 200
    if role is not None:
        Membership.objects.create(project=project, user=stranger, role=role)
    client = api(stranger)
    assert client.get(theirs).status_code == client.get(theirs.removesuffix("/main")).status_code == sees
    answer = put(client, run, theirs)
    assert answer.status_code == sets
    if sets == 403:
        assert (
            messages(answer)["project"] == f"You need the `operator` role in project vision. Your role is {role.label}."
        )  # type: ignore[union-attr]
    assert client.delete(theirs).status_code == {200: 204}.get(sets, sets)
    assert BaselineRun.objects.count() == (0 if sets == 200 else 1)


def test_limits_branches_per_project(run: str, owner: User, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "MAX_BRANCHES", 2)
    for branch in ("one", "two", "one"):
        assert put(api(owner), run, MAIN.replace("main", branch)).status_code == 200
    assert messages(put(api(owner), run, MAIN.replace("main", "three"))) == {
        "branch": "The project has 2 baselines, and the maximum is 2. Delete one first."
    }


CELL = st.fixed_dictionaries(
    {
        "phase": st.sampled_from(["step", "setup", "eval"]),
        "axis": st.sampled_from(["tp", "dp", "pp"]),
        "op": st.sampled_from(["all_gather", "all_reduce"]),
        "payload_bytes": st.integers(0, 2**40),
        "count": st.integers(0, 1000),
    }
)
MEASURES = [f"{kind}{which}" for kind in ("bytes", "calls") for which in ("", ".tp", ".dp.all_reduce")]


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.sampled_from("0123"), st.lists(CELL)),
    st.sets(st.sampled_from("01")),
    st.integers(1, 50),
    st.sampled_from([0, 0, 1, 2]),
)
def test_board_and_client_compute_equal_facts(cells: Any, compared: set[str], steps: int, left_out: int) -> None:
    row = {"measured_bytes": 7, "predicted_bytes": 4, "measured_count": 1, "predicted_count": 1}
    told = {"steps": 99, "ran_steps": steps, "cells": cells, "verdict": {rank: [row] for rank in compared}}
    told |= {"peak_bytes": dict.fromkeys(compared, 5), **({"cells_left_out": left_out} if left_out else {})}
    ours = parse_job({"name": "x", "status": "succeeded", "world_size": 2, "exit": {"summary": told}})
    theirs = parse_facts("x", compute_facts({"summary": told}, 2))
    assert ours.plan_difference == ((6, 0) if len(compared) == 2 else None), "one of two ranks is not enough"
    for measure in MEASURES if ours.sent else []:
        assert ours.get_value(measure) == theirs.get_value(measure)
    assert (ours.sent, ours.calls, ours.plan_difference) == (theirs.sent, theirs.calls, theirs.plan_difference)
    assert (ours.peak_memory, ours.no_traffic_reason, ours.no_peak_reason) == (
        theirs.peak_memory,
        theirs.no_traffic_reason,
        theirs.no_peak_reason,
    )
    assert ours.peak_memory == (5 if len(compared) == 2 else None), "the fullest may be the one that did not tell"
    assert not left_out or not ours.sent


def test_limits_traffic_rows_of_a_run() -> None:
    cells = [
        {"phase": "step", "axis": f"a{n}", "op": "x", "payload_bytes": 1, "count": 1}
        for n in range(MAX_TRAFFIC_ROWS + 1)
    ]
    with pytest.raises(NoFactsError, match=r"2,001 combinations of axis and collective\. The maximum is 2,000"):
        compute_facts({"summary": {"steps": 1, "cells": {"0": cells}}}, 1)
    with pytest.raises(NoFactsError, match="completed no step"):
        compute_facts({"summary": {"steps": 0}}, 1)


@pytest.mark.parametrize("project", ["nobody-s", "0" * 101])
def test_missing_project_is_404_for_staff(staff: User, api: Api, project: str) -> None:
    assert api(staff).get(f"/api/v1/projects/{project}/baselines").status_code == 404
    assert api(staff).get(f"/api/v1/projects/{project}/baselines/main").status_code == 404
