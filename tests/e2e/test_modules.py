"""The pages' pure modules, run where they run: in Chromium, imported as the pages import them."""

from __future__ import annotations

import hashlib
import re
import zlib
from typing import Any

import msgpack
import pytest
from playwright.sync_api import Page

from contracts.telemetry import Op
from planner.facts.collectives import bus_factor
from planner.facts.layout import axis_group, coordinates, members
from planner.facts.levels import level_of, levels
from planner.facts.spec import Layout
from tests.support.modules import STATIC, call

OPS = Op.__args__  # type: ignore[attr-defined]  # typing gives Literal no public attributes


def cell(count: int, payload: int, **other: Any) -> dict[str, Any]:
    base = {"phase": "step", "op": "all_reduce", "axis": "dp", "group_size": 2, "busy_s": 0.01 * count}
    return {**base, "count": count, "completed": count, "payload_bytes": payload, "algorithmic_bytes": payload, **other}


def traffic(rank: int, time: float, *cells: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "traffic", "rank": rank, "time": time, "cells": list(cells), "dropped": 0}


def batch(time: float, *items: dict[str, Any]) -> dict[str, Any]:
    return {"v": 1, "job": "j", "attempt": 1, "time": time, "items": list(items)}


FOLD = """
const s = m.createState();
x.forEach((b, i) => b === 'gap' ? m.expectGap(s) : m.foldBatch(s, `${i}-0`, b));
const bytes = (bins) => [...bins.rows.values()].flatMap((keys) => [...keys.values()]).flat()
  .reduce((sum, v) => sum + (v ?? 0), 0);
"""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1048575, "1.00 MiB"),
        (3 * 2**40, "3.00 TiB"),
    ],
)
def test_bytes_are_in_powers_of_1024(modules: Page, value: int, text: str) -> None:
    assert call(modules, "format.js", "return m.bytes(x)", value) == text


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("m.byteRate(1.25e9)", "1.25 GB/s"),
        ("m.byteRate(null)", "\u2013"),
        ("m.exactBytes(614727680)", "614,727,680 B"),
        ("m.difference(0)", "0 B"),
        ("m.difference(-12)", "\u221212 B"),
        ("m.difference(4096)", "+4,096 B"),
        ("m.duration(0.0000021)", "2.10 µs"),
        ("m.duration(59.99)", "60.0 s"),
        ("m.duration(185)", "3 min 05 s"),
        ("m.duration(7440)", "2 h 04 min"),
        ("m.count(124439808)", "124M"),
        ("m.count(999999)", "1.00M"),
        ("m.loss(5.54321)", "5.5432"),
        ("m.loss(248861.4531)", "2.49e+5"),
        ("m.loss(-3.4e38)", "-3.40e+38"),
        ("m.ratio(5, 5)", "1.0000"),
        ("m.ratio(1, 0)", "∞"),
    ],
)
def test_numbers_carry_their_units(modules: Page, expression: str, text: str) -> None:
    assert call(modules, "format.js", f"return {expression}") == text


def test_the_page_and_the_planner_use_the_same_bus_factors(modules: Page) -> None:
    cases = [(op, size) for op in OPS for size in (1, 2, 3, 8, 1024)]
    page = call(modules, "collectives.js", "return x.map(([op, n]) => m.busFactor(op, n))", cases)
    assert page == pytest.approx([bus_factor(op, size) for op, size in cases])


def test_the_page_and_the_planner_place_ranks_alike(modules: Page) -> None:
    layout = Layout(dp=3, pp=2, tp=4)
    axes = {"dp": 3, "pp": 2, "tp": 4}
    ranks = list(range(layout.world_size))
    page = call(modules, "collectives.js", "return x[0].map((r) => m.coordinates(r, x[1]))", [ranks, axes])
    assert page == [coordinates(rank, layout)._asdict() for rank in ranks]


