"""REST client of a board, and a job as the board returns it."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack, cast
from urllib.parse import parse_qs, urlsplit

import httpx

from meshboard.answers import (
    Advice,
    AuditRow,
    Baseline,
    BranchBrief,
    Comparison,
    ImportedLayout,
    ImportedModel,
    JobBrief,
    JobChange,
    JobDetail,
    JobSpec,
    Plan,
    Results,
    SearchRequest,
    SearchResult,
    StoredAttempt,
    StoredCheckpoint,
    StoredSpec,
    Summary,
    UploadDetail,
    WaitResult,
)
from meshboard.errors import AwayError, RefusedError, TimedOutError, WrongError
from meshboard.transport import Event, OutageTimer, RestTransport

Spec = JobSpec | StoredSpec | dict[str, Any]  # a dict comes from a file, and the board checks it
POLL_INTERVAL_S = 1.0  # for an older board that cannot wait
MAX_WAIT_S = 60.0  # per request
PROGRESS_WAIT_S = 5.0  # per request, if the caller shows progress
GRACE_S = 5.0  # for a response after the deadline
MAX_PAGE_ROWS = 1000
PART_BYTES = 512 * 2**10  # of an upload, per request
MAX_KEY_CHARACTERS = 200
KEY = re.compile(f"[!-~]{{1,{MAX_KEY_CHARACTERS}}}")


class Client:
    """REST client of one board, and a context manager.

    Each method can raise RefusedError, AwayError, and WrongError.
    """

    def __init__(self, url: str, token: str, *, timeout_s: float = 60.0, verify: bool | str = True) -> None:
        self._transport = RestTransport(url, token, timeout_s, verify)
        self.url = self._transport.url
        self._can_wait = True  # until the board turns out to be too old

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._transport.close()

    def submit(self, spec: Spec, *, key: str | None = None, allow_unfit: bool = False) -> Job:
        """Queue a job. A repeated submit with an equal `key` and spec returns the existing job.

        Raises:
            RefusedError: The spec cannot run. Lists every problem with its field.
            WrongError: The key is invalid.
        """
        return self._submit(("jobs",), {**spec, "allow_unfit": True} if allow_unfit else spec, key)

    def upload(self, name: str, content: bytes) -> UploadDetail:
        """Upload a .tar.gz or .zip archive, or a single script. Equal content is sent and stored once.

        Set the spec field `script.upload` to the `sha256` of the result.

        Raises:
            RefusedError: The archive is not allowed, or you have the maximum number or size of uploads.
        """
        sha256 = hashlib.sha256(content).hexdigest()
        request = {"name": name, "size": len(content), "sha256": sha256}
        upload: UploadDetail = self._request("POST", ("uploads",), json=request)
        if upload["sha256"]:
            return upload
        path, headers = ("uploads", upload["id"]), {"Content-Type": "application/octet-stream"}
        for offset in range(0, len(content), PART_BYTES):
            part = content[offset : offset + PART_BYTES]
            self._request("PUT", path, content=part, params={"offset": offset}, headers=headers)
        finished: UploadDetail = self._request("POST", (*path, "finish"), json={"sha256": sha256})
        return finished

    def job(self, job_id: str) -> Job:
        """Return a job."""
        return self._request_job("GET", ("jobs", job_id))

    def jobs(self, **filters: Any) -> Iterator[JobBrief]:
        """Yield all visible jobs, newest first.

        The filters `status`, `kind` and `tag` can be lists: any of the states, any of the kinds, all of the tags.
        """
        for page in self._request_pages(("jobs",), filters):
            briefs = page.get("jobs") if isinstance(page, dict) else page
            if not isinstance(briefs, list):
                raise AwayError(f"{self.url} did not return a list of jobs. Check the address of the board.")
            yield from briefs

    def audit(self, **query: Any) -> Iterator[AuditRow]:
        """Yield the entries of the audit log, newest first. Only for staff."""
        for page in self._request_pages(("audit",), query):
            yield from page

    def audit_csv(self, **query: Any) -> Iterator[str]:
        """Yield the audit log as CSV, page by page, with one header."""
        next_query: dict[str, Any] | None = {"limit": MAX_PAGE_ROWS, **_encode_query(query), "format": "csv"}
        is_first = True
        while next_query is not None:
            with self._transport.stream(("audit",), "text/csv", params=next_query) as response:
                text = response.read().decode()
            yield text if is_first else text.partition("\r\n")[2]
            next_query, is_first = _get_next_query(response), False

    def cancel(self, job_id: str) -> Job:
        """Cancel a job."""
        return self._request_job("POST", ("jobs", job_id, "cancel"))

    def requeue(self, job_id: str) -> Job:
        """Queue another attempt of an ended job."""
        return self._request_job("POST", ("jobs", job_id, "requeue"))

    def copy(self, job_id: str, change: dict[str, Any] | None = None, *, key: str | None = None) -> Job:
        """Submit the spec of a job again, changed by a merge patch (RFC 7396). `key` is as for `submit`."""
        return self._submit(("jobs", job_id, "copy"), change or {}, key)

    def resume(
        self,
        job_id: str,
        checkpoint: str | None = None,
        change: dict[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> Job:
        """Submit a job that continues from a checkpoint of a job, by default the newest checkpoint."""
        return self._submit(("jobs", job_id, "resume"), {"checkpoint": checkpoint, "change": change or {}}, key)

    def change(self, job_id: str, **changes: Unpack[JobChange]) -> Job:
        """Apply `add_tags`, `remove_tags` and `archived` to a job, all of them or none."""
        return self._request_job("PATCH", ("jobs", job_id), json=changes)

    def checkpoints(self, job_id: str) -> list[StoredCheckpoint]:
        """Return the checkpoints that all attempts of a job reported, newest first."""
        found: list[StoredCheckpoint] = self._request("GET", ("jobs", job_id, "checkpoints"))
        return found

    def results(self, job_id: str) -> Results:
        """Return the checks of a job: predicted and measured bytes, replicas, and ranks of a dry run."""
        found: Results = self._request("GET", ("jobs", job_id, "results"))
        return found

    def advice(self, job_id: str) -> Advice:
        """Return layouts that are faster than the layout of a finished job, on the same hosts."""
        found: Advice = self._request("GET", ("jobs", job_id, "advice"))
        return found

    def compare(self, job_ids: Sequence[str]) -> Comparison:
        """Return the specs, curves, traffic, step parts, and plans of two to six jobs."""
        found: Comparison = self._request("GET", ("compare",), params={"jobs": ",".join(job_ids)})
        return found

    def plan(self, spec: Spec, cluster: str | None = None) -> Plan:
        """Return the estimate of a spec, or its problems. The spec can also have `measured_steps`."""
        found: Plan = self._request("POST", ("plan",), json=spec, params={"cluster": cluster} if cluster else {})
        return found

    def import_model(self, config: dict[str, Any]) -> ImportedModel:
        """Return the model of a Hugging Face config.json, for the model of a spec."""
        found: ImportedModel = self._request("POST", ("plan", "import-model"), json=config)
        return found

    def import_layout(self, text: str, ranks: int | None = None) -> ImportedLayout:
        """Return the layout in the config file of another training tool, as sections of a spec."""
        found: ImportedLayout = self._request("POST", ("plan", "import-layout"), json={"text": text, "ranks": ranks})
        return found

    def search(self, query: SearchRequest | dict[str, Any]) -> SearchResult:
        """Return the fastest layouts that fit in memory."""
        found: SearchResult = self._request("POST", ("plan", "search"), json=query)
        return found

    def baselines(self, project: str) -> list[BranchBrief]:
        """Return the branches of a project that have a baseline, each with its newest run."""
        found: list[BranchBrief] = self._request("GET", ("projects", project, "baselines"))
        return found

    def baseline(self, project: str, branch: str) -> Baseline:
        """Return the measurements of the newest runs of a branch, newest first."""
        found: Baseline = self._request("GET", _get_branch_path(project, branch))
        return found

    def set_baseline(self, project: str, branch: str, job_id: str) -> Baseline:
        """Add the run of a job to the baseline of a branch."""
        found: Baseline = self._request("PUT", _get_branch_path(project, branch), json={"job": job_id})
        return found

    def forget_baseline(self, project: str, branch: str) -> None:
        """Delete the baseline of a branch."""
        self._transport.send("DELETE", _get_branch_path(project, branch))

    def history(self, job_id: str) -> list[StoredAttempt]:
        """Return what the board stores of each attempt of a job, oldest attempt first."""
        found: list[StoredAttempt] = self._request("GET", ("jobs", job_id, "history"))["attempts"]
        return found

    def table(self, job_id: str, table: str, **query: Any) -> dict[str, list[Any]]:
        """Return the columns of a table of a job's history (docs/explanation/history.md)."""
        found: dict[str, list[Any]] = self._request("GET", ("jobs", job_id, "history", table), params=query)["columns"]
        return found

    def log(self, job_id: str, rank: int, *, attempt: int | None = None, raw: bool = True) -> Iterator[bytes]:
        """Yield the complete log of a rank from its host, in parts. Rank -1 is the launcher of the first host.

        Args:
            raw: The bytes as written, with every state of a progress bar. Otherwise, lines as a terminal shows them,
                with the last state. A board that is too old for them sends the bytes as written.
        """
        query: dict[str, Any] = {} if attempt is None else {"attempt": attempt}
        if raw:
            yield from self._stream_log(job_id, rank, query)
            return
        try:
            yield from self._stream_log(job_id, rank, {**query, "text": "terminal"})
        except RefusedError as error:
            if error.status not in (400, 422):
                raise
            yield from self._stream_log(job_id, rank, query)

    def _stream_log(self, job_id: str, rank: int, query: dict[str, Any]) -> Iterator[bytes]:
        with self._transport.stream(("jobs", job_id, "logs", str(rank)), "text/plain", params=query) as response:
            yield from response.iter_bytes()

    def events(self, job_id: str, *, live_s: int | None = None) -> Iterator[Event]:
        """Yield the events of a job until it ends (docs/reference/api.md). Reconnects if the connection breaks.

        Args:
            live_s: Begin this many seconds back, with `traffic` each second and without logs.
        """
        query = {} if live_s is None else {"live": live_s}
        return self._transport.follow_events(("jobs", job_id, "events"), **query)

    def follow_log(self, job_id: str, rank: int, *, attempt: int) -> Iterator[Event]:
        """Yield the events `log` and `gap` of a rank's log until its attempt ends."""
        return self._transport.follow_events(("jobs", job_id, "logs", str(rank)), follow=1, attempt=attempt)

    def wait_for(self, job_id: str, state: str) -> Job:
        """Return a job when it reaches a state, or ends. `state` can also be "started" or "finished".

        If the board goes away, the client waits for it.
        """
        outage = OutageTimer(has_answered=self._transport.has_answered)
        query = {"for": state, "timeout": int(MAX_WAIT_S)}
        while True:
            try:
                found: WaitResult = self._request("GET", ("jobs", job_id, "wait"), params=query, extra_s=MAX_WAIT_S)
            except (AwayError, RefusedError) as error:
                outage.wait_or_raise(error)
                continue
            outage.reset()
            job = Job(found["job"])
            if found["reached"] or job.finished:
                return job

    def wait(
        self,
        job_id: str,
        *,
        timeout_s: float | None = None,
        since: float | None = None,
        each: Callable[[Job], None] | None = None,
    ) -> Job:
        """Return a job when it ends. If the board goes away, the client waits for it.

        Args:
            since: Monotonic time at which the timeout begins. Default: now.
            each: Called with the job after each response.

        Raises:
            TimedOutError: The job continues after `timeout_s`.
        """
        deadline = math.inf if timeout_s is None else (time.monotonic() if since is None else since) + timeout_s
        job, outage = None, OutageTimer(has_answered=self._transport.has_answered)
        max_wait_s = MAX_WAIT_S if each is None else PROGRESS_WAIT_S
        while True:
            try:
                if job is None:
                    job = self._request_job("GET", ("jobs", job_id), deadline=deadline + GRACE_S)
                else:
                    job = self._wait_once(job_id, min(max_wait_s, deadline - time.monotonic()), deadline + GRACE_S)
                outage.reset()
                if each is not None:
                    each(job)
                if job.finished:
                    return job
            except (AwayError, RefusedError) as error:
                outage.wait_or_raise(error)
            if time.monotonic() >= deadline:
                state = f"still {job.status}" if job else "unknown"
                raise TimedOutError(f"job {job_id} is {state} after {timeout_s:,g} s")

    def _wait_once(self, job_id: str, seconds: float, deadline: float) -> Job:
        """Return a job when it ends, or its state after at most `seconds`."""
        seconds = max(seconds, 0.0)
        if self._can_wait:
            query = {"for": "finished", "timeout": math.ceil(seconds)}
            path = ("jobs", job_id, "wait")
            try:
                return Job(self._request("GET", path, params=query, extra_s=seconds, deadline=deadline)["job"])
            except RefusedError as error:
                if error.status != 404:
                    raise
        job = self._request_job("GET", ("jobs", job_id), deadline=deadline)  # raises if the job does not exist
        self._can_wait = False
        if not job.finished:
            time.sleep(min(POLL_INTERVAL_S, seconds))
        return job

    def _request(self, method: str, parts: Sequence[str], **options: Any) -> Any:
        return self._transport.send(method, parts, **options).content

    def _request_pages(self, parts: Sequence[str], query: Mapping[str, Any]) -> Iterator[Any]:
        next_query: dict[str, Any] | None = _encode_query(query)
        while next_query is not None:
            page, response = self._transport.send("GET", parts, params=next_query)
            yield page
            next_query = _get_next_query(response)

    def _submit(self, parts: Sequence[str], body: object, key: str | None) -> Job:
        headers = {} if key is None else {"Idempotency-Key": check_key(key)}
        content, response = self._transport.send("POST", parts, json=body, headers=headers)
        return self._parse_job(content, already_existed=key is not None and response.status_code == 200)

    def _request_job(self, method: str, parts: Sequence[str], **options: Any) -> Job:
        return self._parse_job(self._request(method, parts, **options))

    def _parse_job(self, content: Any, *, already_existed: bool = False) -> Job:
        if not isinstance(content, dict) or "id" not in content:
            raise AwayError(f"{self.url} did not return a job. Check the address of the board.")
        return Job(cast(JobDetail, content), already_existed)


