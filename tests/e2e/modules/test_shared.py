"""The pages' pure modules, run where they run: in Chromium, imported as the pages import them."""

from __future__ import annotations

import zlib
from typing import Any

import msgpack
import pytest
from playwright.sync_api import Page

from contracts.telemetry.words import Op
from jobs.templatetags.meshboard import ago
from planner.cost.memory import PARTS
from planner.facts.collectives import bus_factor
from planner.facts.layout import coordinates
from planner.facts.spec import Layout
from tests.support.batches import batch, cell, traffic
from tests.support.modules import call

OPS = Op.__args__  # type: ignore[attr-defined]  # typing gives Literal no public attributes


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
        ("m.duration(172799)", "47 h 59 min"),
        ("m.duration(1998720)", "23 d 3 h"),
        ("m.count(124439808)", "124M"),
        ("m.count(999999)", "1.00M"),
        ("m.operations(679477248)", "679 MFLOP"),
        ("m.loss(5.54321)", "5.5432"),
        ("m.loss(248861.4531)", "2.49e+5"),
        ("m.loss(-3.4e38)", "-3.40e+38"),
        ("m.duration(0.9997)", "1.00 s"),
        ("m.duration(0.0009997)", "1.00 ms"),
        ("m.duration(9.999)", "10.0 s"),
        ("m.bytes(9.996 * 1024)", "10.0 KiB"),
        ("m.count(812.3356171284)", "812.3"),
        ("m.count(999)", "999"),
        ("m.count(0)", "0"),
        ("m.operations(12.34567)", "12.35 FLOP"),
        ("m.ratio(5, 5)", "1.0000"),
        ("m.ratio(123456789012, 123456789013)", "< 1"),
        ("m.ratio(123456789013, 123456789012)", "> 1"),
        ("m.ratio(1, 0)", "∞"),
    ],
)
def test_numbers_carry_their_units(modules: Page, expression: str, text: str) -> None:
    assert call(modules, "format.js", f"return {expression}") == text


def test_the_page_and_its_script_tell_alike_how_long_ago_it_was(modules: Page) -> None:
    past = [0.4, 1, 59.9, 60, 65, 3599, 3600, 7443, 172_799, 172_800, 864_000]
    told = call(modules, "format.js", "return x.map((s) => m.ago(new Date(0), new Date(1e3 * s)))", past)
    assert told == [ago(seconds) for seconds in past]


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
    sockets[0].dispatchEvent(new MessageEvent("message", { data: new Uint8Array(x[3]) })); // not taken before it closes
    sockets[0].dispatchEvent(new CloseEvent("close", { code: 1013 }));
    await new Promise((then) => setTimeout(then, 50));
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


def test_a_batch_from_before_the_first_merges_bins_once(modules: Page) -> None:
    body = """
    const b = new m.Bins(0.5, 8, 'whole');
    for (let i = 0; i < 8; i += 1) b.add(0, 'k', 100 + i / 2, 10);
    b.add(0, 'k', 98, 10);
    return [b.width, b.times()[0], b.rows.get(0).get('k').reduce((sum, v) => sum + (v ?? 0), 0)];
    """
    assert call(modules, "rates.js", body) == [1, 98, 90]


def test_a_legend_tells_no_number_where_none_was(modules: Page) -> None:
    """Its neighbour's: a loss of 1.9 at a step whose loss was not finite."""
    body = """
    const chart = {data: [[1, 2, 3, 4, 5], [2.1, 1.9, null, null, undefined]]};
    return [0, 1, 2, 3, 4].map((index) => m.nearestKnown(chart, 1, index));
    """
    assert call(modules, "charts/plot.js", body) == [0, 1, 2, 3, 3]


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


def test_an_estimate_says_how_far_off_it_may_be_either_way(modules: Page) -> None:
    assert [call(modules, "format.js", "return m.sureness(x)", share) for share in (0.19, 1, 2.3, 9)] == [
        "±19%",
        "±100%",
        "within a factor of 3.3",
        "within a factor of 10",
    ]
    body = "return m.within({step_s: 0.1, interval: {share: x}})"
    assert call(modules, "pictures/time.js", body, 0.5) == "50.0 ms to 150 ms"
    assert call(modules, "pictures/time.js", body, 4) == "20.0 ms to 500 ms"


