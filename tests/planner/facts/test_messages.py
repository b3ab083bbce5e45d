"""What stages send one another: all ranks ask for it in one order, in which none waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.facts.pipeline_messages import (
    Exchange,
    StageExchanges,
    get_chunk_stages,
    get_links,
    get_received_message,
    get_sent_message,
    order_exchanges,
)
from planner.facts.schedules import Action, build_actions
from planner.facts.spec import Layout, Schedule
from tests.planner.facts.test_schedules import CASES, keeps_the_rules, layout_of

Lists = list[list[Action]]


def lists_of(layout: Layout, m: int, *, forwards: bool = False) -> Lists:
    every = [build_actions(layout, stage, m) for stage in range(layout.pp)]
    return [[a for a in order if a.kind == "F"] for order in every] if forwards else every


def in_one_queue(lists: Lists, asked: Sequence[StageExchanges]) -> bool:
    """Whether all ends where every rank does one thing after the other, and a message needs both ranks."""
    order: list[list[Action | Exchange]] = [
        [*slots[0], *(one for action, slot in zip(actions, slots[1:], strict=True) for one in (action, *slot))]
        for actions, slots in zip(lists, asked, strict=True)
    ]
    at, going = [0] * len(order), True
    while going:
        going = False
        for stage, mine in enumerate(order):
            while at[stage] < len(mine):
                what = mine[at[stage]]
                if isinstance(what, Exchange):
                    other = what.receiver if what.sender == stage else what.sender
                    if order[other][at[other] : at[other] + 1] != [what]:
                        break
                    at[other] += 1
                at[stage] += 1
                going = True
    return [len(mine) for mine in order] == at


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(CASES), st.integers(2, 6), st.integers(1, 12), st.booleans())
def test_every_message_is_asked_for_by_both_in_time_and_no_rank_waits_for_ever(
    case: tuple[Schedule, int], pp: int, m: int, forwards: bool
) -> None:
    layout = layout_of(case[0], pp, case[1])
    assume(keeps_the_rules(layout, m))
    lists = lists_of(layout, m, forwards=forwards)
    asked, owner, last = (
        order_exchanges(layout, m, forwards=forwards),
        get_chunk_stages(layout),
        layout.pp * layout.virtual_stages - 1,
    )
    for stage, (order, slots) in enumerate(zip(lists, asked, strict=True)):
        there, made = set[object](), set[object]()
        for action, slot in zip([None, *order], slots, strict=True):
            if action is not None:
                needed, given = get_received_message(action, last), get_sent_message(action, last)
                made |= {given} if given is not None else set()
                if needed is not None and needed not in made:
                    there.remove(needed)
            for message, sender, receiver in slot:
                assert (sender, receiver) in get_links(layout)
                if receiver == stage:
                    there.add(message)
                else:
                    assert owner[message.chunk] == receiver
                    made.remove(message)  # it was given, and is sent once
        assert not there
    assert in_one_queue(lists, asked)


def test_one_message_of_each_sender_is_asked_for_ahead() -> None:
    """Breadth first, the last stage's first chunk is through long before the first stage takes up its second."""
    layout, m = layout_of("looped_bfs", 2, 2), 8
    lists = lists_of(layout, m)
    waiting, most = set[object](), 0
    for action, slot in zip(lists[0], order_exchanges(layout, m)[0], strict=False):
        waiting |= {one.message for one in slot if one.receiver == 0}
        waiting.discard(get_received_message(action, 3))
        most = max(most, len(waiting))
    assert most == 1


def test_a_pipe_that_asks_for_its_answers_first_waits_for_ever() -> None:
    layout = layout_of("1f1b", 2, 1)
    lists = lists_of(layout, 2)
    first, second = order_exchanges(layout, 2)
    assert in_one_queue(lists, [first, second])
    answer = next(one for slot in first for one in slot if one.receiver == 0)
    rest = [tuple(one for one in slot if one != answer) for slot in first]
    assert not in_one_queue(lists, [((answer, *rest[0]), *rest[1:]), second])


def test_one_forward_one_backward_by_hand() -> None:
    """F F B F B B on the first of two stages, F B F B F B on the second, whose backward takes two units."""
    layout = layout_of("1f1b", 2, 1)
    asked = order_exchanges(layout, 3)
    words = [[" ".join(f"{m.kind}{m.micro_batch}" for m, _, _ in slot) for slot in slots] for slots in asked]
    assert words[0] == ["", "F0", "F1 B0", "", "F2 B1", "B2", ""]
    assert words[1] == ["F0", "F1", "B0", "", "F2 B1", "", "B2"]
