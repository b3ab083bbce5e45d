"""The board's REST API, typed where it matters to a caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

POLL_S = 1.0
TRIES = 5  # of a request that the board could not take just now


class AwayError(Exception):
    """The board cannot be reached, or is no board."""


class TimedOutError(Exception):
    """A job did not end in the time that was given to it."""


class RefusedError(Exception):
    """The board refused; `problems` are (field, message)."""

    def __init__(self, status: int, problems: list[tuple[str, str]]) -> None:
        super().__init__("\n".join(f"{field}: {message}" for field, message in problems) or f"HTTP {status}")
        self.status, self.problems = status, problems


@dataclass(frozen=True)
class Job:
    """A job as the board tells it; `told` is all of it."""

    told: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.told["id"])

    @property
    def name(self) -> str:
        return str(self.told["name"])

    @property
    def status(self) -> str:
        return str(self.told["status"])

    @property
    def finished(self) -> bool:
        return bool(self.told["finished"])

    @property
    def succeeded(self) -> bool:
        return self.status == "succeeded"

    @property
    def reason(self) -> str:
        """Why it is in its state, or why it waits."""
        history = self.told.get("history") or []
        return str(self.told.get("wait_reason") or (history[-1]["reason"] if history else ""))

    @property
    def summary(self) -> dict[str, Any]:
        """What its ranks measured, once it has ended; else empty."""
        return (self.told.get("exit") or {}).get("summary") or {}


class Client:
    """Speaks to one board with one token. A context manager."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 60.0, verify: bool | str = True) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=f"{self.url}/api/v1/",
            headers={"Authorization": f"Token {token}", "Accept": "application/json"},
            timeout=timeout_s,
            verify=verify,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, spec: dict[str, Any], *, key: str | None = None) -> Job:
        """Queue a job. The same `key` with the same spec gives the same job, however often it is sent.

        Raises:
            RefusedError: the spec cannot run; every problem with its field.
        """
        return Job(self._ask("POST", "jobs", json=spec, headers={"Idempotency-Key": key} if key else {}))

    def job(self, job_id: str) -> Job:
        return Job(self._ask("GET", f"jobs/{job_id}"))

    def jobs(self, **filters: Any) -> Iterator[dict[str, Any]]:
        """Briefs of all jobs one may see, the newest first, page after page."""
        query: dict[str, Any] = {name: value for name, value in filters.items() if value is not None}
        while True:
            response = self._send("GET", "jobs", params=query)
            page = response.json()
            yield from page if isinstance(page, list) else page["jobs"]
            following = response.links.get("next")
            if following is None:
                return
            query = {name: values[-1] for name, values in parse_qs(urlsplit(following["url"]).query).items()}

    def cancel(self, job_id: str) -> Job:
        return Job(self._ask("POST", f"jobs/{job_id}/cancel"))

    def requeue(self, job_id: str) -> Job:
        return Job(self._ask("POST", f"jobs/{job_id}/requeue"))

    def advice(self, job_id: str) -> Any:
        """What would have been faster where a finished run ran."""
        return self._ask("GET", f"jobs/{job_id}/advice")

    def plan(self, spec: dict[str, Any], cluster: str | None = None) -> dict[str, Any]:
        """What a spec would cost, or its problems."""
        found: dict[str, Any] = self._ask("POST", "plan", json=spec, params={"cluster": cluster} if cluster else {})
        return found

    def search(self, query: dict[str, Any]) -> dict[str, Any]:
        """The fastest layouts that fit."""
        found: dict[str, Any] = self._ask("POST", "plan/search", json=query)
        return found

    def wait(self, job_id: str, *, timeout_s: float | None = None, each: Callable[[Job], None] | None = None) -> Job:
        """The job once it has ended. `each` hears of every look. A board that is away for a while is waited for.

        Raises:
            TimedOutError: after `timeout_s`; the job goes on.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            job = self.job(job_id)
            if each is not None:
                each(job)
            if job.finished:
                return job
            if until is not None and time.monotonic() + POLL_S > until:
                raise TimedOutError(f"job {job_id} is still {job.status} after {timeout_s:g} s")
            time.sleep(POLL_S)

    def _ask(self, method: str, path: str, **how: Any) -> Any:
        return self._send(method, path, **how).json()

    def _send(self, method: str, path: str, **how: Any) -> httpx.Response:
        """Asks that change nothing, and those with a key, are repeated while the board is away; no others are."""
        safe = method == "GET" or "Idempotency-Key" in how.get("headers", {})
        for attempt in range(TRIES):
            last = attempt == TRIES - 1
            try:
                response = self._http.request(method, path, **how)
            except httpx.TransportError as error:
                if last or not safe:
                    raise AwayError(f"{self.url} cannot be reached: {error}") from None
            except httpx.InvalidURL as error:
                raise AwayError(f"{self.url} is no address: {error}") from None
            else:
                if response.status_code not in (429, 503) or last:
                    return _checked(response)
                time.sleep(_retry_after(response))
                continue
            time.sleep(2.0**attempt / 2)
        raise AssertionError("the last try returns or raises")


def _retry_after(response: httpx.Response) -> float:
    told = response.headers.get("Retry-After", "")
    return min(float(told), 60.0) if told.isascii() and told.isdigit() else POLL_S


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    try:
        problems = [(str(error["field"]), str(error["message"])) for error in response.json()["errors"]]
    except (ValueError, KeyError, TypeError):
        problems = []
    if not problems and response.status_code not in (401, 403, 404):
        raise AwayError(f"{response.url} answered {response.status_code} and nothing that a board says")
    raise RefusedError(response.status_code, problems or [("request", f"HTTP {response.status_code}")])
