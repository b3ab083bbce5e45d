"""Reject hostile pickles before they run or allocate anything."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from contracts import safe_unpickle
from tests.jobs.traces.hostile import HOSTILE, SHARED_KEY
from tests.support.processes import scale_timeout


class _Runs:
    """Run a command when unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._mark}",)


@pytest.mark.parametrize("name", HOSTILE)
def test_rejects_hostile_pickle(name: str) -> None:
    with pytest.raises(safe_unpickle.RefusedPickleError):
        safe_unpickle.read_plain_pickle(HOSTILE[name])


def test_rejects_pickle_before_its_command_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(safe_unpickle.RefusedPickleError):
            safe_unpickle.read_plain_pickle(pickle.dumps({"entries": [_Runs(mark)]}, protocol))
    assert not mark.exists()
    pickle.loads(pickle.dumps(_Runs(mark)))  # The standard reader runs the command.
    assert mark.exists()


def test_rejects_a_name_that_is_not_allowed() -> None:
    with pytest.raises(safe_unpickle.RefusedPickleError, match=r"os\.system|posix\.system"):
        safe_unpickle.read_pickle(pickle.dumps(os.system), frozenset({safe_unpickle.GlobalName("os", "getpid")}))


def test_rejects_a_nested_shared_tuple_as_key_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(safe_unpickle.RefusedPickleError):
        safe_unpickle.read_plain_pickle(SHARED_KEY)
    assert time.monotonic() - began < scale_timeout(2)


def test_limits_operations_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_unpickle, "MAX_PLAIN_OPERATIONS", 1000)
    with pytest.raises(safe_unpickle.RefusedPickleError, match="more than 1,000 operations"):
        safe_unpickle.read_plain_pickle(pickle.dumps(list(range(2000))))
    monkeypatch.setattr(safe_unpickle, "MAX_PLAIN_BYTES", 10)
    with pytest.raises(safe_unpickle.RefusedPickleError, match="more than 10 bytes"):
        safe_unpickle.read_plain_pickle(b"x" * 11)


def test_reads_plain_data_of_every_protocol() -> None:
    data = {"a": [1, 2.5, None, True, "é", b"x", (1,), (1, 2), (1, 2, 3, 4), 2**70], 3: {}, "twice": [[7]] * 2}
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        assert safe_unpickle.read_plain_pickle(pickle.dumps(data, protocol)) == data
