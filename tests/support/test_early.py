"""What takes long begins first, and garbage is not looked for in the suite itself."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from tests.support.early import EARLY, early_first
from tests.support.processes import ROOT


def test_early_modules_come_in_their_order_and_the_others_as_they_came() -> None:
    ids = ["a.py::one", "b.py::one", "c.py::one[x::y]", "b.py::two", "d.py::one"]
    assert early_first([(name, name) for name in ids], ("c.py", "b.py")) == [
        "c.py::one[x::y]",
        "b.py::one",
        "b.py::two",
        "a.py::one",
        "d.py::one",
    ]


def test_each_early_module_is_there_once() -> None:
    assert [module for module in EARLY if not (ROOT / module).is_file()] == []
    assert set(Counter(EARLY).values()) == {1}


def test_this_run_has_early_ones_first(request: pytest.FixtureRequest) -> None:
    early = [item.nodeid.split("::")[0] in EARLY for item in request.session.items]
    assert early == sorted(early, reverse=True)


def test_what_was_imported_is_looked_through_no_more() -> None:
    assert gc.get_freeze_count() > 0
