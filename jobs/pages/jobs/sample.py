"""The sample run that the empty job list offers: the run of the tutorial."""

from __future__ import annotations

from typing import Any, NamedTuple

from jobs.models import Host

FULL = {"dp": 2, "tp": 2, "zero": 1}
FULL_SLOTS = 4  # slots that FULL needs
SMALL = {"dp": 2, "zero": 1}
TRAIN = {"steps": 80, "global_batch": 16, "micro_batches": 2, "seq_len": 128}


class Sample(NamedTuple):
    """A whole spec, and its layout for the page."""

    spec: dict[str, Any]
    layout: str


def build_sample() -> Sample:
    """Return the tutorial's run, on two slots if the largest connected CPU host has fewer than four.

    Without a CPU host the run gets the full layout and waits for a host.
    """
    hosts = Host.objects.taking().filter(device="cpu")
    slots = max(hosts.values_list("slots", flat=True), default=FULL_SLOTS)
    fits = slots >= FULL_SLOTS
    spec = {
        "name": "sample run",
        "model": {"preset": "gpt-tiny"},
        "layout": FULL if fits else SMALL,
        "train": TRAIN,
        "resources": {"device": "cpu"},
    }
    return Sample(spec, "dp 2, tp 2, and ZeRO stage 1" if fits else "dp 2 and ZeRO stage 1")