def test_the_peak_that_a_share_is_of_has_its_unit_apart_and_days_their_commas(modules: Page) -> None:
    time = {"step_s": 0.5, "model_flops": 1e10, "mfu": 0.2, "hfu": 0.2, "tokens_per_s": 2050, "parts": []}
    time |= {"interval": {"share": 0.79, "basis": "runs", "words": "from 5 runs here"}, "basis": "data sheet"}
    estimate = {"time": time, "world_size": 2, "cluster": {"name": "vm"}}
    body = "return m.timePicture(x).map((part) => part.textContent).join(' ')"
    told = call(modules, "pictures/time.js", body, estimate)
    assert "MFU and HFU are relative to a peak of 50.0 GFLOP/s per rank." in told
    assert "5,646 days" in told
    assert "The step time range covers nine of ten runs on a host with the same load." in told
    tiny = call(modules, "pictures/time.js", body, {**estimate, "model_parameters": 10**6})
    assert "MFU is relative to a peak of 50.0 GFLOP/s per rank." in tiny
    assert "HFU" not in tiny
    assert "tokens 5" not in tiny


def test_the_parts_of_the_memory_add_up_to_what_they_are_together(modules: Page) -> None:
    memory = {name: 2**20 * number for number, name in enumerate([*PARTS, "allowance", "thought of later"], 1)}
    stage = {"memory": memory, "memory_bytes": sum(memory.values())}
    estimate = {"stages": [stage], "cluster": {"reserved_bytes": 2**20}}
    run = {"device": "cuda", "measured": None, "apart": {"planned": None, "measured": None}, "least": 0}
    state = "const s = (await import('/js/store.js')).createState();"
    body = f"{state} return m.plannedLines(x[0], s, [], x[1]).map((line) => [line.name, line.planned])"
    (name, together), *parts = call(modules, "job/planned.js", body, [estimate, run])
    labels = {
        "optimizer": "optimizer state",
        "copies": "checkpoint copies",
        "gathered": "gathered parameters",
        "working": "temporary tensors",
        "buffers": "communication buffers",
        "allowance": "allocator reserve",
    }
    assert (name, {name for name, _ in parts}) == ("total", {labels.get(name, name) for name in memory})
    assert sum(float(size.removesuffix(" MiB")) for _, size in parts) == float(together.removesuffix(" MiB"))
    names = call(modules, "pictures/memory.js", "return m.memoryNames([x])", memory)
    assert [labels.get(name, name) for name in names] == [name for name, _ in parts]


def test_a_plan_s_headline_and_its_panel_leave_the_same_memory_free(modules: Page) -> None:
    stage = {"stage": 0, "memory": {"parameters": 330 * 2**20}, "memory_bytes": 330 * 2**20, "step_bytes": {}}
    cluster = {"memory_bytes": 8 * 2**30, "accelerator": "CPU"}
    time = {"step_s": 1, "interval": {"share": 0.1}, "tokens_per_s": 1}
    estimate = {"stages": [stage], "cluster": cluster, "fits": True, "peak_memory_bytes": 330 * 2**20, "time": time}
    estimate["memory_interval"] = {"share": 0.1, "words": "counted"}
    body = """
    const { headline } = await import('/js/plan/headline.js');
    return [headline(x).fits.text, m.memoryPicture(x)[0].textContent, m.memoryPicture(x).at(-1).textContent];
    """
    head, panel, note = call(modules, "pictures/memory.js", body, estimate)
    assert (head, panel.endswith("fits, 95% free")) == ("±10%, fits 8.00 GiB, 95% free", True)
    assert note == "Range of the predicted memory on the rank with the most memory: 297 MiB to 363 MiB, counted."
    tight = {**estimate, "cluster": {**cluster, "memory_bytes": 350 * 2**20}, "tight": True}
    head, panel, _ = call(modules, "pictures/memory.js", body, tight)
    assert head == "±10%, fits 350 MiB, 5% free (less than the margin of error)"
    assert panel.endswith("fits, 5% free (less than the margin of error)")


