"""The board's REST API, typed where it matters to a caller."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack, cast
from urllib.parse import parse_qs, urlsplit

import httpx

from meshboard.answers import (
    Advice,
    AttemptKept,
    AuditRow,
    Baseline,
    BranchBrief,
    CheckpointTold,
    Comparison,
    JobBrief,
    JobChange,
    JobDetail,
    JobSpec,
    Plan,
    Results,
    SearchQuery,
    SearchResult,
    StoredSpec,
    Waited,
)
from meshboard.door import Door
from meshboard.errors import AwayError, RefusedError, TimedOutError, WrongError
from meshboard.events import Event, follow
from meshboard.job import Job
from meshboard.patience import Patience

Spec = JobSpec | StoredSpec | dict[str, Any]  # the last: read from a file, which the board checks
POLL_S = 1.0  # between two looks at a board that cannot be waited at
LONGEST_WAIT_S = 60.0  # of one question
GRACE_S = 5.0  # for an answer that comes as a wait is over
LARGEST_PAGE = 1000
LONGEST_KEY = 200
KEY = re.compile(f"[!-~]{{1,{LONGEST_KEY}}}")
LOOK_S = 5.0  # of one question, where somebody hears how it goes


class Client:
    """Speaks to one board with one token. A context manager. What a call raises unless it says otherwise: RefusedError,
    AwayError, and WrongError where a name or the address is none, before anything is sent."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 60.0, verify: bool | str = True) -> None:
        self._door = Door(url, token, timeout_s, verify)
        self.url = self._door.url
        self._can_wait = True  # until it turns out that this board knows no waiting

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._door.close()

    def submit(self, spec: Spec, *, key: str | None = None, allow_unfit: bool = False) -> Job:
        """Queue a job. The same `key` with the same spec gives the same job, however often it is sent.

        Raises:
            RefusedError: the spec cannot run; every problem with its field.
            WrongError: the key is empty, or none that a header carries.
        """
        return self._submitted(("jobs",), {**spec, "allow_unfit": True} if allow_unfit else spec, key)

    def job(self, job_id: str) -> Job:
        return self._job("GET", ("jobs", job_id))

    def jobs(self, **filters: Any) -> Iterator[JobBrief]:
        """Briefs of all jobs one may see, the newest first, page after page. `status`, `kind` and `tag` may be several:
        in any of the states, of any of the kinds, with all of the tags."""
        for page in self._pages(("jobs",), filters):
            briefs = page.get("jobs") if isinstance(page, dict) else page
            if not isinstance(briefs, list):
                raise AwayError(f"{self.url} did not return a list of jobs. Check the address of the board.")
            yield from briefs

    def audit(self, **asked: Any) -> Iterator[AuditRow]:
        """Who did what, the newest first, page after page; `after` and `before` an entry's id. Staff alone may ask."""
        for page in self._pages(("audit",), asked):
            yield from page

    def audit_csv(self, **asked: Any) -> Iterator[str]:
        """The same as CSV with one header, a piece for each page."""
        query: dict[str, Any] | None = {"limit": LARGEST_PAGE, **_told(asked), "format": "csv"}
        behind = False
        while query is not None:
            with self._door.stream(("audit",), "text/csv", params=query) as response:
                text = response.read().decode()
            yield text.partition("\r\n")[2] if behind else text
            query, behind = _following(response), True

    def cancel(self, job_id: str) -> Job:
        return self._job("POST", ("jobs", job_id, "cancel"))

    def requeue(self, job_id: str) -> Job:
        return self._job("POST", ("jobs", job_id, "requeue"))

    def copy(self, job_id: str, change: dict[str, Any] | None = None, *, key: str | None = None) -> Job:
        """A new job with the job's spec, changed by a merge patch (RFC 7396); `key` as for `submit`."""
        return self._submitted(("jobs", job_id, "copy"), change or {}, key)

    def resume(
        self,
        job_id: str,
        checkpoint: str | None = None,
        change: dict[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> Job:
        """A new job that goes on from a checkpoint of the job, by default its newest, changed and keyed as a copy."""
        return self._submitted(("jobs", job_id, "resume"), {"checkpoint": checkpoint, "change": change or {}}, key)

    def change(self, job_id: str, **wishes: Unpack[JobChange]) -> Job:
        """`add_tags`, `remove_tags`, `archived`: all of it or nothing."""
        return self._job("PATCH", ("jobs", job_id), json=wishes)

    def checkpoints(self, job_id: str) -> list[CheckpointTold]:
        """Those that the job's attempts told of, the newest first."""
        found: list[CheckpointTold] = self._ask("GET", ("jobs", job_id, "checkpoints"))
        return found

    def results(self, job_id: str) -> Results:
        """What its attempt proved or found so far: predicted beside measured bytes, the checks, a dry run's ranks."""
        found: Results = self._ask("GET", ("jobs", job_id, "results"))
        return found

    def advice(self, job_id: str) -> Advice:
        """What would have been faster where a finished run ran."""
        found: Advice = self._ask("GET", ("jobs", job_id, "advice"))
        return found

    def compare(self, job_ids: Sequence[str]) -> Comparison:
        """Two to six runs side by side: where their specs differ, curves, traffic, parts of a step, plans."""
        found: Comparison = self._ask("GET", ("compare",), params={"jobs": ",".join(job_ids)})
        return found

    def plan(self, spec: Spec, cluster: str | None = None) -> Plan:
        """What a spec would cost, or its problems."""
        found: Plan = self._ask("POST", ("plan",), json=spec, params={"cluster": cluster} if cluster else {})
        return found

    def search(self, query: SearchQuery | dict[str, Any]) -> SearchResult:
        """The fastest layouts that fit."""
        found: SearchResult = self._ask("POST", ("plan", "search"), json=query)
        return found

    def baselines(self, project: str) -> list[BranchBrief]:
        """Branches of a project that have a baseline, each with its newest run."""
        found: list[BranchBrief] = self._ask("GET", ("projects", project, "baselines"))
        return found

    def baseline(self, project: str, branch: str) -> Baseline:
        """What the newest runs of a branch measured, the newest first."""
        found: Baseline = self._ask("GET", _branch(project, branch))
        return found

    def set_baseline(self, project: str, branch: str, job_id: str) -> Baseline:
        """Hold builds to a job's run too; the board keeps what it measured."""
        found: Baseline = self._ask("PUT", _branch(project, branch), json={"job": job_id})
        return found

    def forget_baseline(self, project: str, branch: str) -> None:
        self._door.send("DELETE", _branch(project, branch))

    def kept(self, job_id: str) -> list[AttemptKept]:
        """What is kept of each attempt's history, oldest attempt first."""
        found: list[AttemptKept] = self._ask("GET", ("jobs", job_id, "history"))["attempts"]
        return found

    def table(self, job_id: str, table: str, **asked: Any) -> dict[str, list[Any]]:
        """Columns of a table of a job's history; docs/explanation/history.md says what may be asked."""
        found: dict[str, list[Any]] = self._ask("GET", ("jobs", job_id, "history", table), params=asked)["columns"]
        return found

    def log(self, job_id: str, rank: int, *, attempt: int | None = None) -> Iterator[bytes]:
        """A rank's whole log as its host keeps it, part by part; -1 is the launcher of the first host."""
        query = {} if attempt is None else {"attempt": attempt}
        with self._door.stream(("jobs", job_id, "logs", str(rank)), "text/plain", params=query) as response:
            yield from response.iter_bytes()

    def events(self, job_id: str, *, live_s: int | None = None) -> Iterator[Event]:
        """Yield the events of a job until it ends (docs/reference/api.md). Reconnects if the connection breaks.

        Args:
            live_s: Begin this many seconds back, with `traffic` each second and without logs.
        """
        query = {} if live_s is None else {"live": live_s}
        return follow(self._door, ("jobs", job_id, "events"), **query)

    def follow_log(self, job_id: str, rank: int, *, attempt: int) -> Iterator[Event]:
        """`log` and `gap` of one rank's log, until its attempt has ended."""
        return follow(self._door, ("jobs", job_id, "logs", str(rank)), follow=1, attempt=attempt)

    def wait_for(self, job_id: str, state: str) -> Job:
        """The job once it has come into a state (also: started, finished), or has ended without it. A board that goes
        away meanwhile is waited for."""
        patience, query = Patience(heard=self._door.was_there), {"for": state, "timeout": int(LONGEST_WAIT_S)}
        while True:
            try:
                told: Waited = self._ask("GET", ("jobs", job_id, "wait"), params=query, patience_s=LONGEST_WAIT_S)
            except (AwayError, RefusedError) as error:
                patience.bear(error)
                continue
            patience.hears()
            job = Job(told["job"])
            if told["reached"] or job.finished:
                return job

    def wait(
        self,
        job_id: str,
        *,
        timeout_s: float | None = None,
        since: float | None = None,
        each: Callable[[Job], None] | None = None,
    ) -> Job:
        """The job once it has ended. `each` hears of every look. A board that goes away meanwhile is waited for.
        `since`: on the monotonic clock, when a wait began that is one with those for other jobs; by default now.

        Raises:
            TimedOutError: `timeout_s` after that; the job goes on.
        """
        began = time.monotonic() if since is None else since
        until = math.inf if timeout_s is None else began + timeout_s
        job, patience = None, Patience(heard=self._door.was_there)
        while True:
            try:
                longest_s = LONGEST_WAIT_S if each is None else LOOK_S
                if job is None:
                    job = self._job("GET", ("jobs", job_id), until=until + GRACE_S)
                else:
                    job = self._look(job_id, min(longest_s, until - time.monotonic()), until + GRACE_S)
                patience.hears()
                if each is not None:
                    each(job)
                if job.finished:
                    return job
            except (AwayError, RefusedError) as error:
                patience.bear(error)
            if time.monotonic() >= until:
                state = f"still {job.status}" if job else "unknown"
                raise TimedOutError(f"job {job_id} is {state} after {timeout_s:,g} s")

    def _look(self, job_id: str, seconds: float, until: float) -> Job:
        """The job as soon as it has ended, else as it is after `seconds`; sooner where the board knows no waiting, and
        not after `until`, as `Door.send`."""
        seconds = max(seconds, 0.0)
        if self._can_wait:
            query = {"for": "finished", "timeout": math.ceil(seconds)}
            try:
                asked = self._ask("GET", ("jobs", job_id, "wait"), params=query, patience_s=seconds, until=until)
                return Job(asked["job"])
            except RefusedError as error:
                if error.status != 404:
                    raise
        job = self._job("GET", ("jobs", job_id), until=until)  # raises where it is the job that is not there
        self._can_wait = False
        if not job.finished:
            time.sleep(min(POLL_S, seconds))
        return job

    def _ask(self, method: str, parts: Sequence[str], **how: Any) -> Any:
        return self._door.send(method, parts, **how).told

    def _pages(self, parts: Sequence[str], asked: Mapping[str, Any]) -> Iterator[Any]:
        query: dict[str, Any] | None = _told(asked)
        while query is not None:
            page, response = self._door.send("GET", parts, params=query)
            yield page
            query = _following(response)

    def _submitted(self, parts: Sequence[str], body: object, key: str | None) -> Job:
        headers = {} if key is None else {"Idempotency-Key": sendable_key(key)}
        answer = self._door.send("POST", parts, json=body, headers=headers)
        return self._job_of(answer.told, was_there=key is not None and answer.response.status_code == 200)

    def _job(self, method: str, parts: Sequence[str], **how: Any) -> Job:
        return self._job_of(self._ask(method, parts, **how))

    def _job_of(self, told: Any, *, was_there: bool = False) -> Job:
        if not isinstance(told, dict) or "id" not in told:
            raise AwayError(f"{self.url} did not return a job. Check the address of the board.")
        return Job(cast(JobDetail, told), was_there)


def _following(response: httpx.Response) -> dict[str, Any] | None:
    """What asks for the page behind; None where there is none."""
    following = response.links.get("next")
    if following is None:
        return None
    return {name: values[-1] for name, values in parse_qs(urlsplit(following["url"]).query).items()}


def _told(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What was given; several stand in one parameter."""
    given = {name: value for name, value in asked.items() if value is not None}
    return {name: ",".join(value) if isinstance(value, (list, tuple, set)) else value for name, value in given.items()}


def sendable_key(key: str, name: str = "key") -> str:
    """Raises WrongError, which calls it `name`."""
    if not key:
        raise WrongError(f"{name} is empty", name)
    if not KEY.fullmatch(key):
        raise WrongError(f"{name} {key!r}: expected 1 to {LONGEST_KEY} visible ASCII characters", name)
    return key


def _branch(project: str, branch: str) -> tuple[str, ...]:
    """git's names of branches may have parts of their own."""
    return ("projects", project, "baselines", *branch.split("/"))
