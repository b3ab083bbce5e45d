"""A second board with the Redis of the first one changes nothing there and reports the conflict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from jobs.models import Host, Lease
from jobs.operations.controller import Controller
from jobs.queue import staff_actions as staff
from jobs.queue import work_lease
from jobs.queue.hosts.checks import check_board
from jobs.queue.hosts.redis_access import NoRightsError, get_redis_user
from tests.jobs.hosts.joined_hosts import Guest, admitted


@pytest.fixture
def first(db: None, live_redis: redis.Redis) -> Iterator[tuple[Controller, Guest]]:
    """Create a healthy board with a host."""
    guest, works = admitted("host-a"), Controller()
    works.run_once()
    assert guest.redis.ping()
    yield works, guest
    guest.redis.close()


@pytest.fixture(params=["the same database", "another database"])
def second(first: tuple[Controller, Guest], settings: Any, request: pytest.FixtureRequest) -> Controller:
    """Yield the controller of a second board with other rows and the same Redis."""
    if request.param == "another database":
        settings.REDIS_URL = settings.REDIS_URL.removesuffix("/0") + "/1"
    Lease.objects.all().delete()
    Host.objects.all().delete()
    return Controller()


def test_second_board_does_not_change_hosts_of_the_first(
    first: tuple[Controller, Guest], second: Controller, caplog: Any
) -> None:
    for _ in range(3):
        second.run_once()
    assert first[1].redis.ping(), "its user, and its connection, are still there"
    said = "The controller of another board uses this Redis"
    assert [said in record.message for record in caplog.records] == [True], "once"
    assert Lease.objects.get().ticked is None, "readiness and doctor see that it does no work"
    assert [one.level for one in check_board() if one.words.startswith(said)] == ["fail"]


def test_second_board_accepts_no_joins(first: tuple[Controller, Guest], second: Controller) -> None:
    second.run_once()
    with pytest.raises(NoRightsError, match="The controller of another board"):
        admitted("host-a")
    staff.remove_host(Host.objects.get(name="host-a"), "staff")
    assert first[1].redis.ping()


def test_second_board_starts_after_the_first_has_ended(
    first: tuple[Controller, Guest], second: Controller, live_redis: redis.Redis
) -> None:
    second.run_once()
    first[0]._claim.release(first[0]._lease.holder)
    second.run_once()
    assert Lease.objects.get().ticked is not None
    assert get_redis_user("host-a") not in live_redis.acl_users(), "no host of this board"


def test_controllers_of_one_board_take_over(first: tuple[Controller, Guest], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second controller also takes over from one that was killed."""
    Lease.objects.update(ticked=None)
    monkeypatch.setattr(work_lease, "TAKEOVER_AFTER_S", 0.0)
    Controller().run_once()
    assert Lease.objects.get().ticked is not None
