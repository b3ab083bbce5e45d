"""The meter finds the variable to which a script assigns a process group."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from workers.meter.variable_names import find_variable

found: list[str] = []
GLOBAL_GROUP = None


def create(*_args: object) -> list[int]:
    found.append(find_variable(sys._getframe(1)))
    return [1, 2]


def create_in_helper() -> list[int]:
    return create()


def assign_results() -> None:
    global GLOBAL_GROUP
    state, groups = SimpleNamespace(), {}
    state.attribute = create(list(range(3)))[0]
    first, _second = create()
    groups["key"] = create()
    for rank in range(2):
        group = create(rank)
        if rank:
            GLOBAL_GROUP = group
    state.helped = create_in_helper()
    print(create(), first, groups)
    if create():
        create()


def test_finds_the_variable_of_a_result() -> None:
    found.clear()
    assign_results()
    assert found == ["attribute", "first", "key", "GLOBAL_GROUP", "GLOBAL_GROUP", "helped", "", "", ""]


def test_a_call_without_frame_has_no_variable() -> None:
    assert find_variable(None) == ""
