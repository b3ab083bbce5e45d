"""Plans, searches and advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from meshboard.answers import Advice, Estimate, FoundLayout, Interval, SearchResult
from meshboard.show.words import clean, seconds, size, table

AXES: Final = ("tp", "cp", "pp", "dp", "ep")


def plan(estimate: Estimate) -> str:
    """What a spec would cost: time by part, memory, payload bytes that the fullest rank sends a step."""
    time = estimate["time"]
    parts = "  ".join(f"{clean(part['name'])} {seconds(part['seconds'])}" for part in time["parts"])
    cluster = clean(estimate["cluster"]["name"])
    fits = ("barely fits" if estimate.get("tight") else "fits") if estimate["fits"] else "does NOT fit"
    sent: dict[str, int] = {}
    for stage in estimate["stages"]:
        for axis, num_bytes in stage["step_bytes"].items():
            sent[axis] = max(sent.get(axis, 0), num_bytes)
    traffic = ", ".join(f"{clean(axis)} {num_bytes:,} B" for axis, num_bytes in sent.items() if num_bytes)
    return "\n".join(
        [
            f"step    {seconds(time['step_s'])} (estimate): {parts}",
            *_sure(seconds, time["step_s"], time.get("interval")),
            f"memory  {size(estimate['peak_memory_bytes'])} on the rank with the most memory: {fits} {cluster}",
            *_sure(size, estimate["peak_memory_bytes"], estimate.get("memory_interval")),
            f"sends   {traffic or '0 B'} (payload bytes per step of the rank that sends most)",
        ]
    )


def found(told: SearchResult) -> str:
    """The layouts that a search found, the fastest first."""
    head = ["layout", "", "schedule", "recompute", "micro-batch", "step", "between", "memory", "between", "runs here"]
    return table(head, [_layout(one) for one in told["best"]])


def between(shown: Callable[[float], str], value: float, sure: Interval | None) -> str:
    """The interval that an estimate's error allows, "" of a board that tells none."""
    if sure is None:
        return ""
    share = max(0.01, sure["share"])
    return f"{shown(value / (1 + share) if share > 1 else value * (1 - share))} to {shown(value * (1 + share))}"


def _sure(shown: Callable[[float], str], value: float, sure: Interval | None) -> list[str]:
    return [f"        {between(shown, value, sure)}: {clean(sure['words'])}"] if sure else []


def tried(told: SearchResult) -> str:
    """How many layouts a search looked at, and why it left out those that it did."""
    cut = "" if told["complete"] else " (stopped by the time limit)"
    on = clean(told["cluster"]["name"])
    counted = f"checked {told['considered']:,} layouts{cut}; {told['fitting']:,} fit in memory on {on}"
    return "\n".join(
        [counted, *(f"rejected {count:,}: {clean(why)}" for why, count in sorted(told["refused"].items()))]
    )


def _layout(found: FoundLayout) -> list[object]:
    layout = found["layout"]
    return [
        " x ".join(f"{axis}{layout[axis]}" for axis in AXES if layout[axis] > 1) or "1 rank",
        f"zero-{layout['zero']}",
        layout["schedule"] if layout["pp"] > 1 else "-",
        layout["recompute"],
        found["micro_batch_size"],
        seconds(found["step_s"]),
        between(seconds, found["step_s"], found.get("interval")),
        size(found["memory_bytes"]),
        between(size, found["memory_bytes"], found.get("memory_interval")),
        "yes" if found["runnable"] else "no",
    ]


def advice(told: Advice) -> str:
    """The sentence, and each choice that would have been faster, those last that the estimate is not sure of."""
    lines = [clean(told["text"])]
    options = [(option, "") for option in told["options"]]
    options += [(option, "within the error of the estimate") for option in told["unsure"]]
    if options:
        rows = [
            [one["change"], seconds(one["step_s"]), f"{one['faster']:.1%}", size(one["memory_bytes"]), unsure]
            for one, unsure in options
        ]
        lines += ["", table(["change", "step", "faster", "memory", ""], rows)]
    return "\n".join(lines)
