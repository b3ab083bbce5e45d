"""The comparison of plan and measurement on the job page."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from planner.hardware.catalog import CLUSTERS
from tests.support.browser import call_module

pytestmark = pytest.mark.extended


def test_comparison_starts_with_memory_and_each_group_has_a_badge(modules: Page) -> None:
    body = """
    const s = (await import('/js/store.js')).createState();
    s.ranks.set(0, {exactStep: 2});
    const stage = {memory: {parameters: 8}, memory_bytes: 8};
    const estimate = {stages: [stage], cluster: {}, time: {step_s: 1, parts: []}};
    const rows = [{axis: 'dp', ranks: [{rank: 0, predicted: 8, measured: 8}]}];
    const apart = {planned: null, measured: null};
    const body = document.createElement('tbody');
    m.showPlanned(body, estimate, s, rows, {device: 'cpu', least: 0, measured: null, apart, isExact: x});
    return [...body.querySelectorAll('.group')].map((row) => row.textContent);
    """
    memory, step = "memory of the rank with the most memoryestimate", "step timeestimate"
    traffic = "traffic per step (payload bytes, all ranks)"
    assert call_module(modules, "job/planned.js", body, True) == [memory, step, f"{traffic}exact"]
    assert call_module(modules, "job/planned.js", body, False) == [memory, step, f"{traffic}estimate"]


@pytest.mark.parametrize(
    ("accelerator", "masked"),
    [
        *((cluster.accelerator.name, True) for cluster in CLUSTERS.values() if cluster.device == "cuda"),
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA GB10 (no data sheet)", False),
        ("AMD EPYC 7763 64-Core Processor", False),
        ("CPU core", False),
    ],
)
def test_hfu_above_an_assumed_peak_is_not_explained_by_the_mask(modules: Page, accelerator: str, masked: bool) -> None:
    """Some processors are faster than the assumed 50 GFLOP/s."""
    time = {"step_s": 0.5, "model_flops": 1e10, "mfu": 1.8, "hfu": 1.8, "tokens_per_s": 2050, "parts": []}
    time |= {"interval": {"share": 0.03, "basis": "runs", "words": "from 3 runs here"}, "basis": "data sheet"}
    estimate = {"time": time, "world_size": 2, "cluster": {"name": "vm", "accelerator": accelerator}}
    body = "return m.timePicture(x).map((part) => part.textContent).join(' ')"
    shown = call_module(modules, "pictures/time.js", body, estimate)
    assert ("MFU counts the full attention matrix" in shown) == masked


def test_badge_is_exact_only_for_all_ranks(modules: Page) -> None:
    shown = """
    const badge = document.createElement("b");
    const words = (off, missing) => (m.showBadge(badge, off, true, missing), [badge.textContent, badge.dataset.tone]);
    return x.map(([off, missing]) => words(off, missing));
    """
    none, some = {"bytesOff": 0, "callsOff": 0, "net": 0}, {"bytesOff": 4, "callsOff": 0, "net": 0}
    result = call_module(
        modules, "job/tables.js", shown, [[none, ""], [none, " on 1 of 8 ranks"], [some, " on 1 of 8 ranks"]]
    )
    assert result == [
        ["exact: difference 0 B, 0 calls", "good"],
        ["difference 0 B, 0 calls on 1 of 8 ranks", "warn"],
        ["difference 4 B, 0 calls", "bad"],
    ]
