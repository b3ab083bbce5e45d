"""Slurm as an `Engine`: what the database wants and what Slurm says, held against each other once a pass.

Slurm's queue is the queue: a job stays QUEUED here while it is pending there, with Slurm's own reason. An attempt is
submitted under its own name and only after a look that did not find it; of two by one name Slurm runs one at a time,
and the board listens to one alone: by the token of the last submission, and the claim of whoever joined first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from datetime import timedelta
from functools import partial

from django.db import transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.utils import timezone

from jobs.models import Attempt, Job, Status
from jobs.queue import lifecycle
from jobs.queue.scheduling.snapshot import explain_blocked_jobs, load_quotas
from jobs.queue.scheduling.states import QuotaBudget
from jobs.queue.slurm import attempts as slurm_attempts
from jobs.queue.slurm.commands import (
    MAX_SUBMISSIONS_PER_POLL,
    CommandRunner,
    PollingThread,
    PollRequest,
    PollResult,
    Slurm,
    poll,
)
from jobs.queue.slurm.script import Site, Submission, get_log_path
from jobs.queue.slurm.states import (
    HELD_BY_USER,
    WAITING,
    SlurmJob,
    describe_location,
    describe_missing_record,
    describe_wait,
    format_job_name,
    get_page_fields,
    has_ended,
)

log = logging.getLogger(__name__)

LOOK_EVERY_S = 3.0  # at the soonest, where nothing is new: slurmctld answers everybody
PATIENCE_S = 0.25  # that a pass waits for a round with something new in it: most are done by then
MOST_PLACED = 100  # in one pass
FORGOTTEN_IN_A_ROW = 3  # looks that do not find what Slurm once took, and it is gone
HELD_HERE = {"held": "by the board"}  # beside what Slurm told of an attempt: the board releases what it holds alone
ASKED_OF_A_JOB = ("id", "status", "held", "wait_reason", "project", "num_slots")  # before it is an attempt
LINGERS = timedelta(minutes=1)  # for Slurm's job to end after the attempt has, by its own word


class SlurmEngine:
    """An `Engine`. What it keeps in memory it can do without: the next one looks again."""

    name = "slurm"

    def __init__(self, site: Site) -> None:
        self._site, self._slurm = site, Slurm(CommandRunner(site.login, site.ssh_config))
        self._rounds, self._looked = PollingThread(), -LOOK_EVERY_S
        self._trouble = ""
        self._sending: frozenset[str] = frozenset()  # names that the round under way may submit
        self._ending: frozenset[str] = frozenset()  # names that it is told to end
        self._absent: set[str] = set()  # names that the last look did not find, and that were not sent since
        self._missed: dict[str, int] = {}  # looks in a row
        self._put_off: dict[str, float] = {}  # names that Slurm did not take, and when

    def place(self) -> None:
        """Every queued job that nothing bars and its project's quota allows becomes an attempt at once: when it runs,
        Slurm says. Not while an earlier attempt may run."""
        begun = Attempt.objects.filter(job=OuterRef("pk"), number=OuterRef("attempt"))
        left = Attempt.objects.filter(job=OuterRef("pk"), engine_ended__isnull=True)
        queued = Job.objects.filter(status=Status.QUEUED, engine=self.name).exclude(Exists(begun) | Exists(left))
        waiting = list(queued.order_by("-priority", "created").only(*ASKED_OF_A_JOB))
        if not waiting:
            return
        for job in _allowed(_free(waiting))[:MOST_PLACED]:
            with transaction.atomic():
                for locked in lifecycle.lock_queued([job.id], "spec"):
                    slurm_attempts.create_attempt(locked)

    def observe(self) -> None:
        """Take the last round's news in, and look again where it is time."""
        self._take_in(self._rounds.collect())
        if not self._rounds.busy and (followed := list(self._followed())) and self._due(followed):
            self._begin(followed)

    def cancel(self) -> None:
        """A round tells Slurm of what is to end (`_begin`); what Slurm never had has ended here."""
        on_its_way = self._sending if self._rounds.busy else frozenset()
        for attempt in self._followed().filter(engine_id="", job__status=Status.CANCELLING):
            if _name(attempt) in self._absent - on_its_way:
                slurm_attempts.lose(attempt, "cancelled before Slurm received the job")

    def start(self) -> None:
        """Submit what the last look did not find."""
        self._take_in(self._rounds.collect(PATIENCE_S))
        if self._rounds.busy or not self._absent:
            return
        followed = list(self._followed())
        new = [attempt for attempt in followed if self._to_submit(attempt)]
        free = {job.id for job in _free([attempt.job for attempt in new])} if new else set()
        new = [attempt for attempt in new if attempt.job_id in free]
        new.sort(key=lambda attempt: self._put_off.get(_name(attempt), 0.0))  # so that twenty of them stop nobody
        if not new:
            return
        try:
            certificates = self._site.certificates()
        except OSError as error:
            self._hear_of_trouble(f"Cannot read MESHBOARD_SLURM_CA_FILE: {error}")
            return
        self._begin(
            followed,
            tuple(
                slurm_attempts.prepare_submission(attempt, self._site, certificates)
                for attempt in new[:MAX_SUBMISSIONS_PER_POLL]
            ),
        )
        self._take_in(self._rounds.collect(PATIENCE_S))

    def close(self) -> None:
        """A round under way ends by its deadlines; what it did is found by name."""

    def _followed(self) -> QuerySet[Attempt]:
        """Attempts of which something may be left with Slurm."""
        found = Attempt.objects.filter(job__engine=self.name, engine_ended__isnull=True).order_by("id")
        return found.select_related("job").defer("exit", "job__estimate", "job__hardware", "job__chosen")

    def _due(self, followed: list[Attempt]) -> bool:
        """Whether to look: it is time, or somebody waits for it."""
        new = any(self._is_new(attempt) for attempt in followed)
        return (new and not self._trouble) or time.monotonic() - self._looked >= LOOK_EVERY_S

    def _is_new(self, attempt: Attempt) -> bool:
        """Slurm was not asked about it yet, or not told to end it."""
        if attempt.job.status == Status.CANCELLING:
            return _name(attempt) not in self._ending
        return not attempt.engine_id and _name(attempt) not in self._absent | self._put_off.keys()

    def _to_submit(self, attempt: Attempt) -> bool:
        if attempt.job.status != Status.QUEUED or _name(attempt) not in self._absent or attempt.engine_id:
            return False
        return time.monotonic() - self._put_off.get(_name(attempt), -LOOK_EVERY_S) >= LOOK_EVERY_S

    def _begin(self, followed: list[Attempt], start: tuple[Submission, ...] = ()) -> None:
        """A round, in its thread."""
        joined, barred = slurm_attempts.list_joined_attempts(followed), _barred(followed)
        waiting = [attempt for attempt in followed if attempt.engine_id and attempt.job.status == Status.QUEUED]
        hold = [attempt for attempt in waiting if attempt.job_id in barred]
        for attempt in hold:  # noted before it is done: whoever comes next knows what to release
            slurm_attempts.record_slurm_state(attempt, {**attempt.engine_told, **HELD_HERE})
        wants = PollRequest(
            followed={_name(attempt): attempt.engine_id for attempt in followed},
            submissions=start,
            cancel=frozenset(_name(attempt) for attempt in followed if _to_end(attempt)),
            hold=frozenset(map(_name, hold)),
            release=frozenset(_name(attempt) for attempt in waiting if attempt not in hold and _is_held_here(attempt)),
            logs={_name(a): get_log_path(_name(a), self._site.folder) for a in followed if a.pk not in joined},
            folder=self._site.folder,
        )
        self._looked = time.monotonic()
        self._sending, self._ending = frozenset(asked.name for asked in start), wants.cancel
        self._rounds.start(partial(poll, self._slurm, wants))

    def _take_in(self, news: PollResult | None) -> None:
        if news is None:
            return
        followed = {_name(attempt): attempt for attempt in self._followed()}
        self._hear_of_trouble(news.trouble, {followed[name].job_id for name in news.jobs if name in followed})
        self._absent = set() if news.trouble else set(news.absent - self._sending)
        barred, failed = _barred(followed.values()), list[Exception]()
        for attempt in followed.values():
            try:
                self._hear_of(attempt, news, barred.get(attempt.job_id, ""))
            except Exception as error:  # one that fails holds up no other
                failed.append(error)
        self._missed = {name: times for name, times in self._missed.items() if name in followed}
        self._put_off = {name: when for name, when in self._put_off.items() if name in followed}
        if failed:
            raise failed[0]

    def _hear_of(self, attempt: Attempt, news: PollResult, bar: str) -> None:
        name = _name(attempt)
        if job := news.submitted.get(name):
            slurm_attempts.record_submission(attempt, job)
        elif name in news.rejected:
            slurm_attempts.reject(attempt, news.rejected[name])
        elif name in news.deferred:
            self._put_off[name] = time.monotonic()
            slurm_attempts.discard_latest_token(attempt)
            _wait(attempt.job, f"Slurm does not accept the job at the moment: {news.deferred[name]}", Status.QUEUED)
        elif name in news.jobs:
            self._missed.pop(name, None)
            self._follow(attempt, news.jobs[name], news.logs.get(name, ""), bar)
        elif attempt.engine_id and name in news.absent:
            self._miss(attempt, accounts=news.accounts)

    def _follow(self, attempt: Attempt, job: SlurmJob, printed: str, bar: str) -> None:
        slurm_attempts.record_job_id(attempt, job.id)
        held = _is_held_here(attempt) and (bar or job.reason == HELD_BY_USER)
        slurm_attempts.record_slurm_state(attempt, {**get_page_fields(job), **(HELD_HERE if held else {})})
        if job.state in WAITING:
            _wait(attempt.job, bar or describe_wait(job), Status.QUEUED)
        elif has_ended(job):
            slurm_attempts.finish(attempt, job, printed)
        else:
            lifecycle.start_jobs({attempt.job_id: (attempt.number, describe_location(job))})

    def _miss(self, attempt: Attempt, *, accounts: bool) -> None:
        name = _name(attempt)
        self._missed[name] = self._missed.get(name, 0) + 1
        if self._missed[name] >= FORGOTTEN_IN_A_ROW:
            slurm_attempts.lose(attempt, describe_missing_record(attempt.engine_id, accounts=accounts))

    def _hear_of_trouble(self, trouble: str, heard_of: Collection[str] = ()) -> None:
        """Jobs wait for its end, but for those of which Slurm told all the same."""
        if trouble and not self._trouble:
            log.warning("Cannot query Slurm: %s", trouble)
        elif self._trouble and not trouble:
            log.info("Slurm answers again")
        self._trouble = trouble
        if trouble:
            waiting = Job.objects.filter(engine=self.name, status__in=(Status.QUEUED, Status.CANCELLING))
            for job in waiting.exclude(id__in=heard_of):
                _wait(job, f"Cannot query Slurm: {trouble}", job.status)