def test_a_page_is_delayed_until_every_stream_is_read_again_or_its_socket_is_new(modules: Page) -> None:
    told = [{"node": 0, "stale": True}, {"node": 1, "stale": True}, {"node": 0, "stale": False}]
    told += [{"node": 1, "entries": []}, {"node": 1, "stale": True}]
    body = """
    const sockets = [];
    class Socket extends EventTarget { constructor() { super(); sockets.push(this); } }
    [globalThis.WebSocket, globalThis.own] = [Socket, globalThis.WebSocket];
    const seen = [];
    m.connect("/ws/", { resume: () => ({}), onJob() {}, onGap() {}, onBatch() {}, onState: (name) => seen.push(name) });
    sockets[0].dispatchEvent(new Event("open"));
    const told = async (count) => { while (seen.length < count) await new Promise((then) => setTimeout(then)); };
    for (const raw of x) sockets[0].dispatchEvent(new MessageEvent("message", { data: new Uint8Array(raw) }));
    await told(7);
    sockets[0].dispatchEvent(new CloseEvent("close", { code: 1013 }));
    dispatchEvent(new Event("online"));
    sockets[1].dispatchEvent(new Event("open"));
    sockets[1].dispatchEvent(new MessageEvent("message", { data: new Uint8Array(x[3]) }));
    await told(10);
    globalThis.WebSocket = globalThis.own;
    return seen;
    """
    frames = [msgpack.packb(one) for one in told]
    frames[2] = msgpack.packb({"deflated": zlib.compress(frames[2])})
    seen = call(modules, "socket.js", body, [list(frame) for frame in frames])
    assert seen == ["connecting", "live", *["delayed"] * 3, "live", "delayed", "reconnecting", "live", "live"]


def test_the_vendored_decoder_reads_what_python_packs(modules: Page) -> None:
    value = {"id": "1-0", "n": [0, -1, 2**40, 1.5, None, True], "text": "ü\u0000x", "big": 2**53 - 1}
    raw = list(msgpack.packb(value))
    assert call(modules, "../vendor/msgpack/decode.mjs", "return m.decode(new Uint8Array(x))", raw) == value


def test_the_graph_holds_every_byte_the_counters_tell(modules: Page) -> None:
    batches = [batch(100 + i / 5, traffic(0, 100 + i / 5, cell(i, 1000 * i))) for i in range(1, 11)]
    recent, whole = call(modules, "store.js", FOLD + "return [bytes(s.recent), bytes(s.whole)]", batches)
    assert (recent, whole) == (10_000, 10_000)


def test_an_older_snapshot_that_arrives_late_changes_nothing(modules: Page) -> None:
    batches = [batch(100, traffic(0, 100, cell(5, 5000))), batch(101, traffic(0, 101, cell(4, 4000)))]
    assert call(modules, "store.js", FOLD + "return bytes(s.whole)", batches) == 5000


def test_a_gap_is_a_break_in_the_graph_and_no_spike(modules: Page) -> None:
    batches = [
        batch(100, traffic(0, 100, cell(1, 1000))),
        "gap",
        batch(110, traffic(0, 110, cell(90, 90_000))),
        batch(111, traffic(0, 111, cell(91, 91_000))),
    ]
    body = (
        FOLD + "return [bytes(s.whole), s.whole.rate(0, () => true), s.ranks.get(0).cells.values().next().value.count]"
    )
    graphed, rates, count = call(modules, "store.js", body, batches)
    assert graphed == 1000 + 1000  # what came during the gap belongs to no bin
    assert None in rates
    assert count == 91  # the total is the rank's own and stays exact


def test_history_trimmed_before_the_first_frame_gives_no_spike_either(modules: Page) -> None:
    batches = ["gap", batch(110, traffic(0, 110, cell(90, 90_000))), batch(111, traffic(0, 111, cell(91, 91_000)))]
    assert call(modules, "store.js", FOLD + "return bytes(s.whole)", batches) == 1000


def test_a_whole_run_keeps_its_bytes_when_bins_are_merged(modules: Page) -> None:
    body = """
    const b = new m.Bins(0.5, 8, 'whole');
    for (let i = 0; i < 100; i += 1) b.add(0, 'dp/all_reduce', 3.5 + i / 4, 10);
    const row = b.rows.get(0).get('dp/all_reduce');
    return [row.reduce((sum, v) => sum + (v ?? 0), 0), b.length <= 8, b.times()[0] <= 3.5, b.width];
    """
    assert call(modules, "rates.js", body) == [1000, True, True, 4]


