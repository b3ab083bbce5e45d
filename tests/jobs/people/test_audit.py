"""The audit: written once, and exported whole."""

from __future__ import annotations

import csv
import io
import json

import pytest
from django.contrib.auth.models import User
from django.db import DatabaseError, connection, transaction
from django.test import Client

from jobs.models import AuditEntry
from jobs.queue.audit import record


@pytest.mark.usefixtures("postgres")
def test_postgresql_itself_refuses_to_change_an_entry() -> None:
    record("ann", "hold", "job", "x")
    for sql in ("UPDATE jobs_auditentry SET who = 'nobody'", "DELETE FROM jobs_auditentry"):
        with (
            pytest.raises(DatabaseError, match="audit entries are not changed"),
            transaction.atomic(),
            connection.cursor() as cursor,
        ):
            cursor.execute(sql)
    assert AuditEntry.objects.get().who == "ann"


def test_staff_export_it_in_order_and_from_where_they_left(staff: User, client: Client) -> None:
    record("=cmd|' /C calc'!A0", "hold", "job", "x", before=None, after={"note": "é\n,"})
    record("ann", "release", "job", "x")
    client.force_login(staff)
    rows = list(csv.DictReader(io.StringIO(client.get("/queue/audit/export/").content.decode())))
    assert [(row["who"], row["what"]) for row in rows] == [("'=cmd|' /C calc'!A0", "hold"), ("ann", "release")]
    assert json.loads(rows[0]["after"]) == {"note": "é\n,"}
    lines = client.get(f"/queue/audit/export/?format=jsonl&after={rows[0]['id']}").content.decode().splitlines()
    assert [json.loads(line)["who"] for line in lines] == ["ann"]
    for query in ("format=xml", "after=x", "after=-1"):
        assert client.get(f"/queue/audit/export/?{query}").status_code == 400


def test_nobody_else_does(owner: User, viewer: User, client: Client) -> None:
    for user in (owner, viewer):
        client.force_login(user)
        assert client.get("/queue/audit/export/").status_code == 403
