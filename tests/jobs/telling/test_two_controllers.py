"""What one controller has carried is not carried again by the next."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import redis
from django.contrib.auth.models import User

from jobs.models import Delivery, Lease, Outcome
from jobs.operations.controller import Controller
from jobs.queue import actions, work_lease
from tests.jobs.telling.receivers import Receiver, answering, hook_of, receiver
from tests.planner.wrong_specs import GOOD
from tests.support.processes import wait_until

pytestmark = pytest.mark.usefixtures("transactional_db", "local_receivers")


@pytest.fixture
def sent(owner: User, live_redis: redis.Redis) -> Iterator[tuple[Controller, Receiver]]:
    """A controller that a delivery arrived from, and has not written that down."""
    with receiver(answering("204 No Content")) as there:
        hook_of(owner, there)
        actions.submit(owner, GOOD)
        first = Controller()
        first.run_once()
        wait_until(lambda: len(first._postman._results) == 2, "it is known how it went, and that the batch is over")
        assert (len(there.heard), Delivery.objects.get().outcome) == (1, Outcome.WAITING)
        yield first, there


def test_who_lost_the_lease_writes_down_what_it_had_sent(
    sent: tuple[Controller, Receiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sent[0], Controller()
    with monkeypatch.context() as patch:
        patch.setattr(work_lease, "TAKEOVER_AFTER_S", 0.0)  # as of one that stood still
        second.run_once()
    first.run_once()
    assert Lease.objects.get().holder == second._lease.holder
    assert (Delivery.objects.get().outcome, Delivery.objects.get().due) == (Outcome.DELIVERED, None)
    first._postman.close()


def test_so_does_who_is_told_to_end(sent: tuple[Controller, Receiver]) -> None:
    ended = threading.Event()
    ended.set()
    sent[0].run(ended)
    assert (Delivery.objects.get().outcome, Delivery.objects.get().due) == (Outcome.DELIVERED, None)