def _is_held_here(attempt: Attempt) -> bool:
    return bool(HELD_HERE.items() <= attempt.engine_told.items())


def _barred(attempts: Iterable[Attempt]) -> dict[str, str]:
    """Of those whose jobs wait, by job: why it is not to begin."""
    waiting = [attempt.job for attempt in attempts if attempt.job.status == Status.QUEUED]
    return explain_blocked_jobs(waiting) if waiting else {}


def _free(jobs: list[Job]) -> list[Job]:
    """Those that nothing bars; of the others, why they wait is written down."""
    barred = explain_blocked_jobs(jobs)
    for job in jobs:
        if job.id in barred:
            _wait(job, barred[job.id], Status.QUEUED)
    return [job for job in jobs if job.id not in barred]


def _allowed(jobs: list[Job]) -> list[Job]:
    """Those that quotas allow, in their order; of the others, why they wait is written down."""
    budget, allowed = QuotaBudget(load_quotas()), []
    for job in jobs:
        if refusal := budget.explain_refusal(job.project, job.num_slots):
            _wait(job, refusal, Status.QUEUED)
            continue
        budget.take(job.project, job.num_slots)
        allowed.append(job)
    return allowed


def _wait(job: Job, reason: str, status: str) -> None:
    """Why it waits, where that is news."""
    if job.wait_reason != reason[:500] and Job.objects.filter(id=job.id, status=status).update(
        wait_reason=reason[:500]
    ):
        lifecycle.announce(job.id)


def _name(attempt: Attempt) -> str:
    return format_job_name(attempt.job_id, attempt.number)


def _to_end(attempt: Attempt) -> bool:
    """Cancelled; or over by its own word, and something of it lingers."""
    if attempt.ended is not None:
        return timezone.now() - attempt.ended > LINGERS
    return attempt.job.status == Status.CANCELLING
