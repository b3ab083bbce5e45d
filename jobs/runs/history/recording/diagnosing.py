"""What is wrong with an attempt, kept beside its job while the attempt runs: `jobs.runs.diagnosis` fed and stored."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import redis

from contracts.codec import BadMessageError, salvage_batch
from contracts.telemetry.batches import Batch
from jobs.core.verdict_schema import MOST_BYTES
from jobs.models import ELSEWHERE, Attempt, StateChange, Status
from jobs.queue import lifecycle
from jobs.queue.work_lease import away
from jobs.runs.diagnosis import Diagnosis, Member, Run
from jobs.runs.history.recording.ended import ended
from jobs.runs.history.recording.streams import Stream, known_entries
from jobs.runs.history.store.folder import Node

Key = tuple[str, int]  # job, attempt


class Diagnoser:
    """The diagnosis of one attempt, as it was last stored."""

    def __init__(self, key: int, nodes: int) -> None:
        """`key` of the attempt's row; `nodes` that it had then: with more, ranks are on other hosts."""
        attempt = Attempt.objects.select_related("job").prefetch_related("members").get(pk=key)
        job, members = attempt.job, list(attempt.members.all())
        ours = job.engine != ELSEWHERE
        self.row, self._job, self.nodes = key, job.id, nodes
        run = Run(
            job.spec,
            job.estimate,
            job.world_size,
            hardware=job.hardware,
            members=[Member(member.host_name, member.first_rank, member.num_ranks) for member in members],
            submitted=_queued(attempt) if ours else None,
            ordered=min((member.ordered.timestamp() for member in members), default=None) if ours else None,
        )
        self._diagnosis = Diagnosis(run)
        self._stored: dict[str, Any] | None = None
        self._over = False

    @property
    def tells(self) -> bool:
        """Whether there is anything to say of a job of this kind."""
        return self._diagnosis.tells

    def add(self, batch: Batch, node: int) -> None:
        """Take in what a member told."""
        for item in batch["items"]:
            self._diagnosis.add(item, node, batch.get("clock"))

    def end(self) -> None:
        """The attempt has ended: from now on its last word is told."""
        if self._over:
            return
        outcome, report = ended(self.row)
        self._diagnosis.ended(outcome or "lost", report)
        self._over = True

    def look(self, now: float, silence: str = "") -> bool:
        """Store how it stands at `now` by the board's clock, where that is news; True when it was."""
        told: dict[str, Any] = dict(self._diagnosis.look(now, silence))
        news = {name: value for name, value in told.items() if name != "time"}
        if news == self._stored:
            return False
        size = len(json.dumps(told))
        if size > MOST_BYTES:
            raise ValueError(f"The diagnosis has {size:,} bytes. The maximum is {MOST_BYTES:,}.")
        Attempt.objects.filter(pk=self.row).update(diagnosis=told)
        self._stored = news
        lifecycle.announce(self._job)
        return True


class Diagnoses:
    """Of every attempt that is recorded. One that fails is none: what its attempt tells is kept all the same."""

    def __init__(self, client: redis.Redis, tell: Callable[[str, Exception], None]) -> None:
        """`tell` is told what went wrong."""
        self._client, self._tell = client, tell
        self._of: dict[Key, Diagnoser] = {}

    def begin(self, key: Key, row: int, nodes: int, positions: Mapping[Stream, Node]) -> bool:
        """What streams told up to these positions is told again: a diagnosis is of a whole run. False where it is to
        be begun again."""
        return self._trying(key, lambda: self._begin(key, row, nodes, positions))

    def _begin(self, key: Key, row: int, nodes: int, positions: Mapping[Stream, Node]) -> None:
        made = Diagnoser(row, nodes)
        if not made.tells:
            return
        for stream, where in positions.items():
            for body in known_entries(self._client, stream, where["after"]):
                with contextlib.suppress(BadMessageError):
                    made.add(salvage_batch(body)[0], stream.node)
        self._of[key] = made

    def add(self, key: Key, batch: Batch, node: int) -> None:
        if made := self._of.get(key):
            self._trying(key, lambda: made.add(batch, node))

    def look(self, key: Key, nodes: int, positions: Mapping[Stream, Node], *, over: bool, silence: str = "") -> bool:
        """Store how it stands where that is news; begin anew where somebody joined. `over`: it has ended. `silence`:
        which host of it is not heard, in words. False where it is to be tried again."""
        made = self._of.get(key)
        if made is None:
            return True
        if positions and nodes != made.nodes:
            self.begin(key, made.row, nodes, positions)
            return False
        if over and not self._trying(key, made.end):
            return False
        return self._trying(key, lambda: made.look(self._now(), silence))

    def forget(self, key: Key) -> None:
        self._of.pop(key, None)

    def _now(self) -> float:
        """By the board's clock."""
        told: Any = self._client.time()
        return float(told[0] + told[1] / 1e6)

    def _trying(self, key: Key, work: Callable[[], object]) -> bool:
        """False where it may go better the next time."""
        try:
            work()
        except Exception as error:
            if away(error):
                self._tell("diagnosis", error)
                return False
            self.forget(key)
            self._tell("diagnosis of an attempt", error)
        return True


def _queued(attempt: Attempt) -> float:
    """When it came into the queue."""
    changes = StateChange.objects.filter(job=attempt.job_id, attempt=attempt.number, status=Status.QUEUED)
    found = changes.order_by("id").values_list("at", flat=True).first()
    return (found or attempt.job.created).timestamp()
