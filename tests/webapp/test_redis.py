"""The embedded Redis: which one it is, what it may hold, and what is told of one with a known hole."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.support.processes import RedisServer, redis_server
from webapp.up.embedded_redis import redis_command
from webapp.up.redis_version import RedisVersion, redis_version, warning


def test_the_bundled_server_is_newer_than_the_hole_and_runs_the_scripts_we_need(redis_service: RedisServer) -> None:
    client = redis_service.client()
    version = redis_version(client.info("server"))
    assert version.kind == "Valkey"
    assert not version.has_hole
    # Channels sends to groups, and Celery's transport binds queues, by scripts: they cannot be switched off.
    assert client.eval("return 1", 0) == 1


def test_it_refuses_what_does_not_fit_and_forgets_nothing(redis_service: RedisServer) -> None:
    client = redis_service.client()
    assert client.config_get("maxmemory") == {"maxmemory": str(2**30)}
    client.set("kept", "x")
    client.config_set("maxmemory", "4mb")
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        fill(client)
    assert client.get("kept") == b"x"
    client.config_set("maxmemory", "1gb")
    client.set("again", "x")


def fill(client: redis.Redis) -> None:
    while True:
        client.rpush("filler", b"x" * 100_000)


@pytest.mark.parametrize(
    ("kind", "version", "gives"),
    [("Redis", "6.2.21", False), ("Redis", "7.0.15", True), ("Redis", "10.0.0", True), ("Valkey", "7.2.11", True)],
)
def test_one_too_old_to_give_hosts_rights_is_known(kind: str, version: str, gives: bool) -> None:
    assert RedisVersion(kind, version).gives_rights is gives


def test_the_limit_is_written_to_its_configuration(tmp_path: Path) -> None:
    redis_command(tmp_path, 1234, "word", "256mb")
    assert "\nmaxmemory 256mb\nmaxmemory-policy noeviction\n" in (tmp_path / "redis.conf").read_text()


def test_it_keeps_its_data_in_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / 'my "own" \\ état'
    with redis_server(folder) as server:
        assert server.client().config_get("dir") == {"dir": str(folder)}


@pytest.mark.parametrize(
    ("kind", "version", "hole"),
    [
        ("Redis", "6.2.14", True),
        ("Redis", "6.2.20", False),
        ("Redis", "7.0.15", True),
        ("Redis", "7.4.5", True),
        ("Redis", "7.4.6", False),
        ("Redis", "8.4.0", False),
        ("Valkey", "8.1.3", True),
        ("Valkey", "8.1.4", False),
        ("Valkey", "9.1.2", False),
    ],
)
def test_versions_before_the_fix_are_known(kind: str, version: str, hole: bool) -> None:
    assert RedisVersion(kind, version).has_hole is hole


def test_a_hole_that_only_this_machine_reaches_is_not_warned_of() -> None:
    old = redis_version({"redis_version": "6.2.14"})
    assert warning(old, "redis://:word@127.0.0.1:6379/0") is None
    assert warning(old, "redis://:word@localhost:6379/0") is None
    told = warning(old, "redis://:word@redis.example:6379/0")
    assert told is not None
    assert "Redis 6.2.14 at redis.example lacks the fix of CVE-2025-49844" in told
    assert "word@" not in told
    assert warning(redis_version({"redis_version": "7.2.4", "valkey_version": "9.1.2"}), "redis://10.0.0.7") is None
