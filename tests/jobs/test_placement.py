"""What `place` promises, for any queue and any hosts."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.queue.scheduling.placement import Plan, place
from jobs.queue.scheduling.states import Booking, HostState, Occupant, Preemption, Quota, Share, Waiting

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
    assert all(len(plan.kept[head.id]) == 1 for head in heads)
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
        self.running: dict[str, tuple[tuple[Share, ...], int]] = {}  # by job: where, and when it began
        self.queue: dict[str, Waiting] = {}
        self.kept: dict[str, tuple[str, ...]] = {}
        self.now = 0

    def free(self, name: str) -> tuple[int, ...]:
        taken = {slot for shares, _ in self.running.values() for on, slots in shares for slot in slots if on == name}
        return tuple(slot for slot in range(self.slots[name]) if slot not in taken)

    def schedule(self) -> Plan:
        self.now += 1
        hosts = [HostState(name, "cpu", slots, self.free(name)) for name, slots in self.slots.items()]
        plan = place([job._replace(kept=self.kept.get(job.id, ())) for job in self.queue.values()], hosts)
        for placement in plan.placements:
            del self.queue[placement.job]
            self.running[placement.job] = (placement.shares, self.now)
        self.kept = plan.kept
        return plan


@st.composite
def full_world(draw: st.DrawFn, hosts: int) -> World:
    """Hosts of 2 to 6 slots with jobs that are older than any head."""
    world = World({name: draw(st.integers(2, 6)) for name in NAMES[:hosts]})
    for name, slots in world.slots.items():
        for at in draw(st.sets(st.integers(0, slots - 1), min_size=1)):
            world.running[f"old-{name}-{at}"] = ((Share(name, (at,)),), 0)
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
        old = [len(slots) for name, (((on, slots),), _) in world.running.items() if on == promised and "old" in name]
        assert world.slots[promised] - sum(old) < head.num_slots, "a later job keeps the head out"
        ended = data.draw(st.sampled_from(sorted(world.running)))
        del world.running[ended]


@settings(deadline=None)
@given(st.data())
def test_where_one_host_is_large_enough_later_jobs_change_nothing_for_the_head(data: st.DataObject) -> None:
    """The same world with and without later jobs; the old ones end in the same order."""
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
        world.running = {name: row for name, row in world.running.items() if world.now - row[1] < lasts}
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


# Gangs over several hosts


@st.composite
def some_gangs(draw: st.DrawFn) -> list[Waiting]:
    jobs = []
    for number in range(draw(st.integers(0, 10))):
        tp = draw(st.sampled_from([1, 2, 4]))
        wide = tp * draw(st.sampled_from([1, 1, 2]))
        jobs.append(
            job(
                f"id-{number}-",
                wide * draw(st.integers(1, 6)),
                draw(st.sampled_from(["", "", "", *NAMES])),
                priority=draw(st.integers(-1, 1)),
                age=draw(st.integers(0, 3)),
                units=tuple(dict.fromkeys((wide, tp))),
                max_hosts=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
                project=draw(st.sampled_from(["default", "other"])),
                pool=draw(st.sampled_from(["", "", "large", "absent"])),
                labels=draw(st.sampled_from([frozenset(), frozenset(), frozenset({"nvlink"})])),
                kept=draw(st.just(()) | st.lists(st.sampled_from(NAMES), unique=True).map(tuple)),
                limit_s=draw(st.none() | st.just(60)),
            )
        )
    return [each._replace(max_hosts=1) if each.wanted_host else each for each in jobs]


@st.composite
def some_labelled_hosts(draw: st.DrawFn) -> list[HostState]:
    return [
        each._replace(
            device="cpu",
            device_name=draw(st.sampled_from(["a100", "a100", "h100"])),
            labels=draw(st.sampled_from([frozenset(), frozenset({"nvlink"})])),
            pools=draw(st.sampled_from([frozenset(), frozenset({"large"})])),
            paused=draw(st.sampled_from(["", "", "", "large"])),
            bookings=draw(st.sampled_from([(), (), (Booking("other", 0.0),), (Booking("other", 3600.0),)])),
        )
        for each in draw(some_hosts())
    ]


def may_be_on(job: Waiting, host: HostState) -> bool:
    """Whether a rank of it may ever be there."""
    closed = not host.live or host.drained or host.paused
    asked = job.wanted_host in ("", host.name) and job.pool in ("", *host.pools) and job.labels <= host.labels
    free_of = all(job.project == b.project or (job.limit_s or 10**9) <= b.in_s for b in host.bookings)
    return asked and free_of and not closed


def smallest_number_of_hosts(job: Waiting, unit: int, free: dict[str, int]) -> int | None:
    """By trying every set."""
    for count in range(1, len(free) + 1):
        if job.max_hosts and count > job.max_hosts:
            return None
        for names in itertools.combinations(free, count):
            room = max(free.values()) if count == 1 else sum(free[name] // unit * unit for name in names)
            if room >= job.num_slots:
                return count
    return None


@given(some_gangs(), some_labelled_hosts())
def test_a_gang_is_whole_on_hosts_of_one_model_that_it_may_use_with_its_groups_inside(
    queue: list[Waiting], hosts: list[HostState]
) -> None:
    asked, there = {job.id: job for job in queue}, {host.name: host for host in hosts}
    taken: set[tuple[str, int]] = set()
    for job_id, shares in place(queue, hosts).placements:
        job, names = asked[job_id], [share.host for share in shares]
        assert sum(len(share.slots) for share in shares) == job.num_slots
        assert len(set(names)) == len(names) <= (job.max_hosts or len(names))
        assert all(may_be_on(job, there[name]) for name in names)
        assert len({there[name].device_name for name in names}) == 1
        assert all(len(share.slots) % min(job.units) == 0 for share in shares), "a tp group was divided"
        for name, slots in shares:
            assert slots
            assert set(slots) <= set(there[name].free)
            assert taken.isdisjoint((name, slot) for slot in slots)
            taken |= {(name, slot) for slot in slots}


@given(some_gangs(), some_labelled_hosts())
def test_one_gang_alone_starts_on_as_few_hosts_as_have_room(queue: list[Waiting], hosts: list[HostState]) -> None:
    for job in queue[:1]:
        plan = place([job], hosts)
        models: dict[str, dict[str, int]] = {}
        for host in hosts:
            if may_be_on(job, host):
                models.setdefault(host.device_name, {})[host.name] = len(host.free)
        fewest = [smallest_number_of_hosts(job, min(job.units), free) for free in models.values()]
        possible = [number for number in fewest if number is not None]
        if plan.placements:
            assert len(plan.placements[0].shares) >= min(possible)
            if len(job.units) == 1:
                assert len(plan.placements[0].shares) == min(possible)
        elif len(job.units) == 1:
            assert not possible, "there is room"


@given(some_gangs(), some_labelled_hosts())
def test_hosts_kept_for_a_gang_can_hold_it_and_are_kept_for_it_alone(
    queue: list[Waiting], hosts: list[HostState]
) -> None:
    plan, there, asked = place(queue, hosts), {host.name: host for host in hosts}, {job.id: job for job in queue}
    held: list[str] = []
    for job_id, names in plan.kept.items():
        job = asked[job_id]
        held += names
        assert job_id in plan.reasons
        assert all(may_be_on(job, there[name]) for name in names)
        assert len(names) <= (job.max_hosts or len(names))
        slots = [there[name].slots for name in names]
        unit = min(job.units)
        assert job.num_slots <= max(slots[0] if len(names) == 1 else 0, sum(size // unit * unit for size in slots))
    assert len(held) == len(set(held))
    order = [job.id for job in in_order(queue)]
    for job_id, shares in plan.placements:
        for share in shares:
            holder = next((job for job, names in plan.kept.items() if share.host in names), None)
            assert holder is None or order.index(job_id) < order.index(holder), "a later job got slots of a kept host"


@given(some_gangs(), some_labelled_hosts(), st.randoms(use_true_random=False))
def test_gangs_are_placed_alike_whatever_the_order_of_rows(
    queue: list[Waiting], hosts: list[HostState], random: object
) -> None:
    quotas = {"other": Quota(8, 2)}
    plan = place(queue, hosts, quotas=quotas)
    random.shuffle(queue)  # type: ignore[attr-defined]
    random.shuffle(hosts)  # type: ignore[attr-defined]
    assert place(queue, hosts, quotas=quotas) == plan


@given(some_gangs(), some_labelled_hosts(), st.integers(0, 12), st.integers(0, 12))
def test_a_quota_is_never_exceeded_and_holds_back_nobody_elses(
    queue: list[Waiting], hosts: list[HostState], slots: int, used: int
) -> None:
    plan = place(queue, hosts, quotas={"other": Quota(slots, used)})
    asked = {job.id: job for job in queue}
    started = sum(asked[p.job].num_slots for p in plan.placements if asked[p.job].project == "other")
    assert started == 0 or used + started <= slots
    assert {*plan.reasons, *(p.job for p in plan.placements)} == {*asked}
    without = place([job for job in queue if job.project == "default"], hosts)
    if slots == 0:
        assert [p for p in plan.placements if asked[p.job].project == "default"] == without.placements


def test_what_starts_in_a_pass_counts_to_the_quota() -> None:
    queue = [job("first", 2, age=2, project="p"), job("second", 2, age=1, project="p")]
    assert places(place(queue, [host("host-a", 8)], quotas={"p": Quota(3, 0)})) == {"first": "host-a"}


def test_the_first_that_a_quota_holds_back_holds_back_its_project() -> None:
    """Or small jobs would keep it out for ever."""
    queue = [job("large", 4, age=2, project="p"), job("small", 1, age=1, project="p"), job("other", 1)]
    plan = place(queue, [host("host-a", 8)], quotas={"p": Quota(4, 1)})
    assert places(plan) == {"other": "host-a"}
    assert plan.reasons == {
        "large": "needs 4 slots; project p may hold 4, and 1 are held or kept for jobs of its ahead",
        "small": "needs 1 slot; project p may hold 4, and a job of its ahead waits for them",
    }


def test_what_a_head_needs_of_its_quota_is_kept_for_it() -> None:
    queue = [job("head", 4, age=2, project="p"), job("late", 2, project="p")]
    plan = place(queue, [host("host-a", 4, free=1), host("host-b", 2)], quotas={"p": Quota(5, 0)})
    assert plan.kept == {"head": ("host-a",)}
    assert plan.placements == []


def gang(id: str, num_slots: int, unit: int = 1, **rest: object) -> Waiting:
    return job(id, num_slots, units=(unit,), **{"max_hosts": 0, **rest})


def shares_of(plan: Plan) -> dict[str, dict[str, int]]:
    return {p.job: {share.host: len(share.slots) for share in p.shares} for p in plan.placements}


def test_tensor_parallel_groups_stay_inside_a_host() -> None:
    plan = place([gang("g", 8, 4)], [host("host-a", 6), host("host-b", 7)])
    assert shares_of(plan) == {"g": {"host-a": 4, "host-b": 4}}
    assert place([gang("g", 8, 8)], [host("host-a", 6), host("host-b", 7)]).reasons["g"] == (
        "needs 8 slots on cpu hosts, 8 or a multiple of it on each, but its tensor-parallel group of 8 stays on one; "
        "the largest has 7"
    )


def test_context_parallel_groups_stay_inside_a_host_where_they_fit_one() -> None:
    wide = gang("g", 8)._replace(units=(4, 2))
    assert shares_of(place([wide], [host("host-a", 4), host("host-b", 4)])) == {"g": {"host-a": 4, "host-b": 4}}
    assert shares_of(place([wide], [host(n, 2) for n in NAMES[:4]])) == {"g": dict.fromkeys(NAMES[:4], 2)}
    assert place([wide], [host("host-a", 4, free=2), *(host(n, 4, free=3) for n in NAMES[1:])]).placements == [], (
        "it waits for hosts where they fit"
    )


def test_a_gang_takes_one_model_of_device() -> None:
    hosts = [host("host-a", 4, device_name="a100"), host("host-b", 4, device_name="h100")]
    assert place([gang("g", 8)], hosts).reasons == {"g": "needs 8 slots on one cpu host; the largest has 4"}
    hosts.append(host("host-c", 3, device_name="h100"))
    assert place([gang("g", 8)], hosts).reasons == {"g": "needs 8 slots on cpu hosts; those of one model have 7 so"}


def test_a_gangs_hosts_are_kept_and_said() -> None:
    hosts = [host("host-a", 4, free=1), host("host-b", 4, free=3), host("host-c", 4, free=0)]
    plan = place([gang("head", 8, 2, age=1), gang("late", 1)], hosts)
    assert plan.kept == {"head": ("host-a", "host-b")}
    assert plan.placements == []
    assert plan.reasons["head"] == (
        "needs 8 slots on cpu hosts, 2 or a multiple of it on each; host-a, host-b have 4 of 8 free and are kept for it"
    )


@settings(deadline=None)
@given(st.data())
def test_a_gang_starts_when_the_old_jobs_of_its_hosts_have_ended_whatever_comes_after_it(data: st.DataObject) -> None:
    world = data.draw(full_world(hosts=4))
    total = sum(slots // 2 * 2 for slots in world.slots.values())
    most = max(world.slots.values())
    head = gang("head", data.draw(st.integers(most // 2 + 1, total // 2).map(lambda n: 2 * n)), 2, age=1)
    world.queue["head"] = head
    promised: tuple[str, ...] = ()
    for step in range(80):
        for number in range(data.draw(st.integers(0, 2))):
            late = gang(f"late-{step}-{number}", data.draw(st.integers(1, 6)), max_hosts=data.draw(st.integers(0, 2)))
            world.queue[late.id] = late
        plan = world.schedule()
        if "head" in world.running:
            return
        promised = promised or plan.kept["head"]
        assert plan.kept["head"] == promised
        old = [name for name, (shares, _) in world.running.items() if "old" in name and shares[0].host in promised]
        assert old, "a later job keeps the head out"
        ended = data.draw(st.sampled_from(sorted(world.running)))
        del world.running[ended]


# Giving way


def occupied(name: str, slots: int, *occupants: Occupant, free: int = 0) -> HostState:
    return host(name, slots, free)._replace(occupants=occupants)


def occupant(job: str, slots: int, priority: int = 0, age: int = 0, leaving: bool = False) -> Occupant:
    return Occupant(job, priority, EPOCH - timedelta(seconds=age), slots, leaving)


def test_the_fewest_preemptible_jobs_of_the_lowest_priority_give_way() -> None:
    urgent = job("urgent", 4, priority=5)
    hosts = [
        occupied("host-a", 4, occupant("old", 2, age=9), occupant("young", 2, age=1)),
        occupied("host-b", 4, occupant("whole", 2, priority=5), occupant("other", 2)),
    ]
    assert place([urgent], hosts).preempted == [Preemption("young", "urgent"), Preemption("old", "urgent")]
    hosts[0] = occupied("host-a", 6, occupant("old", 2, age=9), occupant("young", 2, age=1), free=2)
    assert place([urgent], hosts).preempted == [Preemption("young", "urgent")]


def test_nobody_gives_way_to_an_equal_or_in_vain_or_twice() -> None:
    hosts = [occupied("host-a", 4, occupant("a", 2), occupant("b", 1, priority=3))]
    assert place([job("equal", 2, priority=0)], hosts).preempted == []
    assert place([job("vain", 4, priority=9)], hosts).preempted == [], "one slot is held by who does not give way"
    leaving = [occupied("host-a", 4, occupant("a", 2, leaving=True), occupant("b", 2))]
    assert place([job("soon", 2, priority=9)], leaving).preempted == [], "two slots are being left already"


def test_a_gang_that_gives_way_frees_all_its_hosts() -> None:
    hosts = [occupied("host-a", 4, occupant("g", 4)), occupied("host-b", 4, occupant("g", 4))]
    plan = place([gang("urgent", 8, 4, priority=1)], hosts)
    assert plan.preempted == [Preemption("g", "urgent")]
    assert plan.reasons["urgent"].endswith("; preemptible jobs of lower priority are ending for it")


@given(some_gangs(), some_labelled_hosts(), st.data())
def test_whoever_gives_way_is_of_lower_priority_and_the_head_then_starts(
    queue: list[Waiting], hosts: list[HostState], data: st.DataObject
) -> None:
    known: dict[str, Occupant] = {}
    for at, each in enumerate(hosts):
        left, told = each.slots - len(each.free), []
        while left > 0 and data.draw(st.booleans()):
            size = data.draw(st.integers(1, left))
            told.append(occupant(f"run-{at}-{len(told)}", size, data.draw(st.integers(-2, 1))))
            left -= size
        known |= {who.job: who for who in told}
        hosts[at] = each._replace(occupants=tuple(told))
    plan = place(queue, hosts)
    asked = {job.id: job for job in queue}
    for victim, for_job in plan.preempted:
        assert known[victim].priority < asked[for_job].priority
    assert len({each.victim for each in plan.preempted}) == len(plan.preempted)
    gone = {each.victim for each in plan.preempted}
    after = []
    for each in hosts:
        taken = {s for p in plan.placements for share in p.shares if share.host == each.name for s in share.slots}
        more = sum(who.slots for who in each.occupants if who.job in gone)
        held = [s for s in range(each.slots) if s not in each.free]
        after.append(each._replace(free=tuple(sorted({*each.free, *held[:more]} - taken)), occupants=()))
    for job_id in {each.for_job for each in plan.preempted}:
        alone = asked[job_id]._replace(wanted_host=asked[job_id].wanted_host)
        assert place([alone], [h for h in after if h.name in _kept_hosts(plan, asked[job_id])]).placements


def _kept_hosts(plan: Plan, job: Waiting) -> tuple[str, ...]:
    return plan.kept.get(job.id, (job.wanted_host,))


def test_a_paused_pool_and_a_reservation_are_said() -> None:
    paused = host("host-a", 4, pools=frozenset({"big"}), paused="big")
    assert place([job("j", pool="big")], [paused]).reasons["j"] == (
        "every cpu host of pool big is in pool big, which is paused, and takes no new jobs"
    )
    booked = host("host-a", 4, bookings=(Booking("other", 100.0),))
    assert places(place([job("short", limit_s=100)], [booked])) == {"short": "host-a"}
    assert place([job("long")], [booked]).reasons["long"] == (
        "every cpu host that takes jobs is reserved for another project"
    )
    assert place([job("j", labels=frozenset({"ib"}))], [booked]).reasons["j"] == (
        "no cpu host with label ib is connected"
    )
