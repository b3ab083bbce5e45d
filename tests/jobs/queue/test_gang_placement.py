"""Place jobs on several hosts, and with quotas."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.queue.scheduling.placement import plan_pass
from jobs.queue.scheduling.states import HostState, QueuedJob, Quota
from tests.jobs.queue.scheduling_cases import (
    NAMES,
    full_world,
    gang,
    host,
    in_order,
    job,
    may_be_on,
    places,
    shares_of,
    smallest_number_of_hosts,
    some_gangs,
    some_labelled_hosts,
)


@given(some_gangs(), some_labelled_hosts())
def test_gang_is_complete_on_allowed_hosts_of_one_model(queue: list[QueuedJob], hosts: list[HostState]) -> None:
    asked, there = {job.id: job for job in queue}, {host.name: host for host in hosts}
    taken: set[tuple[str, int]] = set()
    for job_id, shares, _ in plan_pass(queue, hosts).placements:
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
def test_single_gang_uses_the_fewest_hosts(queue: list[QueuedJob], hosts: list[HostState]) -> None:
    for asked in queue[:1]:
        plan = plan_pass([asked], hosts)
        models: dict[str, dict[str, int]] = {}
        for there in hosts:
            if may_be_on(asked, there):
                models.setdefault(there.device_name, {})[there.name] = len(there.free)
        fewest = [smallest_number_of_hosts(asked, min(asked.units), free) for free in models.values()]
        possible = [number for number in fewest if number is not None]
        if plan.placements:
            assert len(plan.placements[0].shares) >= min(possible)
            if len(asked.units) == 1:
                assert len(plan.placements[0].shares) == min(possible)
        elif len(asked.units) == 1:
            assert not possible, "there is room"


@given(some_gangs(), some_labelled_hosts())
def test_reserved_hosts_fit_the_gang_and_no_other_job(queue: list[QueuedJob], hosts: list[HostState]) -> None:
    plan, there, asked = plan_pass(queue, hosts), {host.name: host for host in hosts}, {job.id: job for job in queue}
    held: list[str] = []
    for job_id, names in plan.head_hosts.items():
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
    for job_id, shares, is_backfilled in plan.placements:
        for share in shares:
            holder = next((job for job, names in plan.head_hosts.items() if share.host in names), None)
            is_earlier = holder is None or order.index(job_id) < order.index(holder)
            assert is_earlier or is_backfilled, "a later job got slots of a kept host"


@given(some_gangs(), some_labelled_hosts(), st.randoms(use_true_random=False))
def test_gang_placement_does_not_depend_on_row_order(
    queue: list[QueuedJob], hosts: list[HostState], random: object
) -> None:
    quotas = {"other": Quota(8, 2)}
    plan = plan_pass(queue, hosts, quotas=quotas)
    random.shuffle(queue)  # type: ignore[attr-defined]
    random.shuffle(hosts)  # type: ignore[attr-defined]
    assert plan_pass(queue, hosts, quotas=quotas) == plan


@given(some_gangs(), some_labelled_hosts(), st.integers(0, 12), st.integers(0, 12))
def test_quota_is_not_exceeded_and_affects_one_project(
    queue: list[QueuedJob], hosts: list[HostState], slots: int, used: int
) -> None:
    plan = plan_pass(queue, hosts, quotas={"other": Quota(slots, used)})
    asked = {job.id: job for job in queue}
    started = sum(asked[p.job].num_slots for p in plan.placements if asked[p.job].project == "other")
    assert started == 0 or used + started <= slots
    assert {*plan.reasons, *(p.job for p in plan.placements)} == {*asked}
    without = plan_pass([job for job in queue if job.project == "default"], hosts)
    if slots == 0:
        assert [p for p in plan.placements if asked[p.job].project == "default"] == without.placements


def test_started_jobs_count_for_the_quota_at_once() -> None:
    queue = [job("first", 2, age=2, project="p"), job("second", 2, age=1, project="p")]
    assert places(plan_pass(queue, [host("host-a", 8)], quotas={"p": Quota(3, 0)})) == {"first": "host-a"}


def test_first_job_over_quota_blocks_its_project() -> None:
    """Without a reservation, small jobs would delay the large job forever."""
    queue = [job("large", 4, age=2, project="p"), job("small", 1, age=1, project="p"), job("other", 1)]
    plan = plan_pass(queue, [host("host-a", 8)], quotas={"p": Quota(4, 1)})
    assert places(plan) == {"other": "host-a"}
    assert plan.reasons == {
        "large": "The job needs 4 slots. Project p is limited to 4 slots. "
        "Other jobs of the project use or reserve 1 slot.",
        "small": "The job needs 1 slot. Project p is limited to 4 slots. "
        "Another job of the project is ahead in the queue.",
    }


def test_reserves_quota_for_the_head_of_the_queue() -> None:
    queue = [job("head", 4, age=2, project="p"), job("late", 2, project="p")]
    plan = plan_pass(queue, [host("host-a", 4, free=1), host("host-b", 2)], quotas={"p": Quota(5, 0)})
    assert plan.head_hosts == {"head": ("host-a",)}
    assert plan.placements == []


def test_tensor_parallel_groups_stay_inside_a_host() -> None:
    plan = plan_pass([gang("g", 8, 4)], [host("host-a", 6), host("host-b", 7)])
    assert shares_of(plan) == {"g": {"host-a": 4, "host-b": 4}}
    assert plan_pass([gang("g", 8, 8)], [host("host-a", 6), host("host-b", 7)]).reasons["g"] == (
        "The job needs 8 CPU slots on hosts, in multiples of 8 per host. "
        "Each tensor-parallel group of 8 ranks needs one host. The largest host has 7 slots."
    )


def test_context_parallel_groups_stay_inside_a_host_if_they_fit() -> None:
    wide = gang("g", 8)._replace(units=(4, 2))
    assert shares_of(plan_pass([wide], [host("host-a", 4), host("host-b", 4)])) == {"g": {"host-a": 4, "host-b": 4}}
    assert shares_of(plan_pass([wide], [host(n, 2) for n in NAMES[:4]])) == {"g": dict.fromkeys(NAMES[:4], 2)}
    assert plan_pass([wide], [host("host-a", 4, free=2), *(host(n, 4, free=3) for n in NAMES[1:])]).placements == [], (
        "it waits for hosts where they fit"
    )


def test_gang_uses_one_device_model() -> None:
    hosts = [host("host-a", 4, device_name="a100"), host("host-b", 4, device_name="h100")]
    assert plan_pass([gang("g", 8)], hosts).reasons == {
        "g": "The job needs 8 CPU slots on one host. The largest host has 4 slots."
    }
    hosts.append(host("host-c", 3, device_name="h100"))
    told = "The job needs 8 CPU slots on hosts. Hosts of the same hardware model have 7 usable slots."
    assert plan_pass([gang("g", 8)], hosts).reasons == {"g": told}


def test_reserves_and_names_the_hosts_of_a_gang() -> None:
    hosts = [host("host-a", 4, free=1), host("host-b", 4, free=3), host("host-c", 4, free=0)]
    plan = plan_pass([gang("head", 8, 2, age=1), gang("late", 1)], hosts)
    assert plan.head_hosts == {"head": ("host-a", "host-b")}
    assert plan.placements == []
    assert plan.reasons["head"] == (
        "The job needs 8 CPU slots on hosts, in multiples of 2 per host. Hosts host-a, host-b have 4 of 8 slots free."
    )


@settings(deadline=None)
@given(st.data())
def test_later_jobs_do_not_delay_a_gang(data: st.DataObject) -> None:
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
        promised = promised or plan.head_hosts["head"]
        assert plan.head_hosts["head"] == promised
        old = [name for name, (shares, _) in world.running.items() if "old" in name and shares[0].host in promised]
        assert old, "a later job keeps the head out"
        ended = data.draw(st.sampled_from(sorted(world.running)))
        del world.running[ended]


def test_retry_prefers_the_host_with_its_checkpoint() -> None:
    hosts = [host(name, 2) for name in NAMES[:4]]
    retry = gang("retry", 2, checkpoint_host="host-c")
    assert shares_of(plan_pass([retry], hosts))["retry"] == {"host-c": 2}
    assert set(shares_of(plan_pass([retry._replace(num_slots=4)], hosts))["retry"]) == {"host-c", "host-a"}
    models = [host("host-a", 2), host("host-c", 2, device_name="other"), host("host-d", 2, device_name="other")]
    retry = retry._replace(num_slots=4)
    assert set(shares_of(plan_pass([retry], [*models, host("host-b", 2)]))["retry"]) == {"host-c", "host-d"}


def test_checkpoint_host_is_only_a_tie_breaker() -> None:
    retry = gang("retry", 1, checkpoint_host="host-c")
    assert shares_of(plan_pass([retry], [host("host-a", 4, 1), host("host-c", 4)]))["retry"] == {"host-a": 1}
    on_fewer = [host("host-a", 4), host("host-b", 2), host("host-c", 2)]
    assert shares_of(plan_pass([retry._replace(num_slots=4)], on_fewer))["retry"] == {"host-a": 4}
    for taken in ({"drained": True}, {"live": False}):
        assert shares_of(plan_pass([retry], [host("host-b", 4), host("host-c", 4, **taken)]))["retry"] == {"host-b": 1}
    first = job("first", 4, priority=1, head_hosts=("host-c",))
    kept = plan_pass([first, retry], [host("host-b", 4, 3), host("host-c", 4, 3)])
    assert kept.head_hosts["first"] == ("host-c",)
    assert shares_of(kept)["retry"] == {"host-b": 1}


@settings(max_examples=30)
@given(some_gangs(), some_labelled_hosts())
def test_checkpoint_host_does_not_delay_a_start(queue: list[QueuedJob], hosts: list[HostState]) -> None:
    for asked in queue[:1]:
        with_one, without = (
            shares_of(plan_pass([each], hosts)) for each in (asked, asked._replace(checkpoint_host=""))
        )
        assert {id: len(shares) for id, shares in with_one.items()} == {id: len(s) for id, s in without.items()}
