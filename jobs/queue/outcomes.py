"""How an attempt ended, from what its host says and what its kind of job must bring; nothing is stored here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from contracts.control import ExitReport, Outcome, Summary
from jobs.core.kinds import kind_of
from jobs.models import Status
from planner.facts.collectives import LabResult
from planner.hardware.profile import HostProfile

OUTCOMES = {
    "succeeded": Status.SUCCEEDED,
    "failed": Status.FAILED,
    "cancelled": Status.FAILED,
    "lost": Status.LOST,
}

# Whose word on a gang's end counts most. One that failed because it lost a peer is no cause, but better than nothing.
GRAVITY: list[tuple[Outcome, bool]] = [
    ("failed", False),
    ("lost", False),
    ("failed", True),
    ("cancelled", False),
    ("succeeded", False),
]
BY_RANK = ("cells", "verdict", "peak_bytes", "memory")
HOW_FAR = ("steps", "ran_steps")


class Ending(NamedTuple):
    """`report` is what stays with the attempt; `profile` is for its host, of a calibration that ended well."""

    status: Status
    reason: str
    report: ExitReport
    profile: HostProfile | None


def finish(spec: Mapping[str, Any], told: ExitReport) -> Ending:
    """What becomes of a job whose host told this. A good end without what its kind must bring is a failure."""
    summary: Any = dict(told["summary"]) if told["summary"] else None
    status, reason = OUTCOMES[told["outcome"]], told["reason"]
    if told["outcome"] == "cancelled":  # who may write to Redis can raise its flag
        reason = f"canceled by a request in Redis that did not come from Meshboard: {reason}"
    profile, unusable = checked_profile(summary.pop("profile", None) if summary else None)
    lab = checked_result(summary.pop("lab", None)) if summary else None
    if summary and lab:
        summary["lab"] = lab.model_dump(mode="json")
    report: ExitReport = {**told, "summary": summary}
    if status != Status.SUCCEEDED:
        return Ending(status, reason, report, None)
    brings = kind_of(spec).brings
    if problem := {"profile": unusable, "lab": failure(lab)}.get(brings or ""):
        return Ending(Status.FAILED, problem, report, None)
    return Ending(status, reason, report, profile if brings == "profile" else None)


def merged(reports: list[ExitReport], silent_ranks: int = 0) -> ExitReport | None:
    """One report of a gang from those of its members, in the order of their ranks; None of none.

    What it says of its end is said by the member that ended it: the first to fail. `silent_ranks`: of members that
    told no summary.
    """
    if len(reports) < 2:
        return reports[0] if reports else None
    root = min(reports, key=_gravity)
    return {
        **root,
        "started": min(told["started"] for told in reports),
        "finished": max(told["finished"] for told in reports),
        "summary": _merged_summaries([told["summary"] for told in reports if told["summary"]], silent_ranks),
    }


def _gravity(told: ExitReport) -> tuple[int, float]:
    lost_peer = told["outcome"] == "failed" and told.get("lost_peer", False)
    return GRAVITY.index((told["outcome"], lost_peer)), told.get("failed_at", told["finished"])


def _merged_summaries(summaries: list[Summary], silent_ranks: int) -> Summary | None:
    """What is told rank by rank is joined. How far it came is all of the member that came furthest: a resumed run
    began after a member's steps less those that the same one ran. Of the rest, that of the lowest rank which told it.
    """
    if not summaries:
        return None
    whole: Any = {}
    if left_out := silent_ranks + sum(told.get("cells_left_out", 0) for told in summaries):
        whole["cells_left_out"] = left_out
    for told in summaries:
        for name, value in told.items():
            if name in BY_RANK:
                whole[name] = {**whole.get(name, {}), **cast(dict[str, Any], value)}
            elif name == "dry_runs":
                whole[name] = [*whole.get(name, []), *cast(list[Any], value)]
            elif name not in HOW_FAR and not whole.get(name):
                whole[name] = value
    furthest: Any = max(summaries, key=lambda told: told["steps"])
    whole |= {name: furthest[name] for name in HOW_FAR if name in furthest}
    return cast(Summary, whole)


def checked_profile(told: object) -> tuple[HostProfile | None, str]:
    """A host's profile, or why what was told is none."""
    try:
        return HostProfile.model_validate_json(json.dumps(told)), ""
    except (ValueError, TypeError) as error:  # msgpack may bring what JSON has no word for
        return None, f"the host sent no valid calibration profile: {str(error)[:300]}"


def checked_result(told: object) -> LabResult | None:
    """A lab's result, None for what is none."""
    try:
        return LabResult.model_validate_json(json.dumps(told))
    except (ValueError, TypeError):
        return None


def failure(result: LabResult | None) -> str:
    """Why a lab that ended well has failed all the same; empty when it has not."""
    if result is None:
        return "the host sent no valid benchmark result"
    return f"{result.wrong} elements are wrong" if result.wrong else ""
