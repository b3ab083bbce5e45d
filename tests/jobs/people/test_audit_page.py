"""The audit log shows each entry as a sentence, with one line per change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from jobs.core.audit import record
from jobs.models import AuditEntry
from jobs.queue import actions
from jobs.templatetags.audit import ACTIONS, audit_rows
from tests.planner.wrong_specs import GOOD

ROOT = Path(__file__).resolve().parents[3] / "jobs"
COMPOSED = {f"{what} {kind}" for what in ("add", "remove") for kind in ("second factor", "sign-on")}
PASSED_BY_VARIABLE = {"hold", "release", "priority", "drained", "add", "edit", "delete"}


def find_recorded_actions() -> Iterator[str]:
    """Yield each action that the code passes to `record`."""
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "record":
                yield from (
                    each.value for each in ast.walk(node.args[1]) if isinstance(each, ast.Constant) and each.value
                )


def test_each_action_has_a_verb() -> None:
    found = {what for what in find_recorded_actions() if isinstance(what, str) and what not in ("job",)}
    found = {what for what in found if what.strip() == what}
    assert len(found) > 40
    assert (found | COMPOSED | PASSED_BY_VARIABLE) - set(ACTIONS) == set()


@pytest.mark.parametrize(
    ("entry", "action", "changes"),
    [
        (("hold", "job", "abc", False, True), "Held job abc", ["held: no → yes"]),
        (("priority", "job", "abc", 0, 7), "Changed the priority of job abc", ["priority: 0 → 7"]),
        (("move", "job", "abc", 0.0, 1795363200.5), "Moved job abc in the queue", ["direction: up"]),
        (("pause", "queue", "queue", False, True), "Paused the queue", ["paused: no → yes"]),
        (("join", "host", "a1", None, {"labels": ["x", "y"]}), "Host a1 joined the board", ["labels: x, y"]),
        (("own slots", "project", "p", None, 4), "Changed the slot limit of project p", ["slot limit: none → 4"]),
        (
            ("edit", "project", "p", {"slots": 4, "weight": 1.0}, {"slots": 8, "weight": 1.0}),
            "Edited project p",
            ["slots: 4 → 8"],
        ),
        (
            ("wish for mail", "user", "ann", {}, {"": ["failed", "lost"]}),
            "Changed the email notifications of user ann",
            ["own jobs: none → failed, lost"],
        ),
        (
            ("edit", "user", "ann", None, [{"changed": {"fields": ["Active"]}}]),
            "Edited user ann",
            ["changed fields: Active"],
        ),
        (
            ("revoke all", "token", "the password was changed", ["k1"], None),
            "Revoked all tokens because the password was changed",
            ["tokens: k1"],
        ),
        (("burn", "job", "abc", None, None), "Burn job abc", []),
    ],
)
def test_shows_an_entry_as_sentence_and_changes(
    entry: tuple[str, str, str, Any, Any], action: str, changes: list[str], db: None
) -> None:
    record("ann", *entry)
    (row,) = audit_rows(AuditEntry.objects.filter(who="ann"))
    shown = [f"{c.field}: {'' if c.old is None else f'{c.old} → '}{c.new}" for c in row.changes]
    assert (row.action, shown) == (action, changes)


def test_page_shows_names_and_times_with_zone(owner: User, staff: User, client: Client) -> None:
    job, _ = actions.submit(owner, {**GOOD, "name": "<demo>"})
    after = {"name": "ci", "scopes": ["jobs:read"], "expires": "2027-01-31T10:00:00+00:00"}
    record("ann", "make", "token", "k3y", after=after)
    client.force_login(staff)
    page = client.get("/queue/audit/").content.decode()
    assert "Created token ci" in page
    assert f'Submitted job <a href="/jobs/{job.id}/" title="{job.id}">&lt;demo&gt;</a>' in page
    assert '<time datetime="2027-01-31T10:00:00+00:00">31 Jan 2027 10:00 UTC</time>' in page
    text = unescape(" ".join(re.sub(r"<[^>]+>", " ", page).split()))
    assert "scopes: jobs:read" in text
    assert "; " not in text[text.index("Audit log") :]
