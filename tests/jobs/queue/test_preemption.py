"""Preemption of running jobs in `place`."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from jobs.queue.scheduling.placement import SchedulingPlan, plan_pass
from jobs.queue.scheduling.states import HostState, Occupant, Preemption, QueuedJob
from tests.jobs.queue.scheduling_cases import EPOCH, gang, host, job, some_gangs, some_labelled_hosts


def occupied(name: str, slots: int, *occupants: Occupant, free: int = 0) -> HostState:
    return host(name, slots, free)._replace(occupants=occupants)


def occupant(job: str, slots: int, priority: int = 0, age: int = 0, leaving: bool = False) -> Occupant:
    return Occupant(job, priority, EPOCH - timedelta(seconds=age), slots, leaving)


def test_preempts_the_fewest_jobs_of_the_lowest_priority() -> None:
    urgent = job("urgent", 4, priority=5)
    hosts = [
        occupied("host-a", 4, occupant("old", 2, age=9), occupant("young", 2, age=1)),
        occupied("host-b", 4, occupant("whole", 2, priority=5), occupant("other", 2)),
    ]
    assert plan_pass([urgent], hosts).preemptions == [Preemption("young", "urgent"), Preemption("old", "urgent")]
    hosts[0] = occupied("host-a", 6, occupant("old", 2, age=9), occupant("young", 2, age=1), free=2)
    assert plan_pass([urgent], hosts).preemptions == [Preemption("young", "urgent")]


def test_preempts_only_if_it_helps() -> None:
    hosts = [occupied("host-a", 4, occupant("a", 2), occupant("b", 1, priority=3))]
    assert plan_pass([job("equal", 2, priority=0)], hosts).preemptions == []
    assert plan_pass([job("vain", 4, priority=9)], hosts).preemptions == [], "one slot is held by who does not give way"
    leaving = [occupied("host-a", 4, occupant("a", 2, leaving=True), occupant("b", 2))]
    assert plan_pass([job("soon", 2, priority=9)], leaving).preemptions == [], "two slots are being left already"


def test_preempted_gang_frees_all_its_hosts() -> None:
    hosts = [occupied("host-a", 4, occupant("g", 4)), occupied("host-b", 4, occupant("g", 4))]
    plan = plan_pass([gang("urgent", 8, 4, priority=1)], hosts)
    assert plan.preemptions == [Preemption("g", "urgent")]
    assert plan.reasons["urgent"].endswith(" Preemptible jobs with lower priority are ending to free slots.")


@given(some_gangs(), some_labelled_hosts(), st.data())
def test_preemption_of_lower_priority_starts_the_head(
    queue: list[QueuedJob], hosts: list[HostState], data: st.DataObject
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
    plan = plan_pass(queue, hosts)
    asked = {job.id: job for job in queue}
    for victim, for_job in plan.preemptions:
        assert known[victim].priority < asked[for_job].priority
    assert len({each.victim for each in plan.preemptions}) == len(plan.preemptions)
    gone = {each.victim for each in plan.preemptions}
    after = []
    for each in hosts:
        taken = {s for p in plan.placements for share in p.shares if share.host == each.name for s in share.slots}
        more = sum(who.slots for who in each.occupants if who.job in gone)
        held = [s for s in range(each.slots) if s not in each.free]
        after.append(each._replace(free=tuple(sorted({*each.free, *held[:more]} - taken)), occupants=()))
    for job_id in {each.for_job for each in plan.preemptions}:
        alone = asked[job_id]._replace(wanted_host=asked[job_id].wanted_host)
        assert plan_pass([alone], [h for h in after if h.name in _kept_hosts(plan, asked[job_id])]).placements


def _kept_hosts(plan: SchedulingPlan, job: QueuedJob) -> tuple[str, ...]:
    return plan.head_hosts.get(job.id, (job.wanted_host,))
