"""`manage.py doctor` finds problems and advises how to fix them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import call_command
from django.db import connection
from django.utils import timezone

from contracts.doctor import Finding, check_clock, check_host_name, get_exit_code
from jobs.models import Host, Lease
from jobs.operations.controller import Controller
from jobs.queue.hosts.checks import check_board
from jobs.runs.history.recording.recorder import HistoryRecorder
from tests.support.postgres import use_database
from tests.support.processes import RedisServer, mount_full_disk
from webapp.runner import find_free_port
from workers.host.hardware import get_address_towards


def found(subject: str) -> list[Finding]:
    return [finding for finding in check_board() if finding.subject == subject]


def levels(subject: str) -> list[str]:
    return [finding.level for finding in found(subject)]


def worked() -> bool:
    """Create the leases of a working controller and recorder."""
    Controller().run_once()
    HistoryRecorder().run_once()
    return Lease.objects.exclude(ticked=None).count() == 2


@pytest.fixture
def joined(make_host: Callable[..., Host]) -> Host:
    host = make_host()
    Host.objects.filter(pk=host.pk).update(generation=1)
    return host


@pytest.mark.parametrize("each_database", ["postgres", "sqlite"], indirect=True)
def test_healthy_board_has_no_failures(
    each_database: str, joined: Host, live_redis: redis.Redis, settings: Any
) -> None:
    settings.REDIS_FOR_HOSTS = "redis://redis.example:6379/0"
    settings.STATIC_ROOT = settings.STATICFILES_DIRS[0]
    assert worked()
    told = list(check_board())
    assert [finding for finding in told if finding.level != "ok" and finding.subject not in ("names", "disk")] == []
    subjects = {finding.subject for finding in told}
    assert subjects >= {
        "Redis",
        "rights",
        "clock",
        "database",
        "controller",
        "recorder",
        "host",
        "names",
        "disk",
        "versions",
    }
    assert all(finding.words for finding in told)


def test_finds_missing_and_outdated_static_files(db: None, settings: Any, tmp_path: Path) -> None:
    settings.STATIC_ROOT = tmp_path / "static"
    assert levels("static") == ["fail"]
    shutil.copytree(settings.STATICFILES_DIRS[0], settings.STATIC_ROOT)
    assert levels("static") == ["ok"]
    (tmp_path / "static" / "css" / "tokens.css").write_text("of before")
    [told] = found("static")
    assert (told.level, told.words.split()[0]) == ("fail", "1")


def test_checks_the_disk_of_the_history(db: None, settings: Any, tmp_path: Path) -> None:
    with mount_full_disk(tmp_path / "disk") as disk:
        settings.HISTORY_DIR = disk / "history"
        told = {finding.words.partition(",")[0]: finding.level for finding in found("disk")}
    assert told["histories"] == "fail"


def test_failures_have_advice_and_an_exit_code(db: None) -> None:
    """The board has no Redis, controller, or recorder."""
    out = StringIO()
    with pytest.raises(SystemExit) as ended:
        call_command("doctor", "--json", stdout=out)
    assert ended.value.code == 1
    told = json.loads(out.getvalue())
    failing = {finding["subject"]: finding for finding in told if finding["level"] == "fail"}
    assert set(failing) - {"disk"} == {"Redis", "controller", "recorder", "static"}
    assert "does not answer" in failing["Redis"]["words"]
    assert [finding for finding in told if finding["level"] != "ok" and not finding["advice"]] == []


def test_finds_redis_with_eviction_or_little_memory(
    db: None, live_redis: redis.Redis, redis_service: RedisServer, settings: Any
) -> None:
    assert levels("Redis") == ["ok", "ok", "warn"], "hosts are sent to loopback"
    live_redis.config_set("maxmemory-policy", "allkeys-lru")
    assert "deletes orders" in found("Redis")[1].words
    live_redis.config_set("maxmemory-policy", "noeviction")
    live_redis.config_set("maxmemory", "1100000")
    live_redis.config_set("maxmemory", str(int(live_redis.info()["used_memory"] * 1.02)))
    assert found("Redis")[1].level == "fail"
    live_redis.config_set("maxmemory", "0")
    assert "maxmemory is not set" in found("Redis")[1].words


def test_finds_redis_without_user_rights(db: None, live_redis: redis.Redis, settings: Any) -> None:
    assert levels("rights") == ["ok"]
    assert live_redis.acl_users() == ["default"]
    live_redis.execute_command("ACL SETUSER", "managed", "on", ">pw", "~*", "&*", "+@all", "-acl")
    settings.REDIS_URL = settings.REDIS_URL.replace(":test-password@", "managed:pw@")
    assert levels("rights") == ["fail"]
    settings.REDIS_ACCESS = "shared"
    assert levels("rights") == ["warn"]


def test_reports_a_missing_database_and_checks_redis(transactional_db: None, live_redis: redis.Redis) -> None:
    away = f"postgres://nobody@127.0.0.1:{find_free_port()}/nothing"
    with use_database(away, migrated=False):
        told = list(check_board())
    assert [finding.level for finding in told if finding.subject == "Redis"] == ["ok", "ok", "warn"]
    [database] = [finding for finding in told if "does not answer" in finding.words]
    assert (database.subject, database.level) == ("database", "fail")
    assert {"static", "versions"} <= {finding.subject for finding in told}


def test_finds_missing_migrations(db: None, live_redis: redis.Redis) -> None:
    assert levels("database") == ["ok"]
    with connection.cursor() as cursor:
        cursor.execute("delete from django_migrations where app = 'jobs'")
    [finding] = found("database")
    assert (finding.level, finding.advice) == ("fail", "Run python manage.py migrate.")


def test_finds_a_stalled_controller(db: None, live_redis: redis.Redis) -> None:
    assert worked()
    assert levels("controller") == ["ok"]
    Lease.objects.update(ticked=timezone.now() - timedelta(minutes=5))
    [finding] = found("controller")
    assert (finding.level, "last tick ended 300 s ago" in finding.words) == ("fail", True)


def test_finds_silent_hosts_and_wrong_clocks(joined: Host, live_redis: redis.Redis) -> None:
    assert levels("host") == ["ok"]
    of_host = Host.objects.filter(pk=joined.pk)
    of_host.update(use={"gpus": [], "disks": [], "clock_offset_s": 300.0, "round_trip_s": 0.001})
    assert any("host-a: +300.000 s" in finding.words and finding.level == "fail" for finding in found("clock"))
    of_host.update(facts={"versions": {"python": "3.9.1"}})
    assert "host host-a has Python 3.9.1" in found("host")[1].words
    of_host.update(last_seen=timezone.now() - timedelta(minutes=5), generation=0)
    told = found("host")
    assert "silent since" in told[0].words
    assert (told[1].level, "has not joined" in told[1].words) == ("fail", True)


def test_finds_host_names_that_do_not_reach_this_machine() -> None:
    assert "connect to itself" in check_host_name("localhost").words
    assert "does not resolve" in check_host_name("no-such-host.invalid").words
    assert "this machine does not have the address" in check_host_name("192.0.2.1").words
    ours = get_address_towards("redis://192.0.2.1:6379")
    assert check_host_name(ours).level == ("warn" if ours.startswith("127.") else "ok")
    assert check_host_name("x" * 300).level == "warn"


@pytest.mark.parametrize(
    ("offset_s", "known_to_s", "level"),
    [(0.4, 0.001, "ok"), (-2.0, 0.001, "warn"), (-300.0, 0.001, "fail"), (1.5, 1.0, "ok"), (31.0, 2.0, "warn")],
)
def test_clock_check_respects_its_measurement_error(offset_s: float, known_to_s: float, level: str) -> None:
    assert check_clock("Redis", offset_s, known_to_s).level == level


def test_warnings_do_not_fail_the_check() -> None:
    assert get_exit_code([Finding("warn", "x", "y", "z"), Finding("ok", "x", "y")]) == 0
    assert get_exit_code([Finding("ok", "x", "y"), Finding("fail", "x", "y", "z")]) == 1


@pytest.mark.usefixtures("db")
def test_finds_unreachable_slurm_services(settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings.SLURM = {"folder": "/cluster", "python": "python", "board": "http://board"}
    monkeypatch.setenv("PATH", str(tmp_path))  # where no squeue is
    out = StringIO()
    with pytest.raises(SystemExit):
        call_command("doctor", json=True, stdout=out)
    words = [finding["words"] for finding in json.loads(out.getvalue()) if finding["subject"] == "Slurm"]
    assert words == [
        "MESHBOARD_SLURM_BOARD is http://board, which is not an HTTPS address that nodes can reach",
        "the command squeue cannot start: No such file or directory",
    ]
