"""What is known of a run before it tells anything: its spec, its plan, its hardware, who runs which rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import ValidationError

from planner.facts.kinds import get_kind_rules
from planner.facts.spec import JobSpec
from planner.hardware.cluster import Cluster


class Member(NamedTuple):
    """The ranks that one host runs, which follow each other."""

    host: str
    first_rank: int
    num_ranks: int


class Run:
    """An attempt. `submitted`, `ordered`: when it was, unix seconds by the board's clock; None where nobody knows.

    `spec`, `estimate` and `hardware` as they are stored with the job.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        estimate: Mapping[str, Any],
        world_size: int,
        *,
        hardware: Mapping[str, Any] | None = None,
        members: Sequence[Member] = (),
        submitted: float | None = None,
        ordered: float | None = None,
    ) -> None:
        self.estimate, self.world_size, self.members = estimate, world_size, members
        self.submitted, self.ordered = submitted, ordered
        self._spec, self._hardware = spec, hardware

    @cached_property
    def has_steps(self) -> bool:
        """Whether its ranks take steps together that can be diagnosed: a lab, a calibration or a dry run does not."""
        kind = get_kind_rules(self._spec)
        return not kind.shares_one_slot and not kind.measures_host

    @cached_property
    def is_script(self) -> bool:
        """Whether it is somebody's own program, launched here or elsewhere."""
        return not get_kind_rules(self._spec).trains

    @cached_property
    def spec(self) -> JobSpec | None:
        """The spec of a run of the trainer's. None where there is no plan: a script, or one of an older version."""
        kind = get_kind_rules(self._spec)
        if not kind.trains or kind.shares_one_slot:
            return None
        try:
            return JobSpec.model_validate(self._spec)
        except ValidationError:
            return None

    @cached_property
    def cluster(self) -> Cluster | None:
        """The hardware it was planned for."""
        if self._hardware is None:
            return None
        try:
            return Cluster.model_validate(self._hardware, strict=False)
        except ValidationError:  # of an older version
            return None

    @cached_property
    def steps_asked(self) -> int | None:
        return self.spec.train.steps if self.spec else None

    def member_of(self, rank: int) -> int:
        """The place among its hosts of the one that runs a rank, 0 where they are not known."""
        for node, member in enumerate(self.members):
            if member.first_rank <= rank < member.first_rank + member.num_ranks:
                return node
        return 0

    def host_of(self, rank: int) -> str:
        """The name of the host that runs a rank, "" where it is not known."""
        return self.members[self.member_of(rank)].host if self.members and rank >= 0 else ""

    def where(self, rank: int) -> str:
        """'rank 5', and ' on host b' where there are several."""
        return f"rank {rank} on {self.host_of(rank)}" if len(self.members) > 1 else f"rank {rank}"
