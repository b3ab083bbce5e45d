"""Traffic of a run between hosts and inside hosts, predicted and measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from pydantic import Field
from typing_extensions import TypedDict

from jobs.models import Job
from planner.facts.layout import LevelAxis, LevelName, RankGroup, get_group_ranks, get_level_name, get_levels
from planner.facts.spec import Layout


class HostTrafficBytes(TypedDict):
    """Payload bytes, summed over ranks: of groups on several hosts, and of groups inside one host."""

    across_bytes: int
    inside_bytes: int


class LevelTraffic(TypedDict):
    """Traffic of one axis, or of one level of dp if dp has two levels."""

    axis: LevelAxis
    level: Annotated[
        LevelName,
        Field(description="Level of the axis dp. With HSDP: `shards` or `replicas`. With ep: `shared` or `experts`."),
    ]
    groups: int
    groups_across: Annotated[int, Field(description="Number of groups with members on several hosts.")]
    predicted_step: Annotated[HostTrafficBytes, Field(description="Predicted traffic of one step.")]
    measured: Annotated[
        HostTrafficBytes | None,
        Field(description="Measured traffic of all steps. Null until the run has ended, or without a measurement."),
    ]
    predicted: Annotated[
        HostTrafficBytes | None,
        Field(description="Predicted traffic of the same number of steps. Null if `measured` is null."),
    ]


class HostTraffic(TypedDict):
    """Traffic between hosts. `steps` is 0 until the run has ended, or if measurements of ranks are missing."""

    hosts: list[str]
    steps: int
    left_out: Annotated[
        int,
        Field(description="Number of ranks without complete measurements. `measured` is null if this number is not 0."),
    ]
    levels: list[LevelTraffic]


Sent = Mapping[tuple[int, str, str], int]  # bytes by rank, axis and level


class _Groups(NamedTuple):
    """Process groups of a level: their number, the number on several hosts, and the ranks of those."""

    number: int
    across: int
    ranks: frozenset[int]

    def sum_traffic(self, sent: Sent, axis: str, level: str, times: int = 1) -> HostTrafficBytes:
        across = sum(b for (rank, a, name), b in sent.items() if (a, name) == (axis, level) and rank in self.ranks)
        whole = sum(b for (_, a, name), b in sent.items() if (a, name) == (axis, level))
        return {"across_bytes": times * across, "inside_bytes": times * (whole - across)}


def compute_host_traffic(job: Job) -> HostTraffic:
    """Return the traffic of the current attempt, or only its hosts without a prediction."""
    attempt = job.attempts.filter(number=job.attempt).prefetch_related("members").first()
    gang = list(attempt.members.all()) if attempt else []
    stages = job.estimate.get("stages")
    if not gang or not stages:
        return {"hosts": [member.host_name for member in gang], "steps": 0, "left_out": 0, "levels": []}
    layout = Layout.model_validate(job.spec["layout"])
    summary = (attempt.exit or {}).get("summary") or {} if attempt else {}
    cells, steps = summary.get("cells") or {}, summary.get("ran_steps", summary.get("steps", 0))
    left_out = summary.get("cells_left_out", 0)
    cells = {} if left_out else cells
    predicted, measured = _get_predicted(job.estimate, layout), _get_measured(cells, layout)
    home = {rank: one.node for one in gang for rank in range(one.first_rank, one.first_rank + one.num_ranks)}
    rows: list[LevelTraffic] = []
    for level in get_levels(layout):
        groups = _find_groups(layout.world_size, level.group, home)
        rows.append(
            {
                "axis": level.axis,
                "level": level.name,
                "groups": groups.number,
                "groups_across": groups.across,
                "predicted_step": groups.sum_traffic(predicted, level.axis, level.name),
                "measured": groups.sum_traffic(measured, level.axis, level.name) if cells else None,
                "predicted": groups.sum_traffic(predicted, level.axis, level.name, steps) if cells else None,
            }
        )
    return {
        "hosts": [member.host_name for member in gang],
        "steps": steps if cells else 0,
        "left_out": left_out,
        "levels": rows,
    }


def _find_groups(ranks: int, group: RankGroup, home: Mapping[int, int]) -> _Groups:
    firsts = [rank for rank in range(ranks) if rank // group.stride % group.size == 0]
    found = [get_group_ranks(rank, group) for rank in firsts]
    across = [rank for each in found if len({home.get(rank) for rank in each}) > 1 for rank in each]
    return _Groups(len(found), len(across) // group.size, frozenset(across))


def _get_predicted(estimate: Mapping[str, Any], layout: Layout) -> Sent:
    """Return predicted bytes per step. Ranks of a stage send the same bytes, except those in `rank_bytes`."""
    sent: dict[tuple[int, str, str], int] = defaultdict(int)
    each = layout.world_size // layout.pp
    for rank in range(layout.world_size):
        stage = estimate["stages"][rank // each]
        for row in stage["traffic"]:
            sent[rank, row["axis"], get_level_name(layout, row["axis"], row["op"], row["group_size"])] += row[
                "payload_bytes"
            ]
        for axis, num_bytes in estimate.get("rank_bytes", {}).get(str(rank), {}).items():
            if (rank, axis, "") in sent:
                sent[rank, axis, ""] = num_bytes
    return sent


def _get_measured(cells: Mapping[str, list[dict[str, Any]]], layout: Layout) -> Sent:
    """Return the bytes that ranks counted in their steps."""
    sent: dict[tuple[int, str, str], int] = defaultdict(int)
    for rank, rank_cells in cells.items():
        for cell in rank_cells:
            if cell["phase"] == "step":
                level = get_level_name(layout, cell["axis"], cell["op"], cell["group_size"])
                sent[int(rank), cell["axis"], level] += cell["payload_bytes"]
    return sent
