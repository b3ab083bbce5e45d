"""The job page's plan and measurement: what is too small, too early or told by too few ranks to be compared."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from planner.hardware.clusters import CLUSTERS
from tests.support.modules import call


def planned(modules: Page, tensors: int, device: str, measured: dict[str, Any] | None) -> list[dict[str, Any]]:
    memory = {"parameters": tensors, "allowance": 400 * 2**20}
    stage = {"memory": memory, "memory_bytes": tensors + 400 * 2**20}
    time = {"step_s": 0.02, "parts": []}
    estimate = {"stages": [stage], "cluster": {"reserved_bytes": 310 * 2**20}, "time": time}
    run = {"device": device, "measured": measured, "apart": {"planned": None, "measured": None}, "least": 2**28}
    state = "const s = (await import('/js/store.js')).createState(); s.peaks.set(0, 2**29);"
    state += "s.stepTimes = [0.5, 0.04, 0.04];"
    lines = "return m.plannedLines(x[0], s, [], x[1])"
    return list(call(modules, "job/planned.js", state + lines, [estimate, run]))


def test_a_small_rank_s_memory_is_not_held_against_what_libraries_take(modules: Page) -> None:
    def off(tensors: int, device: str) -> str:
        return str(next(line["off"] for line in planned(modules, tensors, device, None) if "memory" in line["group"]))

    assert off(2**28 - 1, "cpu") == "not compared"
    assert off(2**28, "cpu").endswith("%")
    assert off(2**20, "cuda").endswith("%")
    groups = {line["group"] for line in planned(modules, 2**20, "cpu", None)}
    assert "memory of the rank with the most memory, without 310 MiB of process overhead" in groups


def test_memory_is_first_and_each_group_has_its_own_badge(modules: Page) -> None:
    """Exact traffic had the badge "estimate", and opened the tab Memory."""
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
    assert call(modules, "job/planned.js", body, True) == [memory, step, f"{traffic}exact"]
    assert call(modules, "job/planned.js", body, False) == [memory, step, f"{traffic}estimate"]


def test_a_step_s_time_is_the_summary_s_once_there_is_one(modules: Page) -> None:
    def together(measured: dict[str, Any] | None) -> Any:
        return next(line["measured"] for line in planned(modules, 1, "cpu", measured) if line["group"] == "step time")

    assert (together(None), together({"steps": 9, "step_s": 0.03})) == ("40.0 ms", "30.0 ms")


def test_a_part_worth_a_line_on_one_side_has_both_figures(modules: Page) -> None:
    """Under a thousandth of the planned step is not a plan that tells nothing."""

    def told(step_s: float, **seconds: float) -> dict[str, Any]:
        return {"step_s": step_s, "parts": [{"name": n, "kind": n, "seconds": s} for n, s in seconds.items()]}

    sides = [told(1.0, optimizer=4e-4, data=1e-4, compute=0.9), told(4.0, optimizer=0.9, data=1e-4, compute=3.0)]
    rows = call(modules, "job/parts.js", "return m.partRows(...x);", sides)
    assert [(row["name"], row["planned"], row["measured"]) for row in rows] == [
        ("compute", 0.9, 3.0),
        ("optimizer", 4e-4, 0.9),
    ]


def test_a_step_s_bytes_are_the_plan_s_where_ranks_were_cut_off_at_different_steps(modules: Page) -> None:
    """Of 1,475 and 1,476 steps all bytes were divided by 1,476."""
    body = """
    const s = (await import('/js/store.js')).createState();
    const { compareAxes } = await import('/js/collectives.js');
    const cells = (steps) => [{axis: "dp", op: "all_reduce", payload_bytes: 100 * steps, count: steps}];
    for (const [rank, steps] of [[0, 3], [1, 2]]) s.ranks.set(rank, {exactStep: steps, exactCells: cells(steps)});
    const rows = compareAxes(s.ranks, () => ({dp: {bytes: 100, calls: 1}}));
    const estimate = {axes: {pp: 1, dp: 2, tp: 1}, stages: [{stage: 0, memory: {}, memory_bytes: 0}]};
    const lines = m.plannedLines(estimate, s, rows, {device: "cpu", least: 0});
    const payload = lines.filter((line) => line.group.startsWith("traffic"));
    return payload.map((line) => [line.planned, line.measured, line.off]);
    """
    assert call(modules, "job/planned.js", body) == [["200 B", "200 B", "0%"]]


def test_the_median_of_an_even_number_of_steps_lies_between_the_middle_two(modules: Page) -> None:
    body = """
    const s = (await import('/js/store.js')).createState();
    s.stepTimes.push(0.5, 0.7, 0.1, 0.9);
    const apart = {planned: null, measured: null};
    const estimate = {time: {step_s: 0.6, parts: []}, axes: {pp: 1, dp: 1, tp: 1}};
    const stages = [{stage: 0, memory: {}, memory_bytes: 0}];
    const lines = m.plannedLines({...estimate, stages}, s, [], {device: "cpu", least: 0, measured: null, apart});
    return lines.find((line) => line.group === "step time").measured;
    """
    assert call(modules, "job/planned.js", body) == "600 ms"


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
def test_a_share_of_an_assumed_peak_is_not_put_down_to_the_mask(modules: Page, accelerator: str, masked: bool) -> None:
    """After runs on a processor faster than the 50 GFLOP/s assumed, 182% was attention's."""
    time = {"step_s": 0.5, "model_flops": 1e10, "mfu": 1.8, "hfu": 1.8, "tokens_per_s": 2050, "parts": []}
    time |= {"interval": {"share": 0.03, "basis": "runs", "words": "from 3 runs here"}, "basis": "data sheet"}
    estimate = {"time": time, "world_size": 2, "cluster": {"name": "vm", "accelerator": accelerator}}
    body = "return m.timePicture(x).map((part) => part.textContent).join(' ')"
    told = call(modules, "pictures/time.js", body, estimate)
    assert ("MFU counts the full attention matrix" in told) == masked


