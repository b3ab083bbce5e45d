"""One round of talk at a time, in a thread: Slurm and the way to it may hang, the controller may not.

One round of talk with Slurm: what runs, then what is to start and to end. No database: it may take its time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jobs.queue.engines.slurm.commands import AwayError, NotNowError, RefusedError, Slurm
from jobs.queue.engines.slurm.script import Submission, logs
from jobs.queue.engines.slurm.states import HELD, HELD_BY_USER, SlurmJob, ended


class Rounds:
    """At most one is under way. A thread that is left behind holds nothing of ours and ends by its deadlines."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._news: News | None = None
        self._error: Exception | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], News]) -> None:
        """Start a round; there is none under way."""
        assert not self.busy

        def run() -> None:
            try:
                self._news = work()
            except Exception as error:  # for the controller's own log, which tells of it once a minute
                self._error = error

        self._thread = threading.Thread(target=run, name="slurm", daemon=True)
        self._thread.start()

    def news(self, patience_s: float = 0.0) -> News | None:
        """What a round brought, once; None while it goes on. Raises what ended it."""
        if self._thread is not None:
            self._thread.join(patience_s)
        if self.busy:
            return None
        news, error, self._news, self._error = self._news, self._error, None, None
        if error is not None:
            raise error
        return news


MOST_SUBMITTED = 20  # in one round: each is a call of its own, and all else waits for it


class Wants(NamedTuple):
    """What the database asks for, by the names of attempts in Slurm. `known`: those to follow, with the id that was
    noted or "". `start`: those to submit. `end`: those to cancel. `hold` and `free`: those that are not to begin, and
    those that were held and may. `logs`: the files to read the end of, of those that may fail before a supervisor
    speaks."""

    known: Mapping[str, str]
    start: tuple[Submission, ...] = ()
    end: frozenset[str] = frozenset()
    hold: frozenset[str] = frozenset()
    free: frozenset[str] = frozenset()
    logs: Mapping[str, str] = {}
    folder: str = ""


@dataclass
class News:
    """What a round brought. `trouble` says why it is not whole: what is not told then is not known."""

    jobs: dict[str, SlurmJob] = field(default_factory=dict)  # by name, the one that counts
    absent: frozenset[str] = frozenset()  # names that Slurm has no job of, when it was looked at
    accounts: bool = True  # whether Slurm keeps any; where it does not, what slurmctld forgot nobody knows
    logs: dict[str, str] = field(default_factory=dict)
    submitted: dict[str, str] = field(default_factory=dict)  # name -> id
    refused: dict[str, str] = field(default_factory=dict)  # name -> why
    put_off: dict[str, str] = field(default_factory=dict)  # name -> why not now
    trouble: str = ""


def talk(slurm: Slurm, wants: Wants) -> News:
    """A whole round, or as far as Slurm answers."""
    news = News()
    try:
        _look(slurm, wants, news)
        _start(slurm, wants, news)
    except AwayError as error:
        news.trouble = str(error)
    return news


def _look(slurm: Slurm, wants: Wants, news: News) -> None:
    """Which job of Slurm's is which attempt. Of two by one name, the one that was noted counts and the other ends."""
    told: dict[str, list[SlurmJob]] = {}
    for job in slurm.jobs():
        if job.name in wants.known:
            told.setdefault(job.name, []).append(job)
    unseen = [name for name in wants.known if name not in told]
    for job in _remembered(slurm, wants, unseen, news):
        told.setdefault(job.name, []).append(job)
    strangers: list[SlurmJob] = []
    for name, found in told.items():
        chosen = _chosen(found, wants.known[name])
        strangers += [job for job in found if job is not chosen]
        if chosen is not None:
            news.jobs[name] = chosen
    news.absent = frozenset(wants.known).difference(news.jobs, unseen if news.trouble else ())
    ending = {job.id for name, job in news.jobs.items() if name in wants.end}
    alive = {job.id for job in (*strangers, *news.jobs.values()) if not ended(job)}
    if unwanted := alive & (ending | {job.id for job in strangers}):
        slurm.cancel(unwanted)
    _hold(slurm, wants, [job for job in news.jobs.values() if job.state == "PENDING"])
    for name, job in news.jobs.items():
        if name in wants.logs and job.state == "FAILED":
            news.logs[name] = slurm.tail(wants.logs[name])


def _hold(slurm: Slurm, wants: Wants, pending: list[SlurmJob]) -> None:
    if barred := {job.id for job in pending if job.name in wants.hold and not job.reason.startswith(HELD)}:
        slurm.hold(barred)
    if free := {job.id for job in pending if job.name in wants.free and job.reason == HELD_BY_USER}:
        slurm.release(free)


def _remembered(slurm: Slurm, wants: Wants, unseen: list[str], news: News) -> list[SlurmJob]:
    """Of jobs that slurmctld does not know, those whose end the accounts have.

    One that runs by the accounts alone was forgotten before its end was written down: what was noted is gone then,
    while another controller may just have submitted what was not.
    """
    try:
        found = slurm.remembered(unseen) if unseen else []
    except AwayError as error:  # slurmctld does without them: what it told counts
        news.trouble = str(error)
        return []
    news.accounts = found is not None
    return [job for job in found or [] if ended(job) or not wants.known[job.name]]


def _chosen(found: list[SlurmJob], noted: str) -> SlurmJob | None:
    """The noted one; where none was noted the first, which runs before any other of its name."""
    if noted:
        return next((job for job in found if job.id == noted), None)
    return min(found, key=lambda job: int(job.id))


def _start(slurm: Slurm, wants: Wants, news: News) -> None:
    """Submit what Slurm does not have by its name: who was cut off after sbatch and before noting finds it so."""
    new = [asked for asked in wants.start if asked.name in news.absent][:MOST_SUBMITTED]
    if new:
        slurm.make(logs(wants.folder))
    for asked in new:
        try:
            news.submitted[asked.name] = slurm.submit(asked.options, asked.script)
        except RefusedError as error:
            news.refused[asked.name] = str(error)
        except NotNowError as error:
            news.put_off[asked.name] = str(error)
