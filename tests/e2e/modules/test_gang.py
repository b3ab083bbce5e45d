"""What a page makes of a run over several hosts: whose stream is whose, and what crosses between them."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from planner.facts.layout import axis_group, members
from planner.facts.levels import level_of, levels
from planner.facts.spec import Layout
from tests.support.batches import batch, cell, traffic
from tests.support.browser import context_of
from tests.support.modules import STATIC, call


def test_members_of_a_gang_fold_into_one_page_each_with_its_own_position_and_gaps(modules: Page) -> None:
    body = """
    const s = m.createState();
    const [first, second] = x.slice(0, 2);
    m.foldBatch(s, '5-0', first, 0);
    m.foldBatch(s, '3-0', second, 1);
    const resumed = m.resumeFrom(s);
    m.expectGap(s, 1);
    m.foldBatch(s, '9-0', x[2], 1);
    m.foldBatch(s, '6-0', x[3], 0);
    const amounts = (rank) => [...(s.whole.rows.get(rank) ?? new Map()).values()].flat();
    const sum = (rank) => amounts(rank).reduce((all, amount) => all + (amount ?? 0), 0);
    const logs = [...s.logs].map(([key, log]) => [key, log.node, log.lines.map((line) => line.text)]);
    return [resumed, m.resumeFrom(s), sum(0), sum(2), s.ranks.get(2).cells.size, logs,
            s.members.get(1).host, s.members.get(1).clock.offset_s];
    """
    said = {"kind": "log", "rank": -1, "time": 0.0, "first": 0}
    batches = [
        {**batch(100, traffic(0, 100, cell(1, 1000)), {**said, "lines": ["of anna"]}), "host": "anna"},
        # A member that began earlier, and whose stream is read second.
        {**batch(40, traffic(2, 40, cell(1, 500)), {**said, "lines": ["of bert"]}), "host": "bert"},
        {**batch(60, traffic(2, 60, cell(3, 9500))), "host": "bert", "clock": {"offset_s": -300.0, "within_s": 0.001}},
        batch(101, traffic(0, 101, cell(2, 3000))),
    ]
    resumed, after, zero, two, cells, logs, host, offset = call(modules, "store.js", body, batches)
    assert (resumed, after) == ("0:5-0,1:3-0", "0:6-0,1:9-0")
    assert zero == 3000, "what one member lost touches no other's rates"
    assert two == 500, "what was sent in a gap is in the counters and in no rate"
    assert cells == 1
    assert logs == [[-1, 0, ["of anna"]], [-2, 1, ["of bert"]]]
    assert (host, offset) == ("bert", -300)


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2, "tp": 2},
        {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
        {"dp": 4, "ep": 2, "zero": 1},
        {"dp": 4, "dp_replicas": 2},
    ],
)
def test_which_axis_crosses_hosts_is_as_the_planner_lays_ranks(modules: Page, degrees: dict[str, int]) -> None:
    layout = Layout(**degrees)
    half = layout.world_size // 2
    gang = [{"node": node, "first_rank": node * half, "num_ranks": half} for node in (0, 1)]
    for axis in ("dp", "pp", "cp", "ep", "tp", "world"):
        group = axis_group(layout, axis)
        groups = {members(rank, group) for rank in range(layout.world_size)} if group.size > 1 else set()
        across = {ranks for ranks in groups if len({rank // half for rank in ranks}) > 1}
        body = """
        const { groups, across, ranks } = m.crossing(m.axisGroup(x[0], x[1]), x[2]);
        return [groups, across, [...ranks]];
        """
        told = call(modules, "job/hosts.js", body, [layout.model_dump(), axis, gang])
        assert told[:2] == [len(groups), len(across)]
        assert sorted(told[2]) == sorted(rank for ranks in across for rank in ranks)


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2, "tp": 2, "pp": 2},
        {"dp": 4, "tp": 2, "cp": 2, "dp_replicas": 2, "zero": 3},
        {"dp": 8, "dp_replicas": 4, "zero": 1},
        {"dp": 4, "ep": 2, "tp": 2},
    ],
)
def test_levels_of_axes_are_the_planners(modules: Page, degrees: dict[str, int]) -> None:
    layout = Layout(**degrees)
    told = call(modules, "job/hosts.js", "return m.levels(x);", layout.model_dump())
    known = [(level.axis, level.name, *level.group) for level in levels(layout)]
    assert [(one["axis"], one["level"], one["size"], one["stride"]) for one in told] == known
    rows: list[dict[str, Any]] = [
        {"axis": axis, "op": op, "group_size": size}
        for axis in ("dp", "tp", "world")
        for op in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (2, 4, 8)
    ]
    names = call(modules, "job/hosts.js", "return x[1].map(m.levelIn(x[0]));", [layout.model_dump(), rows])
    assert names == [level_of(layout, row["axis"], row["op"], row["group_size"]) for row in rows]


def test_bytes_across_hosts_are_told_apart_from_those_inside(modules: Page) -> None:
    gang = [{"node": 0, "first_rank": 0, "num_ranks": 2}, {"node": 1, "first_rank": 2, "num_ranks": 2}]
    lines = [{"rank": rank, "predicted": 10 + rank, "measured": 20 + rank} for rank in range(4)]
    compared = [{"axis": axis, "level": level, "ranks": lines} for axis, level in (("dp", ""), ("tp", ""))]
    body = "return m.crossingRows(x[0], x[1], x[2]);"
    rows = call(modules, "job/hosts.js", body, [{"dp": 2, "tp": 2}, gang, compared])
    both, none = {"predicted": 46, "measured": 86}, {"predicted": 0, "measured": 0}
    assert [(row["axis"], row["groupsAcross"], row["across"], row["inside"]) for row in rows] == [
        ("dp", 2, both, none),
        ("tp", 0, none, both),
        ("world", 1, none, none),
    ]


def test_hsdp_shards_inside_hosts_and_sums_between_them(modules: Page) -> None:
    layout = Layout(dp=4, zero=3, dp_replicas=2)
    gang = [{"node": 0, "first_rank": 0, "num_ranks": 2}, {"node": 1, "first_rank": 2, "num_ranks": 2}]
    ops = {"all_gather": 600, "reduce_scatter": 300, "all_reduce": 150}
    traffic = [{"axis": "dp", "op": op, "group_size": 2, "count": 1, "payload_bytes": b} for op, b in ops.items()]
    estimate = {
        "axes": {"pp": 1, "dp": 4, "cp": 1, "tp": 1},
        "stages": [{"traffic": traffic, "step_bytes": {"dp": 1050}}],
        "rank_bytes": {},
    }
    body = """
    const c = await import("/js/collectives.js");
    const cells = x[2].stages[0].traffic.map((row) => ({ ...row, payload_bytes: 5 * row.payload_bytes }));
    const ranks = new Map([0, 1, 2, 3].map((rank) => [rank, { exactStep: 5, exactCells: cells }]));
    return m.crossingRows(x[0], x[1], c.compareAxes(ranks, c.predictionOf(x[2]), m.levelIn(x[0])));
    """
    rows = call(modules, "job/hosts.js", body, [layout.model_dump(), gang, estimate])
    assert [(row["level"], row["groupsAcross"], row["across"], row["inside"]) for row in rows[:2]] == [
        ("shards", 0, {"predicted": 0, "measured": 0}, {"predicted": 18000, "measured": 18000}),
        ("replicas", 2, {"predicted": 3000, "measured": 3000}, {"predicted": 0, "measured": 0}),
    ]


def test_the_panel_of_a_gang_names_hosts_clocks_and_what_crosses(modules: Page) -> None:
    panel = (STATIC.parents[1] / "templates" / "jobs" / "panels" / "hosts.html").read_text()
    gang = [
        {"node": 0, "host": "anna", "first_rank": 0, "num_ranks": 2, "ended": None, "outcome": "", "reason": ""},
        {
            "node": 1,
            "host": "bert",
            "first_rank": 2,
            "num_ranks": 2,
            "ended": "x",
            "outcome": "lost",
            "reason": "its lease",
        },
    ]
    job = {"members": gang, "status": "running", "estimate": {"stages": [{}]}, "spec": {"layout": {"dp": 2, "tp": 2}}}
    lines = [{"rank": rank, "predicted": 500, "measured": 500} for rank in range(4)]
    told = [gang, {**job}, [{"axis": axis, "level": "", "ranks": lines} for axis in ("dp", "tp")], panel]
    body = """
    document.body.innerHTML = x[3];
    const panel = document.getElementById("hosts");
    const state = { members: new Map([[0, { clock: { offset_s: 300, within_s: 0.001 } }]]) };
    m.showHosts(panel, x[1], state, () => x[2]);
    const cells = (row) => [...row.children].map((one) => one.textContent);
    const rows = (id) => [...panel.querySelectorAll(`#${id} tr`)].map(cells);
    const shown = [panel.hidden, rows("host-rows"), rows("crossing-rows")];
    m.showHosts(panel, { ...x[1], estimate: {} }, state, () => x[2]);
    shown.push([panel.hidden, panel.querySelector("[data-crossing]")?.hidden, rows("crossing-rows")]);
    m.showHosts(panel, { ...x[1], members: x[0].slice(1) }, state, () => []);
    const alone = panel.hidden;
    const part = (silent) => ({ ...x[0][0], silent });
    m.showHosts(panel, { ...x[1], status: "unreachable", members: [part(true), part(false)] }, state, () => []);
    return [...shown, alone, rows("host-rows").map((row) => row[2])];
    """
    browser = modules.context.browser
    assert browser is not None
    page = context_of(browser).new_page()
    page.goto(modules.url.replace("/icon.svg", "/js/"))  # a list of files: an HTML page
    hidden, hosts, crossing, unforeseen, alone, parts = call(page, "job/hosts.js", body, told)
    page.close()
    assert (hidden, alone) == (False, True), "a run on one host has no such panel"
    assert parts == ["no contact", "running"], "of an unreachable job"
    assert unforeseen == [False, True, []], "where nothing was predicted no 0 B is told as a prediction"
    assert hosts == [
        ["anna", "0\u20131", "running", "\u2212300.00 s ±1.00 ms"],
        ["bert", "2\u20133", "lost: its lease", "not measured"],
    ]
    none, both = ["\u2013"] * 3, ["2,000 B", "2,000 B", "0 B"]
    assert crossing[0] == ["dp", "2 of 2", *both, *none]
    assert crossing[1] == ["tp", "0 of 2", *none, *both]


@pytest.mark.parametrize(
    ("clock", "text"),
    [
        (None, "not measured"),
        ({"offset_s": -300.0, "within_s": 0.0002}, "+300.00 s ±0.20 ms"),
        ({"offset_s": 0.012, "within_s": 0.001}, "\u221212.0 ms ±1.00 ms"),
    ],
)
def test_a_clock_is_told_with_how_well_it_is_known(modules: Page, clock: dict[str, float] | None, text: str) -> None:
    assert call(modules, "job/hosts.js", "return m.clockWords(x);", clock) == text