def test_exact_is_said_of_all_ranks_alone(modules: Page) -> None:
    shown = """
    const badge = document.createElement("b");
    const words = (off, missing) => (m.showBadge(badge, off, true, missing), [badge.textContent, badge.dataset.tone]);
    return x.map(([off, missing]) => words(off, missing));
    """
    none, some = {"bytesOff": 0, "callsOff": 0, "net": 0}, {"bytesOff": 4, "callsOff": 0, "net": 0}
    told = call(modules, "job/tables.js", shown, [[none, ""], [none, " on 1 of 8 ranks"], [some, " on 1 of 8 ranks"]])
    assert told == [
        ["exact: difference 0 B, 0 calls", "good"],
        ["difference 0 B, 0 calls on 1 of 8 ranks", "warn"],
        ["difference 4 B, 0 calls", "bad"],
    ]


def test_a_search_that_finds_a_slower_layout_than_the_form_s_says_so(modules: Page) -> None:
    """One that does not fit may take less time: "as fast as before" was said of twice as long."""
    found = {"best": [{"step_s": 0.1}], "fitting": 1, "considered": 2, "complete": True, "neighbours": []}
    told = [call(modules, "plan/best.js", "return m.why(...x)", [found, before]) for before in (0.2, 0.1, 0.05, None)]
    what = "Predicted step time 100 ms. Fastest of 1 layouts that fit (2 searched)."
    words = (
        " This layout is 2.00 times as fast as the layout in the form.",
        " This layout is as fast as the layout in the form.",
        " The layout in the form is 2.00 times as fast as this layout.",
        "",
    )
    assert told == [f"{what}{ending}" for ending in words]


def test_parts_of_a_step_stand_beside_the_plan_each_with_its_error(modules: Page) -> None:
    def part(name: str, kind: str, seconds: float) -> dict[str, Any]:
        return {"name": name, "kind": kind, "seconds": seconds, "waiting_s": 0}

    measured = [part("compute", "compute", 0.04), part("tp", "exposed", 0.05), part("tp", "hidden", 0.01)]
    time = [("compute", 0.015), ("launch", 0.005), ("tp", 0.02), ("dp", 0.01)]
    job = {
        "estimate": {
            "stages": [{"memory": {}, "memory_bytes": 0}],
            "time": {"step_s": 0.05, "parts": [{"name": name, "seconds": seconds} for name, seconds in time]},
        },
        "diagnosis": {"measured": {"step_s": 0.09, "sure": 0, "steps": 9, "parts": measured}},
    }
    body = """
    const { stepsOf } = await import('/js/job/parts.js');
    const s = (await import('/js/store.js')).createState();
    const run = { device: 'cpu', measured: null, apart: stepsOf(x, s), least: 0 };
    return m.plannedLines(x.estimate, s, [], run).filter(({ group }) => group === 'step time');
    """
    lines = call(modules, "job/planned.js", body, job)
    assert [[line[key] for key in ("name", "planned", "measured", "off")] for line in lines] == [
        ["total", "50.0 ms", None, None],
        ["compute", "20.0 ms", "40.0 ms", "+100%"],
        ["dp, exposed", "10.0 ms", "under 0.1%", None],
        ["tp, exposed", "20.0 ms", "50.0 ms", "+150%"],
        ["tp, overlapped", None, "10.0 ms", None],
    ]