def test_the_last_minute_lets_the_oldest_go(modules: Page) -> None:
    body = """
    const b = new m.Bins(0.5, 4, 'recent');
    for (let i = 0; i < 10; i += 1) b.add(0, 'k', 100 + i / 2, 5);
    return [b.length, b.times(), b.rate(0, () => true)];
    """
    assert call(modules, "rates.js", body) == [4, [103, 103.5, 104, 104.5], [10, 10, 10, 10]]


def test_predicted_and_measured_meet_per_axis_and_rank(modules: Page) -> None:
    stage = {"traffic": [{"axis": "dp", "count": 3}, {"axis": "dp", "count": 1}], "step_bytes": {"dp": 400}}
    axes = {"pp": 1, "dp": 1, "cp": 2, "tp": 1}
    estimate = {"axes": axes, "stages": [stage], "rank_bytes": {"1": {"dp": 300}}}
    body = """
    const ranks = new Map(x.ranks.map(([r, step, bytes, more]) => [r, {
      exactStep: step, exactCells: [{axis: 'dp', payload_bytes: bytes, count: 4 * step}, ...more] }]));
    return m.compareAxes(ranks, m.predictionOf(x.estimate));
    """
    extra = [{"axis": "tp", "payload_bytes": 7, "count": 1}]
    rows = call(
        modules, "collectives.js", body, {"estimate": estimate, "ranks": [(0, 5, 2000, []), (1, 4, 1201, extra)]}
    )
    assert [(r["axis"], r["predicted"], r["measured"]) for r in rows] == [("dp", 3200, 3201), ("tp", 0, 7)]
    assert [(r["predictedCalls"], r["measuredCalls"]) for r in rows] == [(36, 36), (0, 1)]
    assert rows[0]["ranks"][1] == {
        "rank": 1,
        "predicted": 1200,
        "measured": 1201,
        "predictedCalls": 16,
        "measuredCalls": 16,
    }


def test_bandwidths_follow_nccl_tests(modules: Page) -> None:
    cells = [[cell(10, 8_000_000, group_size=4)], [cell(10, 8_000_000, group_size=4)]]
    (row,) = call(modules, "collectives.js", "return m.collectiveRows(x)", cells)
    assert (row["count"], row["payload_bytes"]) == (20, 16_000_000)
    assert row["mean_s"] == pytest.approx(0.01)
    assert row["algbw"] == pytest.approx(80e6)
    assert row["busbw"] == pytest.approx(80e6 * 2 * 3 / 4)


def test_a_log_resumes_without_doubles_and_says_what_it_skipped(modules: Page) -> None:
    def log(first: int, *lines: str) -> dict[str, Any]:
        return {"kind": "log", "rank": 0, "time": 1, "first": first, "lines": list(lines)}

    batches = [batch(1, log(0, "a", "b")), batch(2, log(1, "b", "c")), batch(3, log(5, "f"))]
    lines = call(modules, "store.js", FOLD + "return s.logs.get(0).lines", batches)
    assert [line.get("text", line.get("skipped")) for line in lines] == ["a", "b", "c", 2, "f"]
    assert [line["number"] for line in lines if "text" in line] == [0, 1, 2, 5]


def test_escape_sequences_never_reach_the_page(modules: Page) -> None:
    text = "\x1b[32mgreen\x1b[0m \x1b]0;title\x07\x1b(Bplain\ttab\x00\x08"
    assert call(modules, "joblog.js", "return m.plain(x)", text) == "green plain     tab"


