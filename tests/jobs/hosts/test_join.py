"""A machine joins as a host with a token, and no other machine can take its name."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from django.contrib.auth.models import User
from django.core.cache import cache
from django.core.management import CommandError, call_command
from django.utils import timezone
from rest_framework.test import APIClient

from contracts.codec import validate_join_request
from jobs.models import AuditEntry, Host, JoinToken
from jobs.queue import staff_actions as staff
from jobs.queue.hosts import joining
from jobs.queue.hosts.redis_access import RedisUsers, get_redis_user
from tests.jobs.conftest import run_together

Api = Callable[[User | None], APIClient]
IDENTITIES = [letter * 40 for letter in "abcdefgh"]


@pytest.fixture(autouse=True)
def _fresh_counts() -> None:
    cache.clear()


def request(name: str = "gpu-7", identity: str = IDENTITIES[0], **changes: Any) -> dict[str, Any]:
    told = {
        "name": name,
        "identity": identity,
        "slots": 4,
        "device": "cpu",
        "device_name": "test",
        "memory_bytes": 2**30,
        "boot_id": "b",
    }
    return {**told, **changes}


def token(**asked: Any) -> str:
    return joining.create_token("staff", joining.JoinTokenRequest(**{"uses": None, **asked}))[1]


def asked(api: Api, body: object, **headers: Any) -> Any:
    return api(None).post("/api/v1/hosts/join", body, format="json", **headers)


def refusal(answer: Any) -> tuple[int, str, str]:
    [error] = answer.json()["errors"]
    return answer.status_code, error["field"], error["message"]


def test_machine_joins_with_a_token_and_returns_without_one(api: Api, db: None, live_redis: redis.Redis) -> None:
    told = token(uses=1)
    first = asked(api, request(token=told))
    assert first.status_code == 201
    again = asked(api, request())
    assert (again.status_code, again.json()) == (200, first.json())
    host = Host.objects.get()
    assert (host.name, host.slots, host.generation, host.joined_from) == ("gpu-7", 4, 1, "127.0.0.1")
    kept = JoinToken.objects.get()
    assert (kept.uses, kept.last_host, kept.last_used is not None) == (1, "gpu-7", True)
    with redis.Redis.from_url(first.json()["redis_url"]) as client:
        assert client.ping()


def test_only_the_hash_of_a_token_is_stored(db: None) -> None:
    text = token()
    row = JoinToken.objects.values().get()
    assert text not in repr(row)
    assert text.removeprefix(joining.TEXT_PREFIX) not in repr(row)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ({"expires": timezone.now() - timedelta(seconds=1)}, "expired at"),
        ({"revoked": timezone.now()}, "was revoked at"),
        ({"uses": 3}, "has reached its maximum of 3 hosts."),
    ],
)
def test_rejects_invalid_tokens_with_a_reason(
    api: Api, db: None, live_redis: redis.Redis, spoil: dict[str, Any], words: str
) -> None:
    told = token(uses=3)
    JoinToken.objects.update(**spoil)
    status, field, message = refusal(asked(api, request(token=told)))
    assert (status, field) == (401, "token")
    assert words in message
    assert not Host.objects.exists()


def test_join_requires_a_valid_token(api: Api, db: None, live_redis: redis.Redis) -> None:
    assert refusal(asked(api, request()))[:2] == (401, "token")
    assert refusal(asked(api, request(token="mbj_guessed")))[:2] == (401, "token")
    assert not Host.objects.exists()


def test_used_name_is_rejected_without_token_use(api: Api, db: None, live_redis: redis.Redis) -> None:
    told = token(uses=2)
    assert asked(api, request(token=told)).status_code == 201
    status, field, message = refusal(asked(api, request(token=told, identity=IDENTITIES[1])))
    assert (status, field) == (409, "name")
    assert "ask staff to remove the host" in message
    assert JoinToken.objects.get().uses == 1


def test_removed_host_frees_its_name(api: Api, db: None, live_redis: redis.Redis) -> None:
    told = token()
    before = asked(api, request(token=told)).json()
    staff.remove_host(Host.objects.get(), "staff")
    assert "was removed" in refusal(asked(api, request()))[2]
    others = (refusal(asked(api, request(name, IDENTITIES[1])))[2] for name in ("gpu-7", "gpu-8"))
    assert next(others).replace("gpu-7", "") == next(others).replace("gpu-8", ""), "a guess learns of no name"
    with redis.Redis.from_url(before["redis_url"]) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    after = asked(api, request(token=told, identity=IDENTITIES[1])).json()
    assert before["key"] != after["key"]
    with redis.Redis.from_url(before["redis_url"]) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    host = Host.objects.get()
    assert (host.generation, host.removed, host.drained) == (2, None, False)


def test_old_host_without_token_is_claimed_once(
    api: Api, make_host: Callable[..., Host], live_redis: redis.Redis
) -> None:
    make_host("gpu-7", slots=2)
    told = token()
    assert asked(api, request(token=told)).status_code == 201
    assert Host.objects.get().slots == 2, "its heartbeats say how it is now"
    assert asked(api, request(token=told, identity=IDENTITIES[1])).status_code == 409


@pytest.mark.parametrize("each_database", ["postgres", "sqlite"], indirect=True)
def test_concurrent_joins_give_a_name_once(each_database: str, live_redis: redis.Redis) -> None:
    told = token()
    outcomes: list[str] = []
    lock = threading.Lock()

    def ask(identity: str) -> None:
        try:
            staff.join_host(validate_join_request(request(token=told, identity=identity)), "127.0.0.1")
            outcome = "joined"
        except joining.NameTakenError:
            outcome = "taken"
        with lock:
            outcomes.append(outcome)

    run_together([lambda identity=identity: ask(identity) for identity in IDENTITIES])  # type: ignore[misc]
    assert sorted(outcomes) == ["joined"] + ["taken"] * (len(IDENTITIES) - 1)
    assert (Host.objects.get().generation, JoinToken.objects.get().uses) == (1, 1)


@pytest.mark.parametrize("each_database", ["postgres", "sqlite"], indirect=True)
def test_concurrent_joins_respect_the_uses_of_a_token(each_database: str, live_redis: redis.Redis) -> None:
    told = token(uses=2)
    refused: list[str] = []

    def ask(number: int) -> None:
        try:
            staff.join_host(validate_join_request(request(f"gpu-{number}", token=told)), "127.0.0.1")
        except joining.TokenError as error:
            refused.append(str(error))

    run_together([lambda n=n: ask(n) for n in range(6)])  # type: ignore[misc]
    assert Host.objects.count() == 2
    assert len(refused) == 4


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "../x"}, "name"),
        ({"name": "join"}, "name"),
        ({"name": "a:b"}, "name"),
        ({"identity": "short"}, "identity"),
        ({"slots": 0}, "slots"),
        ({"slots": True}, "slots"),
        ({"device": "tpu"}, "device"),
        ({"device_name": "x\0y"}, "device_name"),
        ({"memory_bytes": 2**64}, "memory_bytes"),
        ({"facts": {}}, "facts.cores"),
    ],
)
def test_rejects_invalid_join_requests_by_field(
    api: Api, db: None, live_redis: redis.Redis, changes: dict[str, Any], field: str
) -> None:
    assert refusal(asked(api, request(token=token(), **changes)))[:2] == (422, field)
    assert not Host.objects.exists()


def test_rejects_joins_if_redis_is_on_loopback_only(api: Api, db: None, live_redis: redis.Redis, settings: Any) -> None:
    told = token(uses=1)
    status, _, message = refusal(asked(api, request(token=told), REMOTE_ADDR="192.0.2.7"))
    assert (status, "MESHBOARD_REDIS_FOR_HOSTS" in message) == (409, True)
    assert (Host.objects.count(), JoinToken.objects.get().uses) == (0, 0)
    settings.REDIS_FOR_HOSTS = "rediss://redis.example:6380/2"
    url = urlsplit(asked(api, request(token=told), REMOTE_ADDR="192.0.2.7").json()["redis_url"])
    assert (url.scheme, url.hostname, url.port, url.path) == ("rediss", "redis.example", 6380, "/2")
    assert url.username == get_redis_user("gpu-7")


def test_retry_after_redis_outage_uses_the_token_once(api: Api, db: None, settings: Any) -> None:
    """The Redis in tests.settings does not exist."""
    told = token(uses=1)
    for _ in range(2):
        answer = asked(api, request(token=told))
        assert (answer.status_code, answer["Retry-After"]) == (503, "5")
    assert JoinToken.objects.get().uses == 1


def test_reports_redis_without_user_rights(api: Api, db: None, live_redis: redis.Redis, settings: Any) -> None:
    live_redis.execute_command("ACL SETUSER", "managed", "on", ">pw", "~*", "+@all", "-acl")
    board = urlsplit(settings.REDIS_URL)
    settings.REDIS_URL = f"redis://managed:pw@{board.hostname}:{board.port}/0"
    status, _, message = refusal(asked(api, request(token=token())))
    assert (status, "MESHBOARD_REDIS_ACCESS" in message) == (503, True)
    settings.REDIS_ACCESS = "shared"
    assert asked(api, request()).json()["redis_url"] == settings.REDIS_URL


def test_hosts_stay_valid_after_a_key_rotation(api: Api, db: None, live_redis: redis.Redis, settings: Any) -> None:
    before = asked(api, request(token=token())).json()
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "another-secret-key-0123456789-0123456789-0123456789"
    RedisUsers().sync(live_redis)
    after = asked(api, request()).json()
    assert before["key"] != after["key"]
    for answer in (before, after):
        with redis.Redis.from_url(answer["redis_url"]) as client:
            assert client.ping()
    settings.SECRET_KEY_FALLBACKS = []
    RedisUsers().sync(live_redis)
    with redis.Redis.from_url(before["redis_url"]) as client, pytest.raises(redis.AuthenticationError):
        client.ping()


def test_only_staff_manage_join_tokens(
    api: Api, staff: User, viewer: User, owner: User, live_redis: redis.Redis
) -> None:
    made = api(staff).post("/api/v1/join-tokens", {"hours": 2, "uses": 1, "note": "gpu-7"}, format="json")
    assert made.status_code == 201
    text, number = made.json()["token"], made.json()["id"]
    [listed] = api(staff).get("/api/v1/join-tokens").json()
    assert "token" not in listed
    assert (listed["created_by"], listed["most_uses"], listed["problem"]) == ("staff", 1, "")
    for who in (viewer, owner):
        assert api(who).get("/api/v1/join-tokens").status_code == 403
        assert api(who).post("/api/v1/join-tokens", {}, format="json").status_code == 403
        assert api(who).post(f"/api/v1/join-tokens/{number}/revoke").status_code == 403
    assert api(None).get("/api/v1/join-tokens").status_code == 401
    assert "was revoked at" in api(staff).post(f"/api/v1/join-tokens/{number}/revoke").json()["problem"]
    assert asked(api, request(token=text)).status_code == 401


@pytest.mark.parametrize("wrong", [{"hours": 0}, {"hours": 8761}, {"uses": 0}, {"note": "\0"}, {"hour": 1}, []])
def test_rejects_invalid_join_tokens_by_field(api: Api, staff: User, wrong: Any) -> None:
    answer = api(staff).post("/api/v1/join-tokens", wrong, format="json")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == (next(iter(wrong)) if wrong else "request")
    assert not JoinToken.objects.exists()


def test_default_join_token_has_one_use(api: Api, staff: User, live_redis: redis.Redis) -> None:
    made = api(staff).post("/api/v1/join-tokens", {}, format="json").json()
    out = StringIO()
    call_command("join_token", stdout=out)
    for number, text in enumerate((made["token"], out.getvalue().strip())):
        assert asked(api, request(f"first-{number}", token=text)).status_code == 201
        refused = asked(api, request(f"second-{number}", token=text))
        assert "maximum of 1 hosts" in refused.json()["errors"][0]["message"], refused.json()
    every = api(staff).post("/api/v1/join-tokens", {"uses": None}, format="json").json()["token"]
    assert [asked(api, request(f"any-{n}", token=every)).status_code for n in range(2)] == [201, 201]


def test_command_prints_or_stores_a_token(
    api: Api, db: None, live_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = StringIO()
    call_command("join_token", "--uses", "1", stdout=out)
    assert asked(api, request(token=out.getvalue().strip())).status_code == 201
    given = "given-by-compose-0123456789-abcdefgh"
    monkeypatch.setenv("MESHBOARD_JOIN_TOKEN", given)
    for _ in range(2):
        call_command("join_token", "--given", stdout=StringIO())
    assert JoinToken.objects.count() == 2
    assert asked(api, request("gpu-8", token=given)).status_code == 201
    (tmp_path / "token").write_text(f"{given}\n")
    monkeypatch.setenv("MESHBOARD_JOIN_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(CommandError, match="are both set"):
        call_command("join_token", "--given")
    monkeypatch.delenv("MESHBOARD_JOIN_TOKEN")
    call_command("join_token", "--given", stdout=StringIO())
    assert JoinToken.objects.count() == 2, "it is the one that was there"
    joining.revoke_token(JoinToken.objects.latest("id"))
    call_command("join_token", "--given", stdout=(told := StringIO()))
    assert told.getvalue().startswith("The token in MESHBOARD_JOIN_TOKEN is invalid. This join token was revoked")
    assert asked(api, request("gpu-9", token=given)).status_code == 401
    monkeypatch.delenv("MESHBOARD_JOIN_TOKEN_FILE")
    monkeypatch.setenv("MESHBOARD_JOIN_TOKEN", "a" * 40)
    with pytest.raises(CommandError, match="of which 1 are different"):
        call_command("join_token", "--given")
    with pytest.raises(CommandError, match="hours"):
        call_command("join_token", "--hours", "0")


def test_token_sets_labels_and_is_audited(api: Api, staff: User, live_redis: redis.Redis) -> None:
    made = api(staff).post("/api/v1/join-tokens", {"labels": ["a100", "zone=eu"]}, format="json").json()
    assert asked(api, request(token=made["token"])).status_code == 201
    assert asked(api, request()).status_code == 200
    assert Host.objects.get().labels == ["a100", "zone=eu"]
    api(staff).post("/api/v1/hosts/gpu-7/drain")
    api(staff).post("/api/v1/hosts/gpu-7/drain")
    api(staff).post("/api/v1/hosts/gpu-7/remove")
    api(staff).post(f"/api/v1/join-tokens/{made['id']}/revoke")
    entries = AuditEntry.objects.order_by("id").values_list("who", "what", "kind", "name", "address")
    assert list(entries) == [
        ("staff", "make", "join token", str(made["id"]), "127.0.0.1"),
        ("gpu-7", "join", "host", "gpu-7", "127.0.0.1"),
        ("staff", "drain", "host", "gpu-7", "127.0.0.1"),
        ("staff", "remove", "host", "gpu-7", "127.0.0.1"),
        ("staff", "revoke", "join token", str(made["id"]), "127.0.0.1"),
    ]
    assert made["token"] not in repr(list(AuditEntry.objects.values()))
    wrong = api(staff).post("/api/v1/join-tokens", {"labels": ["no label!"]}, format="json")
    assert (wrong.status_code, wrong.json()["errors"][0]["field"]) == (422, "labels.0")


def test_limits_joins_per_address(api: Api, db: None, live_redis: redis.Redis) -> None:
    answers = [asked(api, request()).status_code for _ in range(121)]
    assert (set(answers[:120]), answers[120]) == ({401}, 429)
    assert asked(api, request(), REMOTE_ADDR="192.0.2.7").status_code != 429


def prepared(*options: str) -> str:
    """Return the token that a start of the board creates for its own host."""
    out = StringIO()
    call_command("prepare", *options, stdout=out)
    return str(json.loads(out.getvalue())["join_token"])


def test_board_start_with_joined_host_creates_no_token(
    api: Api, staff: User, db: None, live_redis: redis.Redis, settings: Any, tmp_path: Path
) -> None:
    settings.STATIC_ROOT = tmp_path / "static"
    kept = tmp_path / "gpu-7.json"
    start = ("--host", str(kept))
    assert asked(api, request(token=token())).status_code == 201
    kept.write_text(json.dumps({"identity": IDENTITIES[0]}))
    assert prepared(*start) == ""
    assert JoinToken.objects.get().uses == 1
    assert not joining.has_joined("gpu-7", IDENTITIES[1]), "it is another machine"
    assert api(staff).post("/api/v1/hosts/gpu-7/remove").status_code == 204
    again = prepared(*start)
    assert asked(api, request(token=again)).status_code == 201, "it was removed, and joins again"


def test_board_start_deletes_its_old_token(db: None, settings: Any, tmp_path: Path) -> None:
    """An unused token of an earlier start must not stay valid."""
    settings.STATIC_ROOT = tmp_path
    for _ in range(2):
        prepared()
    spent = JoinToken.objects.get()
    JoinToken.objects.update(uses=1)
    prepared()
    assert JoinToken.objects.count() == 2, "the token of a joined host is stored for 30 days"
    assert JoinToken.objects.filter(pk=spent.pk).exists()
