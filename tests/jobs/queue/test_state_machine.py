"""Queue and lifecycle with two controllers and random events, on both databases.

The default suite plays a few short games; `make slow` plays many long ones.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import pytest
import redis
from django.contrib.auth.models import User
from django.db.models import Count, Sum
from django.utils import timezone
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from contracts.names import host_queue
from jobs.models import (
    LIVE,
    TERMINAL,
    Attempt,
    Dependency,
    Host,
    Job,
    Member,
    Membership,
    Outbox,
    Project,
    Role,
    SlotAllocation,
    StateChange,
    Status,
)
from jobs.queue import actions, staff_actions
from jobs.queue.inbound.reconcile import reconcile
from jobs.queue.inbound.streams import read_events
from jobs.queue.lifecycle import TRANSITIONS
from jobs.queue.scheduling.scheduler import schedule
from jobs.queue.termination import apply_rules
from tests.jobs.conftest import attempt_event, host_event, report, run_together, send_event

SLOTS, QUOTA = 4, 3
HOSTS = ("host-a", "host-b", "host-c")
AGAIN = {Status.FAILED: Status.QUEUED, Status.LOST: Status.QUEUED, Status.CANCELLED: Status.QUEUED}
ANY = st.integers(0, 999)
T = TypeVar("T")


def chosen(some: Sequence[T], one: int) -> Sequence[T]:
    """Return one item as a list, or an empty list.

    The items can depend on a race, but the values that hypothesis draws must not.
    """
    return [some[one % len(some)]] if some else []


class QueueMachine(RuleBasedStateMachine):
    """Hosts that keep each launched attempt until they report its exit, like a host worker."""

    client: ClassVar[redis.Redis]

    def __init__(self) -> None:
        super().__init__()
        for model in (Outbox, Job, Host, Project):
            model.objects.all().delete()  # type: ignore[attr-defined]
        self.owner, _ = User.objects.get_or_create(username="player")
        small = Project.objects.create(name="small", slots=QUOTA)
        Membership.objects.create(project=small, user=self.owner, role=Role.SUBMITTER)
        self.sequence = itertools.count(1)
        self.alive: dict[tuple[str, str, int], list[int]] = {}  # by host, job, attempt: the slots of its ranks
        for name in HOSTS:
            self.speaks(name)

    @initialize()
    def begins_busy(self) -> None:
        """Cases that random steps rarely reach: a queue over its quota, gangs over hosts, and an end."""
        told: dict[str, Any] = {"priority": 0, "preemptible": False, "max_hosts": 0, "tries": 1, "comes_after": False}
        for project, slots in (("small", 2), ("small", 2), ("default", 6), ("default", 2)):
            self.submit(project=project, slots=slots, **told)
        self.controllers_tick(controllers=2)
        others = set(Job.objects.filter(project="default").values_list("id", flat=True))
        self.ends(*min(key for key in self.alive if key[1] in others), "succeeded")

    def queued(self) -> list[str]:
        return list(Job.objects.filter(status=Status.QUEUED).order_by("created").values_list("id", flat=True))

    def live(self) -> list[str]:
        return list(Job.objects.filter(status__in=LIVE).order_by("created").values_list("id", flat=True))

    def speaks(self, name: str) -> None:
        attempts = [
            report(job, number, "running", slots=slots)
            for (host, job, number), slots in self.alive.items()
            if host == name
        ]
        told = {"sequence": next(self.sequence), "attempts": attempts}
        send_event(self.client, host_event(name, slots=SLOTS, **told))
        read_events(self.client)

    @rule(
        slots=st.integers(1, 6),
        priority=st.integers(0, 2),
        project=st.sampled_from(["default", "default", "small"]),
        preemptible=st.booleans(),
        max_hosts=st.sampled_from([0, 1]),
        tries=st.integers(1, 2),
        comes_after=st.booleans(),
    )
    def submit(self, comes_after: bool, tries: int, **told: Any) -> None:
        slots = told.pop("slots")
        job = Job.objects.create(
            owner=self.owner, name="job", kind="train", device="cpu", num_slots=slots, estimate={},
            spec={"name": "x", "retry": {"max_attempts": tries}}, **told,
        )  # fmt: skip
        StateChange.objects.create(job=job, attempt=1, status=Status.QUEUED)
        if comes_after and (others := self.live()):
            Dependency.objects.create(job=job, needs=others[0])
            if others[0] == job.id:
                Dependency.objects.filter(job=job).delete()

    @rule(controllers=st.integers(1, 2))
    def controllers_tick(self, controllers: int) -> None:
        def tick() -> None:
            apply_rules()
            schedule()
            reconcile(self.client, timezone.now() - timedelta(hours=1))

        run_together([tick] * controllers)
        for row in Outbox.objects.filter(task__contains="launch"):
            order = row.arguments[0]
            (host,) = [name for name in HOSTS if host_queue(name) == row.queue]
            if Attempt.objects.filter(job_id=order["job"], number=order["attempt"], ended__isnull=True).exists():
                self.alive[host, order["job"], order["attempt"]] = order["slots"]
        Outbox.objects.all().delete()

    @rule(one=ANY, outcome=st.sampled_from(["succeeded", "failed", "cancelled"]), heard_twice=st.booleans())
    def ranks_end(self, one: int, outcome: str, heard_twice: bool) -> None:
        for attempt in chosen(sorted(self.alive), one):
            self.ends(*attempt, outcome, times=1 + heard_twice)

    def ends(self, host: str, job: str, number: int, outcome: str, times: int = 1) -> None:
        slots = self.alive.pop((host, job, number))
        event = attempt_event(job, number, "exited", outcome, host)
        event["report"]["slots"] = slots
        for _ in range(times):
            send_event(self.client, event)
        run_together([lambda: read_events(self.client)] * 2)
        Outbox.objects.exclude(task__contains="launch").delete()

    @rule(name=st.sampled_from(HOSTS))
    def host_speaks(self, name: str) -> None:
        self.speaks(name)

    @rule(one=ANY)
    def supervisor_speaks(self, one: int) -> None:
        """Send an event of an attempt, even if its host is silent or the attempt is lost."""
        for host, job, number in chosen(sorted(self.alive), one):
            send_event(self.client, attempt_event(job, number, "running", host=host))
            read_events(self.client)

    @rule(name=st.sampled_from(HOSTS), given_up=st.booleans(), supervisors_too=st.booleans())
    def host_is_silent(self, name: str, given_up: bool, supervisors_too: bool) -> None:
        ago = timezone.now() - timedelta(seconds=90)
        Host.objects.filter(name=name).update(last_seen=ago)
        if supervisors_too:
            Member.objects.filter(host__name=name).update(heard=ago)
        if not given_up:
            return
        speaks = Member.objects.filter(host__name=name, ended=None, heard__gt=ago).exists()
        with pytest.raises(actions.HostConnectedError) if speaks else contextlib.nullcontext():
            actions.mark_host_lost(Host.objects.get(name=name), "player")

    @rule(one=ANY)
    def cancel(self, one: int) -> None:
        for job in chosen(self.live(), one):
            actions.cancel(Job.objects.get(id=job), "player")

    @rule(one=ANY, what=st.sampled_from(["hold", "release", "up", "top", "priority"]))
    def staff_acts(self, one: int, what: str) -> None:
        for job in chosen(self.queued(), one):
            self.act(job, what)

    def act(self, job: str, what: str) -> None:
        if what == "hold":
            staff_actions.hold([job], "player")
        elif what == "release":
            staff_actions.release([job], "player")
        elif what == "priority":
            staff_actions.set_priority([job], 1, "player")
        else:
            staff_actions.move(job, "up" if what == "up" else "top", "player")

    @rule(one=ANY)
    def queue_again(self, one: int) -> None:
        for job in chosen(list(Job.objects.filter(status__in=TERMINAL).order_by("created")), one):
            actions.requeue(job, "player")

    @invariant()
    def histories_are_legal(self) -> None:
        for job in Job.objects.all():
            told = list(StateChange.objects.filter(job=job).values_list("attempt", "status"))
            for (number, before), (next_number, after) in itertools.pairwise(told):
                if number == next_number:
                    assert Status(after) in TRANSITIONS[Status(before)], told
                else:
                    assert (next_number, AGAIN.get(Status(before))) == (number + 1, Status(after)), told
            assert told[-1] == (job.attempt, job.status)

    @invariant()
    def slots_are_held_by_those_that_have_not_ended(self) -> None:
        for member in Member.objects.annotate(held=Count("allocations")):
            assert (member.held > 0) == (member.ended is None)
        unended = Attempt.objects.filter(ended__isnull=True)
        assert not unended.values("job").annotate(tries=Count("id")).filter(tries__gt=1), "two live attempts of a job"
        for attempt in unended.select_related("job"):
            assert attempt.number == attempt.job.attempt
            assert attempt.job.status not in (Status.QUEUED, *TERMINAL)
        on_hosts = SlotAllocation.objects.values("host").annotate(count=Count("slot"))
        assert all(row["count"] <= SLOTS for row in on_hosts)

    @invariant()
    def the_quota_is_kept(self) -> None:
        held = Attempt.objects.filter(ended__isnull=True, job__project="small").aggregate(n=Sum("job__num_slots"))["n"]
        assert (held or 0) <= QUOTA

    @invariant()
    def a_gang_is_whole(self) -> None:
        for attempt in Attempt.objects.annotate(ranks=Sum("members__num_ranks")).select_related("job"):
            assert attempt.ranks == attempt.job.num_slots


@pytest.fixture
def game(each_database: str, live_redis: redis.Redis) -> type[QueueMachine]:
    QueueMachine.client = live_redis
    return QueueMachine


def play(game: type[QueueMachine], examples: int, steps: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        game,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=checks,
            database=None,
            phases=[Phase.generate],  # a race that was lost is not found again by playing the same once more
        ),
    )


def test_random_sequences_keep_the_invariants(game: type[QueueMachine]) -> None:
    play(game, examples=2, steps=12)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_sequences_keep_the_invariants(game: type[QueueMachine]) -> None:
    play(game, examples=30, steps=40)