def test_a_summary_stands_in_until_the_stream_replays(modules: Page) -> None:
    summary = {
        "steps": 3,
        "tokens_per_s": 10.0,
        "losses": [{"step": 1, "loss": 5.0, "time": 1}],
        "eval_losses": [],
        "cells": {"0": [cell(3, 3000)]},
        "verdict": {},
    }
    body = """
    const s = m.createState(); m.foldSummary(s, x[0]);
    const before = s.ranks.get(0).exactCells[0].payload_bytes;
    m.foldBatch(s, '1-0', x[1]);
    return [before, s.steps.get(1).loss, [...s.ranks.get(0).cells.values()][0].payload_bytes, s.fromSummary];
    """
    answer = call(modules, "store.js", body, [summary, batch(1, traffic(0, 1, cell(1, 1000)))])
    assert answer == [3000, 5.0, 1000, False]


def test_telemetry_of_another_version_or_attempt_is_refused(modules: Page) -> None:
    body = """
    const s = m.createState(); m.foldBatch(s, '1-0', x);
    const other = m.foldBatch(s, '2-0', {...x, attempt: 2});
    let error = ''; try { m.foldBatch(s, '3-0', {...x, v: 2}); } catch (e) { error = e.message; }
    return [other, m.resumeFrom(s), error];
    """
    other, last_id, error = call(modules, "store.js", body, batch(1))
    assert other is False
    assert last_id == "0:1-0"
    assert "version 2" in error


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
        told = call(modules, "hostsofrun.js", body, [layout.model_dump(), axis, gang])
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
    told = call(modules, "hostsofrun.js", "return m.levels(x);", layout.model_dump())
    known = [(level.axis, level.name, *level.group) for level in levels(layout)]
    assert [(one["axis"], one["level"], one["size"], one["stride"]) for one in told] == known
    rows: list[dict[str, Any]] = [
        {"axis": axis, "op": op, "group_size": size}
        for axis in ("dp", "tp", "world")
        for op in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (2, 4, 8)
    ]
    names = call(modules, "hostsofrun.js", "return x[1].map(m.levelIn(x[0]));", [layout.model_dump(), rows])
    assert names == [level_of(layout, row["axis"], row["op"], row["group_size"]) for row in rows]


