"""What is known of an attempt's checkpoints: of its end, of its last word, and of the history, which brings its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from contracts.telemetry.steps import CheckpointItem
from contracts.telemetry.vocabulary import MAX_CHECKPOINTS
from jobs.models import Attempt, Job

# Of an attempt: what its streams told, and whether nothing of them was lost.
Reader = Callable[[Attempt], tuple[list[CheckpointItem], bool]]
_readers: list[Reader] = []


class Saves(NamedTuple):
    """Of an attempt, the newest last.

    `whole`: none is missing between those that are told of. `final`: nor behind the last: no later one can be there.
    """

    items: list[CheckpointItem]
    newest: str
    whole: bool
    final: bool

    @property
    def newest_step(self) -> int | None:
        """Of the newest that is complete."""
        return max(self._complete(), default=None)

    def complete_after(self, step: int) -> int:
        """How many newer ones are complete."""
        return sum(1 for one in self._complete() if one > step)

    def _complete(self) -> set[int]:
        steps = {item["step"] for item in self.items if item["name"] is not None}
        return steps | ({step_of(self.newest)} if self.newest else set())


def read_with(reader: Reader) -> None:
    """The history lies above this room: it says here how it is read."""
    _readers.append(reader)


def most_kept(job: Job) -> int:
    """How many of an attempt stay, as far as is known."""
    most: int = job.spec.get("train", {}).get("keep_checkpoints", MAX_CHECKPOINTS)
    return most


def step_of(name: str) -> int:
    """Of what ends in /step-n."""
    return int(name.rpartition("/step-")[2])


def saves_of(attempt: Attempt) -> Saves:
    """Raises BusyError: too many histories are read."""
    ended = attempt.exit or {}
    summary = ended.get("summary")
    left: list[CheckpointItem] = (summary or {}).get("checkpoints", [])
    told = [reader(attempt) for reader in _readers]
    items = {item["step"]: item for item in [*(item for kept, _ in told for item in kept), *left]}
    has_newest = not attempt.checkpoint or step_of(attempt.checkpoint) in items
    return Saves(
        [items[step] for step in sorted(items)],
        attempt.checkpoint,
        whole=has_newest and (summary is not None or any(whole for _, whole in told)),
        final=has_newest and summary is not None and ended.get("outcome") == "succeeded",
    )
