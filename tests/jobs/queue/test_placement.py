"""Properties of placements for drawn queues and hosts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.queue.scheduling.placement import plan_pass
from jobs.queue.scheduling.states import Booking, HostState, QueuedJob, Share
from tests.jobs.queue.scheduling_cases import (
    LONG,
    World,
    full_world,
    host,
    in_order,
    job,
    may_use,
    places,
    some_hosts,
    some_queue,
)


@given(some_queue(), some_hosts())
def test_allocates_each_free_slot_once(queue: list[QueuedJob], hosts: list[HostState]) -> None:
    asked, there = {job.id: job for job in queue}, {host.name: host for host in hosts}
    taken: set[tuple[str, int]] = set()
    for job_id, ((name, slots),), _ in plan_pass(queue, hosts).placements:
        assert may_use(asked[job_id], there[name])
        assert len(slots) == len(set(slots)) == asked[job_id].num_slots
        assert set(slots) <= set(there[name].free)
        assert taken.isdisjoint((name, slot) for slot in slots)
        taken |= {(name, slot) for slot in slots}


@given(some_queue(), some_hosts())
def test_each_job_is_placed_once_or_has_a_reason(queue: list[QueuedJob], hosts: list[HostState]) -> None:
    plan = plan_pass(queue, hosts)
    placed = [placement.job for placement in plan.placements]
    assert sorted([*placed, *plan.reasons]) == sorted(job.id for job in queue)
    assert all(0 < len(text) <= 500 for text in plan.reasons.values())


@given(some_queue(), some_hosts())
def test_earlier_jobs_get_slots_first(queue: list[QueuedJob], hosts: list[HostState]) -> None:
    plan = plan_pass(queue, hosts)
    on = places(plan)
    for there in hosts:
        left = len(there.free)
        waits: QueuedJob | None = None
        for asked in in_order(queue):
            if on.get(asked.id) == there.name:
                assert waits is None, f"{waits} could have had the slots of {asked}"
                left -= asked.num_slots
            elif asked.id not in on and may_use(asked, there) and asked.num_slots <= left:
                waits = asked


@given(some_queue(), some_hosts())
def test_hosts_are_reserved_for_one_head_per_device_and_pins(queue: list[QueuedJob], hosts: list[HostState]) -> None:
    """A job that fits a host can wait only for an earlier job that reserves the host."""
    plan = plan_pass(queue, hosts)
    on = places(plan)
    asks = {job.id: job.num_slots for job in queue}
    heads = [job for job in queue if job.id in plan.head_hosts]
    assert len({job.device for job in heads}) == len(heads)
    assert all(len(plan.head_hosts[head.id]) == 1 for head in heads)
    assert all(not head.wanted_host and head.id in plan.reasons for head in heads)
    free = {h.name: len(h.free) - sum(asks[job] for job in on if on[job] == h.name) for h in hosts}
    for place_of, late in enumerate(in_order(queue)):
        for there in (h for h in hosts if late.id in plan.reasons and may_use(late, h)):
            before = [job for job in in_order(queue)[:place_of] if job.id in plan.reasons and may_use(job, there)]
            held = any(job.wanted_host or plan.head_hosts.get(job.id) == (there.name,) for job in before)
            assert held or free[there.name] < late.num_slots


@given(some_queue(), some_hosts())
def test_unplaceable_jobs_do_not_affect_others(queue: list[QueuedJob], hosts: list[HostState]) -> None:
    hopeful = [job for job in queue if any(may_use(job, host) for host in hosts)]
    with_them, without = plan_pass(queue, hosts), plan_pass(hopeful, hosts)
    assert (with_them.placements, with_them.head_hosts) == (without.placements, without.head_hosts)
    assert {job.id: with_them.reasons.get(job.id) for job in hopeful} == {
        job.id: without.reasons.get(job.id) for job in hopeful
    }


@given(some_queue(), some_hosts(), st.randoms(use_true_random=False))
def test_placement_does_not_depend_on_row_order(queue: list[QueuedJob], hosts: list[HostState], random: object) -> None:
    plan = plan_pass(queue, hosts)
    random.shuffle(queue)  # type: ignore[attr-defined]
    random.shuffle(hosts)  # type: ignore[attr-defined]
    assert plan_pass(queue, hosts) == plan


@settings(deadline=None)
@given(st.data())
def test_later_jobs_do_not_delay_the_head(data: st.DataObject) -> None:
    """Jobs end in random order, and later jobs arrive at random times and run until they are drawn to end."""
    world = data.draw(full_world(hosts=3))
    head = job("head", num_slots=max(world.slots.values()), age=1)
    world.queue["head"] = head
    promised = ""
    for step in range(60):
        for number in range(data.draw(st.integers(0, 2))):
            wanted = data.draw(st.sampled_from(["", "", *world.slots]))
            small = data.draw(st.integers(1, 4))
            world.queue[f"late-{step}-{number}"] = job(f"late-{step}-{number}", small, wanted, priority=-(step % 2))
        plan = world.schedule()
        if "head" in world.running:
            break
        (kept,) = plan.head_hosts["head"]
        promised = promised or kept
        assert kept == promised
        old = [len(slots) for name, (((on, slots),), _) in world.running.items() if on == promised and "old" in name]
        assert world.slots[promised] - sum(old) < head.num_slots, "a later job keeps the head out"
        ended = data.draw(st.sampled_from(sorted(world.running)))
        del world.running[ended]


@settings(deadline=None)
@given(st.data())
def test_later_jobs_do_not_change_the_host_of_the_head(data: st.DataObject) -> None:
    """Compare runs with and without later jobs, in which older jobs end in the same order."""
    alone = data.draw(full_world(hosts=3))
    alone.slots["host-z"] = 8
    alone.running |= {
        f"old-z-{at}": ((Share("host-z", (at,)),), 0) for at in data.draw(st.sets(st.integers(0, 7), min_size=1))
    }
    crowded = World(alone.slots)
    crowded.running = dict(alone.running)
    alone.queue["head"] = crowded.queue["head"] = job("head", num_slots=8, age=1)
    for step, ended in enumerate(["", *data.draw(st.permutations(sorted(alone.running)))]):
        late = job(f"late-{step}", data.draw(st.integers(1, 8)), data.draw(st.sampled_from(["", "host-a", "host-z"])))
        crowded.queue[late.id] = late
        for world in (alone, crowded):
            world.running.pop(ended, None)
            world.schedule()
        assert ("head" in alone.running) == ("head" in crowded.running)
        if "head" in alone.running:
            return
    raise AssertionError("the head never started")


def test_small_jobs_do_not_starve_a_large_one() -> None:
    """Each job runs for 5 passes, more small ones come than there are slots for, and three large ones wait."""
    world = World({"host-a": 4, "host-b": 4, "host-c": 8})
    lasts, large = 5, {f"large-{number}": slots for number, slots in enumerate((8, 4, 8))}
    started: dict[str, int] = {}
    for step in range(60):
        if step == lasts:
            world.queue |= {name: job(name, slots, age=100) for name, slots in large.items()}
        for number in range(5):
            world.queue[f"small-{step}-{number}"] = job(f"small-{step}-{number}", age=-step)
        for placement in world.schedule().placements:
            started[placement.job] = step
        world.running = {name: row for name, row in world.running.items() if world.now - row[1] < lasts}
    assert all(started[name] - lasts <= len(large) * lasts for name in large)


def test_head_reserves_only_one_host() -> None:
    hosts = [host("large", 8, free=5), host("small", 4)]
    plan = plan_pass([job("head", 8, age=2), job("next", 2, age=1), job("late", 2)], hosts)
    assert places(plan) == {"next": "small", "late": "small"}


def test_job_for_a_missing_host_does_not_block_others() -> None:
    plan = plan_pass([job("pinned", 1, "absent", priority=9), job("other", 4)], [host("host-a", 4)])
    assert [placement.job for placement in plan.placements] == ["other"]


def test_pinned_job_respects_priorities() -> None:
    hosts = [host("host-a", 4, free=2)]
    plan = plan_pass([job("urgent", 4, priority=100), job("pinned", 2, "host-a")], hosts)
    assert plan.placements == []
    assert plan.reasons == {
        "urgent": "The job needs 4 CPU slots on one host. Host host-a has 2 of 4 slots free.",
        "pinned": "The job needs 2 CPU slots on the required host. "
        "Host host-a has 2 of 4 slots free. A job ahead needs 4 slots on this host.",
    }


def test_older_job_of_equal_priority_starts_first() -> None:
    plan = plan_pass([job("a-young", 4, age=1), job("old", 4, age=2)], [host("host-a", 4)])
    assert [placement.job for placement in plan.placements] == ["old"]


def test_prefers_the_tightest_fit() -> None:
    plan = plan_pass([job("small", 2), job("large", 8, age=-1)], [host("host-a", 8), host("host-b", 3)])
    assert places(plan) == {"small": "host-b", "large": "host-a"}


def test_head_reserves_the_host_with_the_fewest_missing_slots() -> None:
    hosts = [host("host-a", 8, free=1), host("host-b", 8, free=3), host("host-c", 4, free=3)]
    assert plan_pass([job("head", 8)], hosts).head_hosts == {"head": ("host-b",)}
    assert plan_pass([job("head", 8, head_hosts=("host-a",))], hosts).head_hosts == {"head": ("host-a",)}, (
        "it was promised that one"
    )


BUSY = [host("host-a", 4, free=1), host("host-b", 2, free=0), host("host-c", 4, drained=True)]


@pytest.mark.parametrize(
    ("queue", "hosts", "told"),
    [
        ([job("j")], [], "No CPU host is connected."),
        ([job("j")], [host("host-a", 4, live=False)], "No CPU host is connected."),
        ([job("j")], [host("host-a", 4, drained=True)], "Every CPU host is drained."),
        ([job("j", 5)], [host("host-a", 4)], "The job needs 5 CPU slots on one host. The largest host has 4 slots."),
        (
            [job("j", 5)],
            [host("host-a", 4), host("host-b", 8, drained=True)],
            "The job needs 5 CPU slots on one host. The largest available host has 4 slots.",
        ),
        (
            [job("j", 5, "host-a")],
            [host("host-a", 4)],
            "The job needs 5 CPU slots. The required host host-a has 4 slots.",
        ),
        ([job("j", 1, "host-z")], BUSY, "The required host host-z is not a CPU host of this board."),
        ([job("j", 1, "host-c")], BUSY, "The required host host-c is drained."),
        (
            [job("j", 1, "host-b")],
            BUSY,
            "The job needs 1 CPU slot on the required host. Host host-b has 0 of 2 slots free.",
        ),
        ([job("j", 3)], BUSY, "The job needs 3 CPU slots on one host. Host host-a has 1 of 4 slots free."),
        (
            [job("j", 2), job("ahead", 4, age=1, owner=2)],
            BUSY,
            "The job needs 2 CPU slots on one host. Host host-b has the most free slots: 0 of 2. "
            "1 job is ahead and needs 4 slots.",
        ),
        (
            [job("j", 2), job("first", 4, age=3), job("second", 2, age=2, owner=2)],
            BUSY,
            "The job needs 2 CPU slots on one host. Host host-b has the most free slots: 0 of 2. "
            '2 jobs are ahead. The first, "name-of-first", needs 4 slots.',
        ),
        (
            [job("j", 2), *(job(f"ahead-{number}", 4, age=1) for number in range(47))],
            BUSY,
            "The job needs 2 CPU slots on one host. No available host has enough free slots. "
            "At least 20 jobs are ahead.",
        ),
    ],
)
def test_wait_reasons(queue: list[QueuedJob], hosts: list[HostState], told: str) -> None:
    assert plan_pass(queue, hosts).reasons["j"] == told


@given(some_queue(), some_hosts())
def test_reasons_name_no_foreign_job(queue: list[QueuedJob], hosts: list[HostState]) -> None:
    """Reasons for the jobs of one owner contain no name or id of the jobs of the other owner."""
    queue = [job._replace(name=f"secret-of-{job.owner}") for job in queue]
    reasons = plan_pass(queue, [*hosts, host("host-full", 10, free=0)]).reasons
    for job_ in queue:
        text = reasons.get(job_.id, "")
        assert f"secret-of-{3 - job_.owner}" not in text
        assert not any(other.id in text for other in queue)


def test_reasons_with_the_longest_names_fit() -> None:
    """The longest reason is shorter than the field, so no reason is cut."""
    long_host = "h" * 100
    queue = [job(f"ahead-{n}", 65536, name=LONG, age=9) for n in range(9)] + [job("j", 65535, name=LONG)]
    hosts = [host(long_host, 65536, free=1), host(long_host + "2", 65536, free=0)]
    assert all(len(text) < 500 for text in plan_pass(queue, hosts).reasons.values())


def test_one_start_changes_few_reasons() -> None:
    """With 1,000 waiting jobs, a start does not change the reasons of all later jobs."""
    queue = [job(f"{number:04}", 4, age=1000 - number) for number in range(1000)]
    hosts = [host("host-a", 4, free=0), host("host-b", 4, free=0)]
    before = plan_pass(queue, hosts).reasons
    after = plan_pass(queue, [hosts[0], host("host-b", 4)]).reasons
    assert sum(before[name] != text for name, text in after.items()) < 25


def test_reasons_name_paused_pools_and_reservations() -> None:
    paused = host("host-a", 4, pools=frozenset({"big"}), paused="big")
    assert plan_pass([job("j", pool="big")], [paused]).reasons["j"] == (
        "Every CPU host of pool big is in the paused pool big."
    )
    booked = host("host-a", 4, bookings=(Booking("other", 100.0),))
    assert places(plan_pass([job("short", limit_s=100)], [booked])) == {"short": "host-a"}
    assert plan_pass([job("long")], [booked]).reasons["long"] == (
        "Every available CPU host is reserved for another project."
    )
    assert plan_pass([job("j", labels=frozenset({"ib"}))], [booked]).reasons["j"] == (
        "No CPU host with label ib is connected."
    )
