"""Embedded Redis: version, memory limit, and vulnerability warning."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.support.processes import RedisServer, run_redis
from webapp.redis_server import RedisVersion, build_redis_command, get_vulnerability_warning, parse_redis_version


def test_bundled_redis_is_not_vulnerable_and_runs_scripts(redis_service: RedisServer) -> None:
    client = redis_service.client()
    version = parse_redis_version(client.info("server"))
    assert version.kind == "Valkey"
    assert not version.is_vulnerable
    # Channels and Celery's transport use scripts for groups and queue bindings, so scripts stay enabled.
    assert client.eval("return 1", 0) == 1


def test_full_redis_rejects_writes_and_evicts_nothing(redis_service: RedisServer) -> None:
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
def test_detects_support_for_key_permissions(kind: str, version: str, gives: bool) -> None:
    assert RedisVersion(kind, version).supports_key_permissions is gives


def test_writes_the_memory_limit(tmp_path: Path) -> None:
    build_redis_command(tmp_path, 1234, "word", "256mb")
    assert "\nmaxmemory 256mb\nmaxmemory-policy noeviction\n" in (tmp_path / "redis.conf").read_text()


def test_quotes_the_data_folder(tmp_path: Path) -> None:
    folder = tmp_path / 'my "own" \\ état'
    with run_redis(folder) as server:
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
def test_detects_vulnerable_versions(kind: str, version: str, hole: bool) -> None:
    assert RedisVersion(kind, version).is_vulnerable is hole


def test_does_not_warn_of_a_server_on_loopback() -> None:
    old = parse_redis_version({"redis_version": "6.2.14"})
    assert get_vulnerability_warning(old, "redis://:word@127.0.0.1:6379/0") is None
    assert get_vulnerability_warning(old, "redis://:word@localhost:6379/0") is None
    content = get_vulnerability_warning(old, "redis://:word@redis.example:6379/0")
    assert content is not None
    assert "Redis 6.2.14 at redis.example lacks the fix of CVE-2025-49844" in content
    assert "word@" not in content
    assert (
        get_vulnerability_warning(
            parse_redis_version({"redis_version": "7.2.4", "valkey_version": "9.1.2"}), "redis://10.0.0.7"
        )
        is None
    )
