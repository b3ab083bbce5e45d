"""An order becomes one attempt on disk, whole or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.orders import order
from workers.host.attempts import attempts, report_of_host
from workers.host.files import read_json, write_json
from workers.host.start.claims import claim
from workers.host.watch import told_of


def test_of_a_hundred_deliveries_at_once_one_claims(tmp_path: Path) -> None:
    asked = order()
    with ThreadPoolExecutor(8) as pool:
        claimed = [found for found in pool.map(lambda _: claim(tmp_path, asked), range(100)) if found is not None]
    assert len(claimed) == 1
    assert read_json(claimed[0].order) == asked
    assert read_json(claimed[0].spec) == asked["spec"]
    assert [path.name for path in claimed[0].own.parent.iterdir()] == ["1"]


def test_a_claim_cut_off_halfway_does_not_stand_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("workers.host.start.claims.write_json", cut_off)
        with pytest.raises(KeyboardInterrupt):
            claim(tmp_path, order())
    assert list(attempts(tmp_path)) == []
    assert claim(tmp_path, order()) is not None


def test_a_lower_attempt_than_one_seen_is_refused(tmp_path: Path) -> None:
    assert claim(tmp_path, order(attempt=2)) is not None
    assert claim(tmp_path, order(attempt=1)) is None
    assert claim(tmp_path, order(attempt=3, slots=[1])) is not None


def test_an_order_for_a_slot_in_use_is_not_started_and_says_whose_it_is(tmp_path: Path) -> None:
    holder = claim(tmp_path, order("holder", 2, slots=[0, 1]))
    assert holder is not None
    assert claim(tmp_path, order("beside", slots=[2, 3])) is not None
    assert claim(tmp_path, order("late", slots=[4, 1])) is None
    refused = next(attempt for attempt in attempts(tmp_path) if attempt.job == "late")
    report = told_of(refused)
    assert (report["state"], report["exit"]["outcome"]) == ("exited", "failed")
    assert report["exit"]["reason"] == "not started: attempt 2 of job holder still uses slot 1 of this host"
    write_json(holder.exit, report_of_host(holder, "succeeded", "well"))
    assert claim(tmp_path, order("later", slots=[1])) is not None
