"""The audit log: entries cannot be changed, and staff can export them."""

from __future__ import annotations

import csv
import io
import json
from base64 import urlsafe_b64encode
from collections.abc import Callable

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import DatabaseError, connection, transaction
from django.test import Client
from rest_framework.test import APIClient

from jobs.core.audit import record
from jobs.models import AuditEntry


def test_database_rejects_changes_of_entries(each_database: str) -> None:
    call_command("flush", interactive=False, verbosity=0)  # Flush is the only statement that may delete entries.
    record("ann", "hold", "job", "x")
    statements = ["UPDATE jobs_auditentry SET who = 'nobody'", "DELETE FROM jobs_auditentry"]
    if each_database == "postgres":
        statements += ["TRUNCATE jobs_auditentry", "TRUNCATE auth_user, jobs_auditentry CASCADE"]
    for sql in statements:
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


def test_exports_entries_in_order_from_an_id(staff: User, client: Client) -> None:
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


def test_exports_entries_in_pages_with_a_token(staff: User, api: Callable[[User | None], APIClient]) -> None:
    """REST returns the audit log as CSV and JSON, in pages."""
    for who in ("=cmd", "ann", "ben", "carla", "dora"):
        record(who, "hold", "job", "x", after={"note": "é\n,"})
    client, seen, files = api(staff), [], []
    ids = list(AuditEntry.objects.order_by("-id").values_list("id", flat=True))
    for form, found in (("json", seen), ("csv", files)):
        address = f"/api/v1/audit?limit=2&format={form}"
        while address:
            response = client.get(address, headers={"Accept": "text/csv" if form == "csv" else "application/json"})
            assert response.status_code == 200, response.content
            found += response.json() if form == "json" else csv.DictReader(io.StringIO(response.content.decode()))
            address = response.headers.get("Link", "").removeprefix("<").partition(">")[0]
    assert [row["id"] for row in seen] == [int(row["id"]) for row in files] == ids
    assert (seen[-1]["who"], files[-1]["who"], json.loads(files[-1]["after"])) == ("=cmd", "'=cmd", {"note": "é\n,"})
    between = client.get(f"/api/v1/audit?after={ids[3]}&before={ids[0]}").json()
    assert [row["id"] for row in between] == ids[1:3]
    forged = urlsafe_b64encode(b'["x"]').decode().rstrip("=")
    for query in ("limit=1001", "after=0", "format=jsonl", f"cursor={forged}"):
        (error,) = client.get(f"/api/v1/audit?{query}").json()["errors"]
        assert (error["field"], error["in"]) == (query.partition("=")[0], "query")


def test_only_staff_export_entries(
    owner: User, viewer: User, client: Client, api: Callable[[User | None], APIClient]
) -> None:
    for user in (owner, viewer):
        client.force_login(user)
        assert client.get("/queue/audit/export/").status_code == 403
        assert api(user).get("/api/v1/audit?format=csv").status_code == 403