def test_bytes_across_hosts_are_told_apart_from_those_inside(modules: Page) -> None:
    gang = [{"node": 0, "first_rank": 0, "num_ranks": 2}, {"node": 1, "first_rank": 2, "num_ranks": 2}]
    lines = [{"rank": rank, "predicted": 10 + rank, "measured": 20 + rank} for rank in range(4)]
    compared = [{"axis": axis, "level": level, "ranks": lines} for axis, level in (("dp", ""), ("tp", ""))]
    body = "return m.crossingRows(x[0], x[1], x[2]);"
    rows = call(modules, "hostsofrun.js", body, [{"dp": 2, "tp": 2}, gang, compared])
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
    rows = call(modules, "hostsofrun.js", body, [layout.model_dump(), gang, estimate])
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
    job = {"members": gang, "status": "running", "estimate": {}, "spec": {"layout": {"dp": 2, "tp": 2}}}
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
    m.showHosts(panel, { ...x[1], members: x[0].slice(1) }, state, () => []);
    return [...shown, panel.hidden];
    """
    browser = modules.context.browser
    assert browser is not None
    page = browser.new_page()
    page.goto(modules.url.replace("/icon.svg", "/js/"))  # a list of files: an HTML page
    hidden, hosts, crossing, alone = call(page, "hostsofrun.js", body, told)
    page.close()
    assert (hidden, alone) == (False, True), "a run on one host has no such panel"
    assert hosts == [
        ["anna", "0\u20131", "running", "\u2212300.00 s ± 1.00 ms"],
        ["bert", "2\u20133", "lost: its lease", "not measured"],
    ]
    none, both = ["\u2013"] * 3, ["2,000 B", "2,000 B", "0 B"]
    assert crossing[0] == ["dp", "2 of 2", *both, *none]
    assert crossing[1] == ["tp", "0 of 2", *none, *both]


@pytest.mark.parametrize(
    ("clock", "text"),
    [
        (None, "not measured"),
        ({"offset_s": -300.0, "within_s": 0.0002}, "+300.00 s ± 0.20 ms"),
        ({"offset_s": 0.012, "within_s": 0.001}, "\u221212.0 ms ± 1.00 ms"),
    ],
)
def test_a_clock_is_told_with_how_well_it_is_known(modules: Page, clock: dict[str, float] | None, text: str) -> None:
    assert call(modules, "hostsofrun.js", "return m.clockWords(x);", clock) == text


def test_vendored_files_are_the_published_ones() -> None:
    vendor = STATIC / "vendor"
    listed = dict(re.findall(r"^\| `([^`]+)` \| `([0-9a-f]{64})` \|$", (vendor / "README.md").read_text(), re.M))
    found = {
        str(path.relative_to(vendor)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in vendor.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    assert found == listed


def test_no_template_or_script_needs_what_the_security_policy_forbids() -> None:
    for template in (STATIC.parents[1] / "templates").rglob("*.html"):
        text = template.read_text()
        assert not re.search(r"\sstyle=|<style|\son[a-z]+=|javascript:", text), template
        assert not re.search(r"<script(?![^>]*\bsrc=)", text), template
    for script in (STATIC / "js").rglob("*.js"):
        assert not re.search(
            r"innerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script.read_text()
        ), script


@pytest.mark.parametrize(
    ("gradient", "limit", "precision", "words"),
    [
        (6e-7, 1e-5, "fp32", "gradients equal to one process to 6e-7"),
        (0.059, 0.1, "bf16", "gradients within bf16's limit of 0.1 (0.059)"),
        (0.26, 0.1, "bf16", "gradients within bf16's limits (0.26)"),
        (0.02, 0.1, "fp32", "gradients within their limit of 0.1 (0.02)"),
    ],
)
def test_what_is_beside_one_process_is_called_equal_only_where_rounding_alone_is_between(
    modules: Page, gradient: float, limit: float, precision: str, words: str
) -> None:
    figures = {"steps": 1, "tensors": 60, "update": 2e-4, "loss": 2e-7, "norm": 7e-7, "seconds": 0.3}
    one = {"state": "equal", "why": "the loss ran away", "gradient": gradient, "limit": limit, **figures}
    told = call(modules, "proof.js", "return m.processProof({one_process: x[0]}, true, x[1])", [one, precision])
    assert (told["tone"], told["words"]) == ("good", words)
    assert told["more"].endswith("over 1 step; took 300 ms. the loss ran away")


def planned(modules: Page, tensors: int, device: str, measured: dict[str, Any] | None) -> list[dict[str, Any]]:
    memory = {"parameters": tensors, "allowance": 400 * 2**20}
    stage = {"memory": memory, "memory_bytes": tensors + 400 * 2**20}
    time = {"step_s": 0.02, "parts": []}
    estimate = {"stages": [stage], "cluster": {"reserved_bytes": 310 * 2**20}, "time": time}
    run = {"device": device, "measured": measured, "least": 2**28}
    state = "const s = (await import('/js/store.js')).createState(); s.peaks.set(0, 2**29);"
    state += "s.stepTimes = [0.5, 0.04, 0.04];"
    lines = "return m.plannedLines(x[0], s, [], x[1])"
    return list(call(modules, "planned.js", state + lines, [estimate, run]))


def test_a_small_rank_s_memory_is_not_held_against_what_libraries_take(modules: Page) -> None:
    def off(tensors: int, device: str) -> str:
        return str(next(line["off"] for line in planned(modules, tensors, device, None) if "memory" in line["group"]))

    assert off(2**28 - 1, "cpu") == "too small to compare: libraries' own buffers outweigh it"
    assert off(2**28, "cpu").endswith(" %")
    assert off(2**20, "cuda").endswith(" %")
    groups = {line["group"] for line in planned(modules, 2**20, "cpu", None)}
    assert "memory of the fullest rank: tensors and the allocator's share, without the process' own 310 MiB" in groups


def test_a_step_s_time_is_the_summary_s_once_there_is_one(modules: Page) -> None:
    def together(measured: dict[str, Any] | None) -> Any:
        return next(
            line["measured"] for line in planned(modules, 1, "cpu", measured) if line["group"] == "time of a step"
        )

    assert (together(None), together({"steps": 9, "step_s": 0.03})) == ("40.0 ms", "30.0 ms")
