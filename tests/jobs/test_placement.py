"""What `place` promises, for any queue and any hosts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.queue.placement import Plan, place
from jobs.queue.states import HostState, Waiting

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
MOSTLY_CPU = st.sampled_from(["cpu", "cpu", "cpu", "cuda"])
NAMES = [f"host-{letter}" for letter in "abcde"]
LONG = "x" * 100  # the longest name of a job or a host


def job(id: str, num_slots: int = 1, wanted_host: str = "", priority: int = 0, age: int = 0, **rest: object) -> Waiting:
    """`age`: the higher, the longer it waits."""
    fields = {"name": f"name-of-{id}", "owner": 1, "device": "cpu", **rest}
    told = {"num_slots": num_slots, "wanted_host": wanted_host, "priority": priority, "standing": priority, **fields}
    return Waiting(id=id, created=EPOCH - timedelta(seconds=age), **told)


def host(name: str, slots: int, free: int | None = None, **rest: object) -> HostState:
    fields = {"device": "cpu", **rest}
    return HostState(name=name, slots=slots, free=tuple(range(slots if free is None else free)), **fields)


@st.composite
def some_hosts(draw: st.DrawFn) -> list[HostState]:
    hosts = []
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        slots = draw(st.integers(1, 8))
        free = draw(st.sets(st.integers(0, slots - 1)))
        drained, live = not draw(st.integers(0, 5)), bool(draw(st.integers(0, 5)))
        device = draw(MOSTLY_CPU)
        hosts.append(HostState(name, device, slots, tuple(sorted(free)), drained, live))
    return hosts


@st.composite
def some_queue(draw: st.DrawFn) -> list[Waiting]:
    one = st.builds(
        Waiting,
        id=st.just(""),
        name=st.just("name"),
        owner=st.integers(1, 2),
        device=MOSTLY_CPU,
        num_slots=st.integers(1, 4) | st.integers(1, 10),
        wanted_host=st.sampled_from(["", "", "", *NAMES, "absent"]),
        priority=st.just(0),
        standing=st.sampled_from([-1.0, 0.0, 0.5, 1.0]),
        created=st.integers(0, 3).map(lambda s: EPOCH + timedelta(seconds=s)),
        kept=st.just(()) | st.lists(st.sampled_from([*NAMES, "absent"]), unique=True).map(tuple),
        units=st.just((1,)),
        max_hosts=st.just(1),
        project=st.just("default"),
        pool=st.just(""),
        labels=st.just(frozenset()),
        limit_s=st.none(),
    )
    return [job._replace(id=f"id-{number}-") for number, job in enumerate(draw(st.lists(one, max_size=12)))]


def in_order(queue: list[Waiting]) -> list[Waiting]:
    return sorted(queue, key=lambda job: (-job.standing, job.created, job.id))


def places(plan: Plan) -> dict[str, str]:
    """The host of each job that was placed on one."""
    return {placement.job: share.host for placement in plan.placements for share in placement.shares}


def may_use(job: Waiting, host: HostState) -> bool:
    """Whether the job could ever run there, as the host is now."""
    takes = host.live and not host.drained and host.device == job.device and job.num_slots <= host.slots
    return takes and job.wanted_host in ("", host.name)


@given(some_queue(), some_hosts())
def test_a_gang_gets_free_slots_of_one_host_that_takes_jobs_and_nobody_gets_them_twice(
    queue: list[Waiting], hosts: list[HostState]
) -> None:
    asked, there = {job.id: job for job in queue}, {host.name: host for host in hosts}
    taken: set[tuple[str, int]] = set()
    for job_id, ((name, slots),) in place(queue, hosts).placements:
        assert may_use(asked[job_id], there[name])
        assert len(slots) == len(set(slots)) == asked[job_id].num_slots
        assert set(slots) <= set(there[name].free)
        assert taken.isdisjoint((name, slot) for slot in slots)
        taken |= {(name, slot) for slot in slots}


@given(some_queue(), some_hosts())
def test_every_job_is_placed_once_or_has_a_reason(queue: list[Waiting], hosts: list[HostState]) -> None:
    plan = place(queue, hosts)
    placed = [placement.job for placement in plan.placements]
    assert sorted([*placed, *plan.reasons]) == sorted(job.id for job in queue)
    assert all(0 < len(text) <= 500 for text in plan.reasons.values())


@given(some_queue(), some_hosts())
def test_no_job_gets_slots_on_which_one_before_it_could_have_run(queue: list[Waiting], hosts: list[HostState]) -> None:
    plan = place(queue, hosts)
    on = places(plan)
    for name, free in ((host.name, len(host.free)) for host in hosts):
        there = next(host for host in hosts if host.name == name)
        left = free
        waits: Waiting | None = None
        for job in in_order(queue):
            if on.get(job.id) == name:
                assert waits is None, f"{waits} could have had the slots of {job}"
                left -= job.num_slots
            elif job.id not in on and may_use(job, there) and job.num_slots <= left:
                waits = job


@given(some_queue(), some_hosts())
def test_hosts_idle_only_for_one_head_a_device_and_for_those_that_ask_for_them(
    queue: list[Waiting], hosts: list[HostState]
) -> None:
    """Whoever waits though a host has room for it waits for a holder before it: a pinned job, or the one head."""
    plan = place(queue, hosts)
    on = places(plan)
    asks = {job.id: job.num_slots for job in queue}
    heads = [job for job in queue if job.id in plan.kept]
    assert len({job.device for job in heads}) == len(heads)
    assert all(not head.wanted_host and head.id in plan.reasons for head in heads)
    free = {h.name: len(h.free) - sum(asks[job] for job in on if on[job] == h.name) for h in hosts}
    for place_of, late in enumerate(in_order(queue)):
        for there in (h for h in hosts if late.id in plan.reasons and may_use(late, h)):
            before = [job for job in in_order(queue)[:place_of] if job.id in plan.reasons and may_use(job, there)]
            held = any(job.wanted_host or plan.kept.get(job.id) == (there.name,) for job in before)
            assert held or free[there.name] < late.num_slots


@given(some_queue(), some_hosts())
def test_jobs_that_no_host_could_take_change_nothing_for_others(queue: list[Waiting], hosts: list[HostState]) -> None:
    hopeful = [job for job in queue if any(may_use(job, host) for host in hosts)]
    with_them, without = place(queue, hosts), place(hopeful, hosts)
    assert (with_them.placements, with_them.kept) == (without.placements, without.kept)
    assert {job.id: with_them.reasons.get(job.id) for job in hopeful} == {
        job.id: without.reasons.get(job.id) for job in hopeful
    }


@given(some_queue(), some_hosts(), st.randoms(use_true_random=False))
def test_the_order_in_which_rows_come_means_nothing(
    queue: list[Waiting], hosts: list[HostState], random: object
) -> None:
    plan = place(queue, hosts)
    random.shuffle(queue)  # type: ignore[attr-defined]
    random.shuffle(hosts)  # type: ignore[attr-defined]
    assert place(queue, hosts) == plan


class World:
    """Hosts with jobs on them, and passes in between. Nothing here knows how `place` decides."""

    def __init__(self, slots: dict[str, int]) -> None:
        self.slots = slots
        self.running: dict[str, tuple[str, tuple[int, ...], int]] = {}  # by job: host, slots, when it began
        self.queue: dict[str, Waiting] = {}
        self.kept: dict[str, tuple[str, ...]] = {}
        self.now = 0

    def free(self, name: str) -> tuple[int, ...]:
        taken = {slot for on, slots, _ in self.running.values() for slot in slots if on == name}
        return tuple(slot for slot in range(self.slots[name]) if slot not in taken)

    def schedule(self) -> Plan:
        self.now += 1
        hosts = [HostState(name, "cpu", slots, self.free(name)) for name, slots in self.slots.items()]
        plan = place([job._replace(kept=self.kept.get(job.id, ())) for job in self.queue.values()], hosts)
        for placement in plan.placements:
            del self.queue[placement.job]
            ((host, slots),) = placement.shares
            self.running[placement.job] = (host, slots, self.now)
        self.kept = plan.kept
        return plan


@st.composite
def full_world(draw: st.DrawFn, hosts: int) -> World:
    """Hosts of 2 to 6 slots with jobs that are older than any head."""
    world = World({name: draw(st.integers(2, 6)) for name in NAMES[:hosts]})
    for name, slots in world.slots.items():
        for at in draw(st.sets(st.integers(0, slots - 1), min_size=1)):
            world.running[f"old-{name}-{at}"] = (name, (at,), 0)
    return world


@settings(deadline=None)
@given(st.data())
def test_a_head_starts_when_the_old_jobs_of_its_host_have_ended_whatever_comes_after_it(data: st.DataObject) -> None:
    """Jobs end in any order, later ones come at any time and run for ever unless drawn to end."""
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
        (kept,) = plan.kept["head"]
        promised = promised or kept
        assert kept == promised
        old = [len(slots) for name, (on, slots, _) in world.running.items() if on == promised and "old" in name]
        assert world.slots[promised] - sum(old) < head.num_slots, "a later job keeps the head out"
        ended = data.draw(st.sampled_from(sorted(world.running)))
        del world.running[ended]


@settings(deadline=None)
@given(st.data())
def test_where_one_host_is_large_enough_later_jobs_change_nothing_for_the_head(data: st.DataObject) -> None:
    """The same world with and without later jobs; the old ones end in the same order."""
    alone = data.draw(full_world(hosts=3))
    alone.slots["host-z"] = 8
    alone.running |= {f"old-z-{at}": ("host-z", (at,), 0) for at in data.draw(st.sets(st.integers(0, 7), min_size=1))}
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


def test_a_stream_of_small_jobs_starves_no_large_one() -> None:
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
        world.running = {name: row for name, row in world.running.items() if world.now - row[2] < lasts}
    assert all(started[name] - lasts <= len(large) * lasts for name in large)


def test_a_head_that_fits_one_host_leaves_the_others_open() -> None:
    hosts = [host("large", 8, free=5), host("small", 4)]
    plan = place([job("head", 8, age=2), job("next", 2, age=1), job("late", 2)], hosts)
    assert places(plan) == {"next": "small", "late": "small"}


def test_a_job_for_an_absent_host_holds_up_nobody() -> None:
    plan = place([job("pinned", 1, "absent", priority=9), job("other", 4)], [host("host-a", 4)])
    assert [placement.job for placement in plan.placements] == ["other"]


def test_a_pinned_job_overtakes_no_job_of_a_higher_priority() -> None:
    hosts = [host("host-a", 4, free=2)]
    plan = place([job("urgent", 4, priority=100), job("pinned", 2, "host-a")], hosts)
    assert plan.placements == []
    assert plan.reasons == {
        "urgent": "needs 4 slots on one cpu host; host-a has 2 of 4 free and is kept for it",
        "pinned": "needs 2 slots on host-a, the one host it asks for; "
        "host-a has 2 of 4 free and is kept for a job ahead that needs 4 slots",
    }


def test_of_equal_priority_the_older_starts() -> None:
    plan = place([job("a-young", 4, age=1), job("old", 4, age=2)], [host("host-a", 4)])
    assert [placement.job for placement in plan.placements] == ["old"]


def test_the_tightest_fit_keeps_large_holes() -> None:
    plan = place([job("small", 2), job("large", 8, age=-1)], [host("host-a", 8), host("host-b", 3)])
    assert places(plan) == {"small": "host-b", "large": "host-a"}


def test_the_head_holds_the_host_that_needs_the_fewest_further_slots() -> None:
    hosts = [host("host-a", 8, free=1), host("host-b", 8, free=3), host("host-c", 4, free=3)]
    assert place([job("head", 8)], hosts).kept == {"head": ("host-b",)}
    assert place([job("head", 8, kept=("host-a",))], hosts).kept == {"head": ("host-a",)}, "it was promised that one"


BUSY = [host("host-a", 4, free=1), host("host-b", 2, free=0), host("host-c", 4, drained=True)]


@pytest.mark.parametrize(
    ("queue", "hosts", "told"),
    [
        ([job("j")], [], "no cpu host is connected"),
        ([job("j")], [host("host-a", 4, live=False)], "no cpu host is connected"),
        ([job("j")], [host("host-a", 4, drained=True)], "every cpu host is drained and takes no new jobs"),
        ([job("j", 5)], [host("host-a", 4)], "needs 5 slots on one cpu host; the largest has 4"),
        (
            [job("j", 5)],
            [host("host-a", 4), host("host-b", 8, drained=True)],
            "needs 5 slots on one cpu host; the largest that takes jobs now has 4",
        ),
        ([job("j", 5, "host-a")], [host("host-a", 4)], "needs 5 slots; host-a, the one host it asks for, has 4"),
        ([job("j", 1, "host-z")], BUSY, "host-z, the one host it asks for, is not connected"),
        ([job("j", 1, "host-c")], BUSY, "host-c, the one host it asks for, is drained and takes no new jobs"),
        (
            [job("j", 1, "host-b")],
            BUSY,
            "needs 1 slot on host-b, the one host it asks for; host-b has 0 of 2 free and is kept for it",
        ),
        ([job("j", 3)], BUSY, "needs 3 slots on one cpu host; host-a has 1 of 4 free and is kept for it"),
        (
            [job("j", 2), job("ahead", 4, age=1, owner=2)],
            BUSY,
            "needs 2 slots on one cpu host; of those open to it host-b has 0 of 2 free, the most; "
            "1 job is ahead and needs 4 slots",
        ),
        (
            [job("j", 2), job("first", 4, age=3), job("second", 2, age=2, owner=2)],
            BUSY,
            "needs 2 slots on one cpu host; of those open to it host-b has 0 of 2 free, the most; "
            "2 jobs are ahead, the first (name-of-first) needs 4 slots",
        ),
        (
            [job("j", 2), *(job(f"ahead-{number}", 4, age=1) for number in range(47))],
            BUSY,
            "needs 2 slots on one cpu host; none open to it has as many free; at least 20 jobs are ahead",
        ),
    ],
)
def test_what_it_says(queue: list[Waiting], hosts: list[HostState], told: str) -> None:
    assert place(queue, hosts).reasons["j"] == told


@given(some_queue(), some_hosts())
def test_no_reason_names_a_strangers_job(queue: list[Waiting], hosts: list[HostState]) -> None:
    """Each owner's jobs bear a secret; no text for the other's may hold it, nor any job's id."""
    queue = [job._replace(name=f"secret-of-{job.owner}") for job in queue]
    reasons = place(queue, [*hosts, host("host-full", 10, free=0)]).reasons
    for job_ in queue:
        text = reasons.get(job_.id, "")
        assert f"secret-of-{3 - job_.owner}" not in text
        assert not any(other.id in text for other in queue)


def test_the_longest_names_fit() -> None:
    """With room to spare: a text that is cut off is not the truth."""
    long_host = "h" * 100
    queue = [job(f"ahead-{n}", 65536, name=LONG, age=9) for n in range(9)] + [job("j", 65535, name=LONG)]
    hosts = [host(long_host, 65536, free=1), host(long_host + "2", 65536, free=0)]
    assert all(len(text) < 500 for text in place(queue, hosts).reasons.values())


def test_one_start_far_ahead_changes_few_texts() -> None:
    """1,000 waiting jobs of one size: those behind are not told anew each time one before them starts."""
    queue = [job(f"{number:04}", 4, age=1000 - number) for number in range(1000)]
    hosts = [host("host-a", 4, free=0), host("host-b", 4, free=0)]
    before = place(queue, hosts).reasons
    after = place(queue, [hosts[0], host("host-b", 4)]).reasons
    assert sum(before[name] != text for name, text in after.items()) < 25