@pytest.mark.parametrize(("stack", "runnable"), [(None, True), ("ours", True), ("megatron", False)])
def test_the_best_layout_is_searched_among_what_runs_only_where_something_does(
    modules: Page, stack: str | None, runnable: bool
) -> None:
    """Of other software nothing runs here: asked for what runs, the search once found no layout."""
    spec = {"layout": {"dp": 4}, "train": {"micro_batches": 2}, "resources": {"stack": stack} if stack else {}}
    asked = call(modules, "plan/best.js", "return m.query(x, '')", spec)
    assert (asked["runnable"], asked["ranks"], asked["spec"]["resources"]) == (runnable, 4, spec["resources"])


def test_all_of_the_best_layout_is_filled_in(modules: Page) -> None:
    """HSDP replicas stayed as they stood: what was told to fit did not in the form."""
    layout = Layout(dp=8, zero=2).model_dump()
    filled = call(modules, "plan/best.js", "return m.filled(x)", {"layout": layout, "micro_batches": 4})
    assert filled == {f"layout.{name}": value for name, value in layout.items()} | {"train.micro_batches": 4}


def test_a_time_that_follows_another_of_its_day_is_told_by_its_clock_alone(modules: Page) -> None:
    body = "return x.map(([a, b]) => m.timeAfter(new Date(a), new Date(b)))"
    pairs = [
        ["2026-11-22T03:04:09Z", "2026-11-22T13:05:00Z"],
        ["2026-11-22T23:59:59Z", "2026-11-23T00:00:00Z"],
        ["2025-11-22T03:04:09Z", "2026-11-22T03:04:09Z"],
    ]
    assert call(modules, "format.js", body, pairs) == [
        "13:05:00",
        "23 Nov 2026 00:00:00 UTC",
        "22 Nov 2026 03:04:09 UTC",
    ]


def test_a_log_resumes_without_doubles_and_says_what_it_skipped(modules: Page) -> None:
    def log(first: int, *lines: str) -> dict[str, Any]:
        return {"kind": "log", "rank": 0, "time": 1, "first": first, "lines": list(lines)}

    batches = [batch(1, log(0, "a", "b")), batch(2, log(1, "b", "c")), batch(3, log(5, "f"))]
    lines = call(modules, "store.js", FOLD + "return s.logs.get(0).lines", batches)
    assert [line.get("text", line.get("skipped")) for line in lines] == ["a", "b", "c", 2, "f"]
    assert [line["number"] for line in lines if "text" in line] == [0, 1, 2, 5]


def test_escape_sequences_never_reach_the_page(modules: Page) -> None:
    text = "\x1b[32mgreen\x1b[0m \x1b]0;title\x07\x1b(Bplain\ttab\x00\x08"
    assert call(modules, "logs/ansi.js", "return m.plain(x)", text) == "green plain     tab"


def test_what_would_turn_a_line_round_is_shown_as_it_is_written(modules: Page) -> None:
    turned, shown = "deli\u202eaf \u0645\u200f", "deli\\u202eaf \u0645\u200f"
    assert call(modules, "logs/ansi.js", "return m.plain(x)", turned) == shown
    coloured = call(
        modules, "logs/ansi.js", "return m.segments(x).map((one) => one.text).join('')", f"\x1b[31m{turned}"
    )
    assert coloured == shown
    assert call(modules, "dom.js", "return m.el('p', {}, x, m.el('b', {}, x)).textContent", turned) == shown * 2


def test_a_search_that_may_match_nothing_comes_to_an_end(modules: Page) -> None:
    body = """
    const worker = new Worker('/js/logs/finder.js');
    worker.postMessage({id: 1, source: 'b|', flags: 'gu', texts: ['\\u{1F600}b']});
    const hits = new Promise((told) => worker.onmessage = ({ data }) => told(data.hits));
    const late = new Promise((told) => setTimeout(told, 5000, 'goes on'));
    const found = await Promise.race([hits, late]);
    worker.terminate();
    return found;
    """
    assert call(modules, "rates.js", body) == [[0, [[2, 3]]]]
