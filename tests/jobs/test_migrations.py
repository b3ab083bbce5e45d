"""A database of before, with jobs that hold slots, comes through on both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, connections
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

from tests.planner.wrong_specs import GOOD
from tests.support.postgres import as_default_database, postgres_server

BEFORE = [("jobs", "0003_forget_old_profiles")]


@pytest.fixture(params=["sqlite", "postgres"])
def empty_database(request: pytest.FixtureRequest, transactional_db: None, tmp_path: Path) -> Iterator[None]:
    if request.param == "sqlite":
        with as_default_database(f"sqlite:///{tmp_path}/old.sqlite3", migrated=False):
            yield
        return
    with postgres_server() as url, as_default_database(url, migrated=False):
        yield


def migrated(targets: list[tuple[str, str]]) -> Any:
    """The models as they are after these migrations."""
    executor = MigrationExecutor(connection)
    executor.migrate(targets)
    return executor.loader.project_state(targets).apps


@pytest.mark.usefixtures("empty_database")
def test_slots_of_jobs_become_slots_of_their_attempts() -> None:
    auth = MigrationExecutor(connection).loader.graph.leaf_nodes("auth")
    old = migrated([*auth, *BEFORE])
    owner = old.get_model(*settings.AUTH_USER_MODEL.split(".")).objects.create(username="owner")
    host = old.get_model("jobs", "Host").objects.create(
        name="host-a", slots=8, device="cpu", device_name="", memory_bytes=1, boot_id="b", last_seen=timezone.now()
    )

    def job(status: str, attempts: int, slots: list[int], **changes: Any) -> str:
        spec = {**GOOD, "layout": {"dp": 2, "pp": 1, "tp": 1}, "resources": {"device": "cpu"}, **changes}
        made = old.get_model("jobs", "Job").objects.create(
            owner=owner, name=status, spec=spec, estimate={}, status=status, attempt=max(1, attempts)
        )
        for number in range(1, attempts + 1):
            old.get_model("jobs", "Attempt").objects.create(job=made, number=number, host=host, ordered=timezone.now())
        for slot in slots:
            old.get_model("jobs", "SlotAllocation").objects.create(job=made, host=host, slot=slot)
        return str(made.id)

    ids = {
        "running": job("running", 2, [0, 1]),
        "queued": job("queued", 0, [], kind="dry_run", resources={"device": "cuda", "host": "host-a"}),
        "lost": job("lost", 1, []),
        "stray": job("queued", 0, [5]),
    }
    leaf = MigrationExecutor(connection).loader.graph.leaf_nodes("jobs")
    new = migrated(leaf)
    held = new.get_model("jobs", "SlotAllocation").objects.order_by("slot")
    assert [(a.slot, a.member.attempt.job_id, a.member.attempt.number) for a in held] == [
        (0, ids["running"], 2),
        (1, ids["running"], 2),
    ]
    unended = new.get_model("jobs", "Attempt").objects.filter(ended__isnull=True)
    assert [(a.job_id, a.number) for a in unended] == [(ids["running"], 2)]
    member = unended.get().members.get()
    assert (member.host_name, member.node, member.first_rank, member.num_ranks) == ("host-a", 0, 0, 2)
    assert (member.ended, member.outcome) == (None, "")
    assert new.get_model("jobs", "Member").objects.filter(outcome="lost").count() == 2, "the others ended untold"
    jobs = {job.pk: job for job in new.get_model("jobs", "Job").objects.all()}
    queued, running = jobs[ids["queued"]], jobs[ids["running"]]
    assert (queued.kind, queued.device, queued.num_slots, queued.wanted_host) == ("dry_run", "cuda", 1, "host-a")
    assert (running.kind, running.device, running.num_slots, running.wanted_host) == ("train", "cpu", 2, "")


REFUSES = {
    "sqlite": [
        "CREATE TRIGGER full BEFORE INSERT ON django_migrations BEGIN SELECT RAISE(ABORT, 'disk full'); END",
        "DROP TRIGGER full",
    ],
    "postgresql": [
        "ALTER TABLE django_migrations ADD CONSTRAINT disk_full CHECK (name <> '0095_loans')",
        "ALTER TABLE django_migrations DROP CONSTRAINT disk_full",
    ],
}


@pytest.mark.usefixtures("empty_database")
def test_a_migration_that_cannot_be_written_down_was_not_done() -> None:
    """Once its tables stayed, and every later run failed at them: of one that has indexes or foreign keys."""
    call_command("migrate", "jobs", "0094", verbosity=0)
    refuse, take_again = REFUSES[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(refuse)
    with pytest.raises((CommandError, IntegrityError), match=r"disk.full"):
        call_command("migrate", "jobs", "0095", verbosity=0)
    connection.close()
    del connections["default"]  # as the next process has it
    assert "jobs_loan" not in connection.introspection.table_names()
    with connection.cursor() as cursor:
        cursor.execute(take_again)
    call_command("migrate", "jobs", "0095", verbosity=0)
    assert "jobs_loan" in connection.introspection.table_names()