def check_key(key: str, name: str = "key") -> str:
    """Return an idempotency key. Raises WrongError if an HTTP header cannot contain it."""
    if not key:
        raise WrongError(f"{name} is empty", name)
    if not KEY.fullmatch(key):
        raise WrongError(f"{name} {key!r}: expected 1 to {MAX_KEY_CHARACTERS} visible ASCII characters", name)
    return key


def _get_next_query(response: httpx.Response) -> dict[str, Any] | None:
    """Return the query of the next page, or None after the last page."""
    link = response.links.get("next")
    if link is None:
        return None
    return {name: values[-1] for name, values in parse_qs(urlsplit(link["url"]).query).items()}


def _encode_query(query: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that are not None, with lists as comma-separated text."""
    known = {name: value for name, value in query.items() if value is not None}
    return {name: ",".join(value) if isinstance(value, (list, tuple, set)) else value for name, value in known.items()}


def _get_branch_path(project: str, branch: str) -> tuple[str, ...]:
    """Return the parts of the address of a baseline. A name of a git branch can contain "/"."""
    return ("projects", project, "baselines", *branch.split("/"))


@dataclass(frozen=True)
class Job:
    """Job with the full response of the board in `detail`.

    `already_existed` is true if a submit with the same key created the job before.
    """

    detail: JobDetail
    already_existed: bool = False

    @property
    def id(self) -> str:
        return self.detail["id"]

    @property
    def name(self) -> str:
        return self.detail["name"]

    @property
    def status(self) -> str:
        return self.detail["status"]

    @property
    def attempt(self) -> int:
        """Number of the current attempt, from 1."""
        return self.detail["attempt"]

    @property
    def finished(self) -> bool:
        return self.detail["finished"]

    @property
    def succeeded(self) -> bool:
        return self.status == "succeeded"

    @property
    def backfilled(self) -> bool:
        """True if the current attempt uses hosts that are reserved for an earlier job."""
        return bool(self.detail.get("backfilled"))  # an older board has no such field

    @property
    def reason(self) -> str:
        """Reason for the state, or reason for which a queued job waits."""
        history = self.detail.get("history") or []
        return str(self.detail.get("wait_reason") or (history[-1]["reason"] if history else ""))

    @property
    def steps(self) -> int | None:
        """Number of training steps in the spec, or None if Meshboard's trainer does not run the job."""
        spec = self.detail.get("spec") or {}
        steps = (spec.get("train") or {}).get("steps")
        return steps if isinstance(steps, int) and spec.get("kind", "train") == "train" else None

    @property
    def world_size(self) -> int:
        return self.detail["world_size"]

    @property
    def verdict(self) -> str:
        """Verdict of the diagnosis with its reason and next step, or "" before the verdict."""
        diagnosis = self.detail.get("diagnosis") or {}
        if self.finished and not diagnosis.get("over"):
            return ""
        parts = (diagnosis.get("sentence"), diagnosis.get("reason"), diagnosis.get("next"))
        return " ".join(part for part in parts if part)

    @property
    def summary(self) -> Summary | dict[str, Any]:
        """Measurements of the ranks after the end of the job, else {}."""
        return (self.detail.get("exit") or {}).get("summary") or {}
