"""A link that has become slow since the run began."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from jobs.runs.diagnosis.events.links import Way, between_hosts
from jobs.runs.diagnosis.events.window import FIRST, Window
from jobs.runs.diagnosis.findings import Finding, evidence, percent, ranks_words
from jobs.runs.diagnosis.run import Run

RECENT = 6  # steps
SLOWER = 4.0
EXTRA_SHARE = 0.25


def slow_links(run: Run, window: Window) -> Iterator[Finding]:
    """Ways whose transfers, with all ranks there, take SLOWER times what they took when the run began, and EXTRA_SHARE
    of the step more: the medians over the last steps. Inside a host without GPUs there is no link, but processors that
    copy: what is slow there is no network's fault."""
    steps = window.steps[-RECENT:]
    if len(steps) < RECENT or window.sampled <= FIRST + RECENT:
        return
    step_s = median(step.step_s for step in steps)
    found: list[tuple[float, float, Way]] = []
    on_gpus = run.cluster is not None and run.cluster.device == "cuda"
    for way, before in window.usual.items():
        if not (on_gpus or between_hosts(run, way.ranks)):
            continue
        told = [step.moved[way] for step in steps if way in step.moved]
        if len(told) < RECENT:
            continue
        usual, now = median(before), median(one.transfer_s / one.calls for one in told)
        extra = (now - usual) * median(one.calls for one in told)
        if now >= SLOWER * usual and extra >= EXTRA_SHARE * step_s:
            found.append((extra / step_s, now / usual if usual else math.inf, way))
    if not found:
        return
    share, times, way = max(found)
    hosts = dict.fromkeys(run.host_of(rank) for rank in way.ranks)
    between = " and ".join(hosts) if len(hosts) > 1 else ranks_words(way.ranks)
    slower = f"{times:.0f} times as long" if times < 1000 else "far longer"
    facts = [
        evidence(f"{other.op} on {other.group.axis} takes an extra {percent(cost)} of the step", other.ranks)
        for cost, _, other in sorted(found, reverse=True)
    ]
    yield Finding(
        "slow",
        share,
        f"Slow link: between {between}. The slower {way.op} on {way.group.axis} adds {percent(share)} to each step.",
        f"Compared with the start of the run, transfers take {slower}, without the wait for late ranks.",
        f"Check the network of {' and '.join(hosts)}." if run.members else "Check the network of the hosts.",
        tuple(facts),
    )
