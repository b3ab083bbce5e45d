"""Define findings, the candidates for the verdict of a run, and format their texts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from jobs.core.verdict_schema import (
    MAX_NAMED_RANKS,
    MAX_SENTENCE_CHARACTERS,
    MAX_VERDICT_BYTES,
    Action,
    Evidence,
    VerdictPayload,
    VerdictState,
)

STATES_BY_SEVERITY: tuple[VerdictState, ...] = ("starting", "well", "notice", "slow", "hung", "failed")


class RunFinding(NamedTuple):
    """A candidate for the verdict of a run.

    `sentence` starts with the name of its state and a colon. `reason` is one sentence, `next` one imperative sentence.
    `weight` orders findings of one state by their cost, as a share of a step. `action` is the next step that the pages
    offer as a button, `action_rank` its rank or -1.
    """

    state: VerdictState
    weight: float
    sentence: str
    reason: str
    next: str
    evidence: tuple[Evidence, ...] = ()
    action: Action = ""
    action_rank: int = -1


def sort_by_severity(findings: Iterable[RunFinding]) -> list[RunFinding]:
    """Sort findings, the most severe first."""
    return sorted(findings, key=lambda f: (-STATES_BY_SEVERITY.index(f.state), -f.weight))


def make_evidence(text: str, ranks: Iterable[int] = (), steps: tuple[int, ...] = ()) -> Evidence:
    return {"text": truncate(text), "ranks": sorted(ranks)[:MAX_NAMED_RANKS], "steps": list(steps)}


def shrink_to_limit(verdict: VerdictPayload) -> VerdictPayload:
    """Shrink a verdict to MAX_VERDICT_BYTES: halve groups, waits, and evidence, and drop outer frames of a stack."""
    while len(json.dumps(verdict)) > MAX_VERDICT_BYTES:
        groups, waits, facts, hang = verdict["groups"], verdict["waits"], verdict["evidence"], verdict["hang"]
        stack = hang["stack"] if hang is not None else []
        if not (groups or waits or facts or stack):
            raise AssertionError("the remaining fields are smaller than MAX_VERDICT_BYTES")
        verdict["groups"], verdict["waits"] = groups[: len(groups) // 2], waits[: len(waits) // 2]
        verdict["evidence"] = facts[: len(facts) // 2]
        if hang is not None:
            verdict["hang"] = {**hang, "stack": stack[(len(stack) + 1) // 2 :]}
    return verdict


def truncate(text: str) -> str:
    return text if len(text) <= MAX_SENTENCE_CHARACTERS else text[: MAX_SENTENCE_CHARACTERS - 1] + "…"


def format_ranks(ranks: Iterable[int]) -> str:
    """Name ranks: "rank 3", "ranks 0, 1 and 5", "ranks 0 to 7", "61 ranks, starting with rank 2"."""
    known = sorted(set(ranks))
    if not known:
        return "no rank"
    if len(known) == 1:
        return f"rank {known[0]}"
    if len(known) > 2 and known[-1] - known[0] == len(known) - 1:
        return f"ranks {known[0]} to {known[-1]}"
    if len(known) > 8:
        return f"{len(known)} ranks, starting with rank {known[0]}"
    return f"ranks {', '.join(map(str, known[:-1]))} and {known[-1]}"


def format_difference(size: int, calls: int) -> str:
    """Format a traffic difference: "0 B, 0 calls"."""
    return f"{size:,} B, {calls:,} {'call' if calls == 1 else 'calls'}"


def capitalize(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def make_sentence(text: str) -> str:
    """Return the text with a capital letter and a period, or an empty text as it is."""
    text = capitalize(text.strip())
    return text if not text or text[-1] in ".!?…" else f"{text}."


def format_seconds(value: float) -> str:
    """Format seconds with three digits: "12.3 s", "4.56 ms", "89.0 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size or unit == "us":
            return f"{value / size:.3g} {unit}" if value / size < 1000 else f"{value / size:.0f} {unit}"
    raise AssertionError


def format_percent(share: float) -> str:
    """Format a fraction: "18%", "0.4%"."""
    return f"{share:.0%}" if abs(share) >= 0.0995 or share == 0 else f"{share:.1%}"
