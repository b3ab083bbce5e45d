"""When anything last ended on a rank, and when anything was last heard of it."""

from __future__ import annotations

from contracts.telemetry.batches import Item
from contracts.telemetry.health import StallItem
from contracts.telemetry.vocabulary import Phase


class Progress:
    """Times are the board's. What counts as progress: a collective ended, a step did, a phase began, a stage of the
    start was over, a checkpoint or a validation was told."""

    def __init__(self) -> None:
        self._completed: dict[int, dict[tuple[str, str, str, int], int]] = {}
        self._last: dict[int, float] = {}
        self.phases: dict[int, Phase] = {}
        self.standing: dict[int, StallItem] = {}
        self.heard: dict[int, float] = {}  # by member, when it last told anything

    def add(self, item: Item, node: int) -> None:
        time = item["time"]
        self.heard[node] = max(time, self.heard.get(node, time))
        match item["kind"]:
            case "traffic":
                known = self._completed.setdefault(item["rank"], {})
                before = sum(known.values())
                for cell in item["cells"]:
                    known[cell["phase"], cell["op"], cell["axis"], cell["group_size"]] = cell["completed"]
                if sum(known.values()) != before:
                    self._moved(item["rank"], time)
            case "standing":
                self._stands(item)
            case "phase":
                self.phases[item["rank"]] = item["phase"]
                self._moved(item["rank"], time)
            case "step" | "eval" | "checkpoint" | "start" | "proof" | "verdict":
                self._moved(item["rank"], time)
            case _:
                pass

    def _stands(self, item: StallItem) -> None:
        rank = item["rank"]
        self._moved(rank, item["time"] - item["still"])
        if item["still"] > 0:
            self.standing[rank] = item
        else:
            self.standing.pop(rank, None)

    def _moved(self, rank: int, time: float) -> None:
        if rank < 0:
            return
        self._last[rank] = max(time, self._last.get(rank, time))
        standing = self.standing.get(rank)
        if standing is not None and time > standing["time"]:
            del self.standing[rank]

    @property
    def last(self) -> float | None:
        """When anything last ended on any rank."""
        return max(self._last.values(), default=None)

    @property
    def told(self) -> float | None:
        """When anybody last told anything."""
        return max(self.heard.values(), default=None)
