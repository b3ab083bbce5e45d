"""Run jobs on Slurm as an `Engine`: compare the database with Slurm once per pass.

Slurm's queue is the queue. A job stays QUEUED while it is pending in Slurm, with Slurm's reason. An attempt is
submitted only after a look did not find its name. Of two jobs with one name, Slurm runs one at a time. The board
accepts only the token of the last submission and the first supervisor that joins.
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

from jobs.models import MAX_WAIT_REASON_CHARACTERS, Attempt, Job, Status
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

POLL_INTERVAL_S = 3.0  # without news, because slurmctld serves all users
POLL_WAIT_S = 0.25  # that a pass waits for a round with news, enough for most rounds
MAX_PLACED_PER_PASS = 100
MAX_MISSED_POLLS = 3  # in a row, until an accepted job is lost
HELD_BY_BOARD = {"held": "by the board"}  # in `engine_told`, because the board releases only what it holds
WAITING_FIELDS = ("id", "status", "held", "wait_reason", "project", "num_slots")
CANCEL_DELAY = timedelta(minutes=1)  # after the end of an attempt, for its Slurm job to end by itself


class SlurmEngine:
    """An `Engine`. Its state is only a cache, so a new controller polls again."""

    name = "slurm"

    def __init__(self, site: Site) -> None:
        self._site, self._slurm = site, Slurm(CommandRunner(site.login, site.ssh_config))
        self._thread, self._polled = PollingThread(), -POLL_INTERVAL_S
        self._trouble = ""
        self._submitting: frozenset[str] = frozenset()  # names that the current round may submit
        self._cancelling: frozenset[str] = frozenset()  # names that the current round cancels
        self._absent: set[str] = set()  # names without a Slurm job, which were not submitted since
        self._missed: dict[str, int] = {}  # number of rounds in a row without the job
        self._deferred: dict[str, float] = {}  # time when Slurm deferred the submission

    def place(self) -> None:
        """Create attempts of all queued jobs that may start, while no earlier attempt may run."""
        current = Attempt.objects.filter(job=OuterRef("pk"), number=OuterRef("attempt"))
        running = Attempt.objects.filter(job=OuterRef("pk"), engine_ended__isnull=True)
        queued = Job.objects.filter(status=Status.QUEUED, engine=self.name).exclude(Exists(current) | Exists(running))
        waiting = list(queued.order_by("-priority", "created").only(*WAITING_FIELDS))
        if not waiting:
            return
        for job in _filter_by_quota(_filter_startable(waiting))[:MAX_PLACED_PER_PASS]:
            with transaction.atomic():
                for locked in lifecycle.lock_queued([job.id], "spec", "trace_id"):
                    slurm_attempts.create_attempt(locked)

    def observe(self) -> None:
        """Apply the last round, and start the next one if it is due."""
        self._apply(self._thread.collect())
        if not self._thread.busy and (followed := list(self._list_followed())) and self._is_poll_due(followed):
            self._start_round(followed)

    def cancel(self) -> None:
        """Mark attempts as lost that Slurm never received. Rounds cancel the other ones in Slurm."""
        submitting = self._submitting if self._thread.busy else frozenset()
        for attempt in self._list_followed().filter(engine_id="", job__status=Status.CANCELLING):
            if _get_name(attempt) in self._absent - submitting:
                slurm_attempts.lose(attempt, "cancelled before Slurm received the job")

    def start(self) -> None:
        """Submit attempts that the last round did not find."""
        self._apply(self._thread.collect(POLL_WAIT_S))
        if self._thread.busy or not self._absent:
            return
        followed = list(self._list_followed())
        new = [attempt for attempt in followed if self._may_submit(attempt)]
        startable = {job.id for job in _filter_startable([attempt.job for attempt in new])} if new else set()
        new = [attempt for attempt in new if attempt.job_id in startable]
        new.sort(key=lambda attempt: self._deferred.get(_get_name(attempt), 0.0))  # so deferred ones block no others
        if not new:
            return
        try:
            certificates = self._site.read_certificates()
        except OSError as error:
            self._record_trouble(f"Cannot read MESHBOARD_SLURM_CA_FILE: {error}")
            return
        new = new[:MAX_SUBMISSIONS_PER_POLL]
        submissions = (slurm_attempts.prepare_submission(attempt, self._site, certificates) for attempt in new)
        self._start_round(followed, tuple(submissions))
        self._apply(self._thread.collect(POLL_WAIT_S))

    def close(self) -> None:
        """Leave a running round to its timeouts. The next controller finds its submissions by name."""

    def _list_followed(self) -> QuerySet[Attempt]:
        """Return the attempts that Slurm may still have."""
        found = Attempt.objects.filter(job__engine=self.name, engine_ended__isnull=True).order_by("id")
        return found.select_related("job").defer("exit", "job__estimate", "job__hardware", "job__chosen")

    def _is_poll_due(self, followed: list[Attempt]) -> bool:
        if time.monotonic() - self._polled >= POLL_INTERVAL_S:
            return True
        return not self._trouble and any(self._is_new(attempt) for attempt in followed)

    def _is_new(self, attempt: Attempt) -> bool:
        """Return whether Slurm was not yet asked about an attempt, or not yet asked to cancel it."""
        if attempt.job.status == Status.CANCELLING:
            return _get_name(attempt) not in self._cancelling
        return not attempt.engine_id and _get_name(attempt) not in self._absent | self._deferred.keys()

    def _may_submit(self, attempt: Attempt) -> bool:
        name = _get_name(attempt)
        if attempt.job.status != Status.QUEUED or name not in self._absent or attempt.engine_id:
            return False
        return time.monotonic() - self._deferred.get(name, -POLL_INTERVAL_S) >= POLL_INTERVAL_S

    def _start_round(self, followed: list[Attempt], submissions: tuple[Submission, ...] = ()) -> None:
        joined, blocked = slurm_attempts.list_joined_attempts(followed), _explain_blocked(followed)
        waiting = [attempt for attempt in followed if attempt.engine_id and attempt.job.status == Status.QUEUED]
        hold = [attempt for attempt in waiting if attempt.job_id in blocked]
        for attempt in hold:  # stored first, so another controller knows what to release
            slurm_attempts.record_slurm_state(attempt, {**attempt.engine_told, **HELD_BY_BOARD})
        request = PollRequest(
            followed={_get_name(attempt): attempt.engine_id for attempt in followed},
            submissions=submissions,
            cancel=frozenset(_get_name(attempt) for attempt in followed if _is_cancel_due(attempt)),
            hold=frozenset(map(_get_name, hold)),
            release=frozenset(_get_name(a) for a in waiting if a.job_id not in blocked and _is_held_by_board(a)),
            logs={
                name: get_log_path(name, self._site.folder)
                for name in (_get_name(attempt) for attempt in followed if attempt.pk not in joined)
            },
            folder=self._site.folder,
        )
        self._polled = time.monotonic()
        self._submitting = frozenset(submission.name for submission in submissions)
        self._cancelling = request.cancel
        self._thread.start(partial(poll, self._slurm, request))

    def _apply(self, result: PollResult | None) -> None:
        """Apply the result of a round. An attempt that fails does not delay the others."""
        if result is None:
            return
        followed = {_get_name(attempt): attempt for attempt in self._list_followed()}
        self._record_trouble(result.trouble, {followed[name].job_id for name in result.jobs if name in followed})
        self._absent = set() if result.trouble else set(result.absent - self._submitting)
        blocked, errors = _explain_blocked(followed.values()), list[Exception]()
        for attempt in followed.values():
            try:
                self._apply_to_attempt(attempt, result, blocked.get(attempt.job_id, ""))
            except Exception as error:
                errors.append(error)
        self._missed = {name: times for name, times in self._missed.items() if name in followed}
        self._deferred = {name: at for name, at in self._deferred.items() if name in followed}
        if errors:
            raise errors[0]

    def _apply_to_attempt(self, attempt: Attempt, result: PollResult, block_reason: str) -> None:
        name = _get_name(attempt)
        if job_id := result.submitted.get(name):
            slurm_attempts.record_submission(attempt, job_id)
        elif name in result.rejected:
            slurm_attempts.reject(attempt, result.rejected[name])
        elif name in result.deferred:
            self._deferred[name] = time.monotonic()
            slurm_attempts.discard_latest_token(attempt)
            reason = f"Slurm does not accept the job at the moment: {result.deferred[name]}"
            _set_wait_reason(attempt.job, reason, Status.QUEUED)
        elif name in result.jobs:
            self._missed.pop(name, None)
            _update_attempt(attempt, result.jobs[name], result.logs.get(name, ""), block_reason)
        elif attempt.engine_id and name in result.absent:
            self._missed[name] = self._missed.get(name, 0) + 1
            if self._missed[name] >= MAX_MISSED_POLLS:
                reason = describe_missing_record(attempt.engine_id, accounts=result.accounts)
                slurm_attempts.lose(attempt, reason)

    def _record_trouble(self, trouble: str, updated_jobs: Collection[str] = ()) -> None:
        """Log a problem with Slurm, and show it as the wait reason of the jobs without an update."""
        if trouble and not self._trouble:
            log.warning("Cannot query Slurm: %s", trouble)
        elif self._trouble and not trouble:
            log.info("Slurm answers again")
        self._trouble = trouble
        if trouble:
            waiting = Job.objects.filter(engine=self.name, status__in=(Status.QUEUED, Status.CANCELLING))
            for job in waiting.exclude(id__in=updated_jobs):
                _set_wait_reason(job, f"Cannot query Slurm: {trouble}", job.status)


def _update_attempt(attempt: Attempt, job: SlurmJob, printed: str, block_reason: str) -> None:
    slurm_attempts.record_job_id(attempt, job.id)
    is_held = _is_held_by_board(attempt) and (block_reason or job.reason == HELD_BY_USER)
    fields = {**get_page_fields(job), **(HELD_BY_BOARD if is_held else {})}
    slurm_attempts.record_slurm_state(attempt, fields)
    if job.state in WAITING:
        _set_wait_reason(attempt.job, block_reason or describe_wait(job), Status.QUEUED)
    elif has_ended(job):
        slurm_attempts.finish(attempt, job, printed)
    else:
        lifecycle.start_jobs({attempt.job_id: (attempt.number, describe_location(job))})


def _is_held_by_board(attempt: Attempt) -> bool:
    return bool(HELD_BY_BOARD.items() <= attempt.engine_told.items())


def _explain_blocked(attempts: Iterable[Attempt]) -> dict[str, str]:
    """Return why the queued jobs among these may not start, by job."""
    waiting = [attempt.job for attempt in attempts if attempt.job.status == Status.QUEUED]
    return explain_blocked_jobs(waiting) if waiting else {}


def _filter_startable(jobs: list[Job]) -> list[Job]:
    """Return the jobs that may start, and store why the others wait."""
    blocked = explain_blocked_jobs(jobs)
    for job in jobs:
        if job.id in blocked:
            _set_wait_reason(job, blocked[job.id], Status.QUEUED)
    return [job for job in jobs if job.id not in blocked]


def _filter_by_quota(jobs: list[Job]) -> list[Job]:
    """Return the jobs that quotas allow, and store why the others wait."""
    budget, allowed = QuotaBudget(load_quotas()), []
    for job in jobs:
        if refusal := budget.explain_refusal(job.project, job.num_slots):
            _set_wait_reason(job, refusal, Status.QUEUED)
            continue
        budget.take(job.project, job.num_slots)
        allowed.append(job)
    return allowed


def _set_wait_reason(job: Job, reason: str, status: str) -> None:
    reason = reason[:MAX_WAIT_REASON_CHARACTERS]
    rows = Job.objects.filter(id=job.id, status=status)
    if job.wait_reason != reason and rows.update(wait_reason=reason):
        lifecycle.announce(job.id)


def _get_name(attempt: Attempt) -> str:
    return format_job_name(attempt.job_id, attempt.number)


def _is_cancel_due(attempt: Attempt) -> bool:
    """Return whether to cancel the Slurm job: after a cancel, or if it remains after the end of its attempt."""
    if attempt.ended is not None:
        return timezone.now() - attempt.ended > CANCEL_DELAY
    return attempt.job.status == Status.CANCELLING
