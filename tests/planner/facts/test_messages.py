"""Stage messages: both ranks post every message in a compatible order, and no schedule deadlocks."""

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
from tests.planner.facts.test_schedules import CASES, build_layout, obeys_schedule_rules

Lists = list[list[Action]]


def build_action_lists(layout: Layout, m: int, *, forwards: bool = False) -> Lists:
    every = [build_actions(layout, stage, m) for stage in range(layout.pp)]
    return [[a for a in order if a.kind == "F"] for order in every] if forwards else every


def runs_without_deadlock(lists: Lists, exchanges: Sequence[StageExchanges]) -> bool:
    """Return True if every rank finishes when it works in sequence and a message needs both ranks."""
    order: list[list[Action | Exchange]] = [
        [*slots[0], *(one for action, slot in zip(actions, slots[1:], strict=True) for one in (action, *slot))]
        for actions, slots in zip(lists, exchanges, strict=True)
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
def test_every_message_is_posted_in_time_and_no_schedule_deadlocks(
    case: tuple[Schedule, int], pp: int, m: int, forwards: bool
) -> None:
    layout = build_layout(case[0], pp, case[1])
    assume(obeys_schedule_rules(layout, m))
    lists = build_action_lists(layout, m, forwards=forwards)
    exchanges, owner, last = (
        order_exchanges(layout, m, forwards=forwards),
        get_chunk_stages(layout),
        layout.pp * layout.virtual_stages - 1,
    )
    for stage, (order, slots) in enumerate(zip(lists, exchanges, strict=True)):
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
                    made.remove(message)  # the sender has computed the message and sends it once
        assert not there
    assert runs_without_deadlock(lists, exchanges)


def test_receiver_posts_at_most_one_message_ahead() -> None:
    """In breadth-first order, the last stage finishes its first chunk long before the first stage needs it."""
    layout, m = build_layout("looped_bfs", 2, 2), 8
    lists = build_action_lists(layout, m)
    waiting, most = set[object](), 0
    for action, slot in zip(lists[0], order_exchanges(layout, m)[0], strict=False):
        waiting |= {one.message for one in slot if one.receiver == 0}
        waiting.discard(get_received_message(action, 3))
        most = max(most, len(waiting))
    assert most == 1


def test_pipeline_deadlocks_if_stages_post_receives_first() -> None:
    layout = build_layout("1f1b", 2, 1)
    lists = build_action_lists(layout, 2)
    first, second = order_exchanges(layout, 2)
    assert runs_without_deadlock(lists, [first, second])
    answer = next(one for slot in first for one in slot if one.receiver == 0)
    rest = [tuple(one for one in slot if one != answer) for slot in first]
    assert not runs_without_deadlock(lists, [((answer, *rest[0]), *rest[1:]), second])


def test_one_forward_one_backward_matches_hand_computed_timeline() -> None:
    """Compare with F F B F B B on stage 0 and F B F B F B on stage 1. A backward takes two units."""
    layout = build_layout("1f1b", 2, 1)
    exchanges = order_exchanges(layout, 3)
    words = [[" ".join(f"{m.kind}{m.micro_batch}" for m, _, _ in slot) for slot in slots] for slots in exchanges]
    assert words[0] == ["", "F0", "F1 B0", "", "F2 B1", "B2", ""]
    assert words[1] == ["F0", "F1", "B0", "", "F2 B1", "", "B2"]
