"""What one stage sends another is let go when it has left, not at the end of the step."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.support.patience import patient
from tests.support.processes import wait_until
from workers.trainer.parallel.pipeline_parallel import Sends

TIMEOUT = timedelta(seconds=30)


@pytest.fixture
def ranks() -> list[dist.ProcessGroupGloo]:
    """Both ends of a pipe, in one process."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, TIMEOUT), range(2)))


def test_what_has_left_is_let_go_and_what_has_not_is_kept(ranks: list[dist.ProcessGroupGloo]) -> None:
    sender, receiver = ranks
    sends = Sends()
    storages = []
    for index in range(3):
        message = torch.full((1000,), float(index))
        storages.append(weakref.ref(message))
        sends.add(sender.send([message], 1, 0), message)
        del message
    here = torch.empty(1000)
    for index in range(2):
        receiver.recv([here], 0, 0).wait()
        assert here.eq(index).all()
    wait_until(lambda: storages[1]() is None, "what has been received is let go", 20)
    assert [storage() is None for storage in storages] == [True, True, False]
    receiver.recv([here], 0, 0).wait()
    sends.flush()
    assert storages[2]() is None


def test_a_send_that_fails_is_told_at_the_flush(ranks: list[dist.ProcessGroupGloo]) -> None:
    sender, receiver = ranks
    sends = Sends()
    message = torch.ones(1000)
    sends.add(sender.send([message], 1, 0), message)
    ranks.clear()
    del receiver
    with pytest.raises(RuntimeError):
        sends.flush()


def test_the_thread_ends_with_its_sends(ranks: list[dist.ProcessGroupGloo]) -> None:
    sender, receiver = ranks
    sends, message = Sends(), torch.ones(10)
    sends.add(sender.send([message], 1, 0), message)
    receiver.recv([torch.empty(10)], 0, 0).wait()
    sends.flush()
    thread = sends._thread
    assert thread is not None
    del sends
    thread.join(patient(20))
    assert not thread.is_alive()
