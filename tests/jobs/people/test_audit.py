"""The audit: written once, and exported whole."""

from __future__ import annotations

import csv
import io
import json

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import DatabaseError, connection, transaction
from django.test import Client

from jobs.models import AuditEntry
from jobs.queue.audit import record


def test_the_database_itself_refuses_to_change_an_entry(each_database: str) -> None:
    call_command("flush", interactive=False, verbosity=0)  # for which the refusal is lifted, and no longer
    record("ann", "hold", "job", "x")
    every = ["UPDATE jobs_auditentry SET who = 'nobody'", "DELETE FROM jobs_auditentry"]
    if each_database == "postgres":
        every += ["TRUNCATE jobs_auditentry", "TRUNCATE auth_user, jobs_auditentry CASCADE"]
    for sql in every:
        with (
            pytest.raises(DatabaseError, match="audit entries are not changed"),
            transaction.atomic(),
            connection.cursor() as cursor,
        ):
            cursor.execute(sql)
        with pytest.raises(DatabaseError, match="audit entries are not changed"):
            AuditEntry.objects.filter(who="ann")._raw_delete("default")
    assert AuditEntry.objects.get().who == "ann"
    call_command("flush", interactive=False, verbosity=0)
    assert not AuditEntry.objects.exists()


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
