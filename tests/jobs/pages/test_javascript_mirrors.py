"""JavaScript modules that repeat rules of Python, run by Node.js and compared with Python."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, get_args

import msgpack
import pytest

from contracts.telemetry.items import MAX_CHECKPOINTS, WARMUP_STEPS, Op
from jobs.runs.diagnosis.rank_reports import MEASURED_STEPS
from jobs.runs.history.queries.snapshot import get_snapshot
from jobs.runs.traces.trace_events import find_arrivals, get_arrival, serialize_trace
from jobs.runs.traces.traced_steps import combine_items
from jobs.templatetags.meshboard import ago
from planner.cost.estimate import estimate
from planner.cost.memory import PARTS
from planner.cost.traffic import build_traffic_matrix
from planner.facts.collectives import get_bus_factor
from planner.facts.layout import get_axis_group, get_coordinates, get_group_ranks, get_level_name, get_levels
from planner.facts.parse_spec import parse_spec
from planner.facts.spec import Layout
from tests.jobs.history import sample_telemetry as records
from tests.support.browser import STATIC
from tests.support.telemetry import build_late_rank_step, build_pipeline_step


def call_in_node(module: str, body: str, argument: object = None) -> Any:
    """Evaluate JavaScript in Node.js, with `m` for the module and `x` for the argument."""
    program = f"""
    await import("{STATIC.parents[1]}/tests/js/support/browser.js");
    const {{ readFileSync }} = await import("node:fs");
    const x = JSON.parse(readFileSync(0, "utf8"));
    const m = await import("/js/{module}");
    const result = await (async () => {{ {body} }})();
    process.stdout.write(JSON.stringify(result ?? null));
    """.replace('import("/js/', f'import("{STATIC}/js/').replace("import('/js/", f"import('{STATIC}/js/")
    argv = ["node", "--input-type=module", "--eval", program]
    ended = subprocess.run(argv, input=json.dumps(argument), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


MADE = """
const { stepOfItems } = await import('/js/timeline/step.js');
const byRank = (items) => new Map(items.map((item) => [item.rank, { item, node: 0 }]));
const made = (items) => stepOfItems(items[0].step, byRank(items), () => 0);
"""


def test_ages_have_the_same_words_in_templates_and_scripts() -> None:
    past = [0.4, 1, 59.9, 60, 65, 3599, 3600, 7443, 172_799, 172_800, 864_000]
    words = call_in_node("format.js", "return x.map((s) => m.ago(new Date(0), new Date(1e3 * s)))", past)
    assert words == [ago(seconds) for seconds in past]


def test_bus_factors_equal_those_of_the_planner() -> None:
    cases = [(op, size) for op in get_args(Op) for size in (1, 2, 3, 8, 1024)]
    page = call_in_node("collectives.js", "return x.map(([op, n]) => m.busFactor(op, n))", cases)
    assert page == pytest.approx([get_bus_factor(op, size) for op, size in cases])


def test_coordinates_of_ranks_equal_those_of_the_planner() -> None:
    layout = Layout(dp=3, pp=2, tp=4)
    axes = {"dp": 3, "pp": 2, "tp": 4}
    ranks = list(range(layout.world_size))
    page = call_in_node("collectives.js", "return x[0].map((r) => m.coordinates(r, x[1]))", [ranks, axes])
    assert page == [get_coordinates(rank, layout)._asdict() for rank in ranks]


def test_vendored_decoder_reads_msgpack_of_python() -> None:
    value = {"id": "1-0", "n": [0, -1, 2**40, 1.5, None, True], "text": "ü\u0000x", "big": 2**53 - 1}
    raw = list(msgpack.packb(value))
    assert call_in_node("../vendor/msgpack/decode.mjs", "return m.decode(new Uint8Array(x))", raw) == value


def test_memory_parts_add_up_to_the_total() -> None:
    memory = {name: 2**20 * number for number, name in enumerate([*PARTS, "allowance", "thought of later"], 1)}
    stage = {"memory": memory, "memory_bytes": sum(memory.values())}
    estimate = {"stages": [stage], "cluster": {"reserved_bytes": 2**20}}
    run = {"device": "cuda", "measured": None, "apart": {"planned": None, "measured": None}, "least": 0}
    state = "const s = (await import('/js/store.js')).createState();"
    body = f"{state} return m.plannedLines(x[0], s, [], x[1]).map((line) => [line.name, line.planned])"
    (name, together), *parts = call_in_node("job/planned.js", body, [estimate, run])
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
    names = call_in_node("pictures/memory.js", "return m.memoryNames([x])", memory)
    assert [labels.get(name, name) for name in names] == [name for name, _ in parts]


def test_fills_in_every_field_of_the_best_layout() -> None:
    layout = Layout(dp=8, zero=2).model_dump()
    filled = call_in_node("plan/best.js", "return m.filled(x)", {"layout": layout, "micro_batches": 4})
    assert filled == {f"layout.{name}": value for name, value in layout.items()} | {"train.micro_batches": 4}


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2, "tp": 2},
        {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
        {"dp": 4, "ep": 2, "zero": 1},
        {"dp": 4, "dp_replicas": 2},
    ],
)
def test_axes_that_cross_hosts_equal_those_of_the_planner(degrees: dict[str, int]) -> None:
    layout = Layout(**degrees)
    half = layout.world_size // 2
    gang = [{"node": node, "first_rank": node * half, "num_ranks": half} for node in (0, 1)]
    for axis in ("dp", "pp", "cp", "ep", "tp", "world"):
        group = get_axis_group(layout, axis)
        groups = {get_group_ranks(rank, group) for rank in range(layout.world_size)} if group.size > 1 else set()
        across = {ranks for ranks in groups if len({rank // half for rank in ranks}) > 1}
        body = """
        const { groups, across, ranks } = m.crossing(m.axisGroup(x[0], x[1]), x[2]);
        return [groups, across, [...ranks]];
        """
        found = call_in_node("job/hosts.js", body, [layout.model_dump(), axis, gang])
        assert found[:2] == [len(groups), len(across)]
        assert sorted(found[2]) == sorted(rank for ranks in across for rank in ranks)


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2, "tp": 2, "pp": 2},
        {"dp": 4, "tp": 2, "cp": 2, "dp_replicas": 2, "zero": 3},
        {"dp": 8, "dp_replicas": 4, "zero": 1},
        {"dp": 4, "ep": 2, "tp": 2},
    ],
)
def test_levels_of_axes_equal_those_of_the_planner(degrees: dict[str, int]) -> None:
    layout = Layout(**degrees)
    found = call_in_node("job/hosts.js", "return m.levels(x);", layout.model_dump())
    known = [(level.axis, level.name, *level.group) for level in get_levels(layout)]
    assert [(one["axis"], one["level"], one["size"], one["stride"]) for one in found] == known
    rows: list[dict[str, Any]] = [
        {"axis": axis, "op": op, "group_size": size}
        for axis in ("dp", "tp", "world")
        for op in ("all_reduce", "all_gather", "reduce_scatter")
        for size in (2, 4, 8)
    ]
    names = call_in_node("job/hosts.js", "return x[1].map(m.levelIn(x[0]));", [layout.model_dump(), rows])
    assert names == [get_level_name(layout, row["axis"], row["op"], row["group_size"]) for row in rows]


@pytest.mark.parametrize(
    ("layout", "train"),
    [
        ({"dp": 2, "tp": 2, "zero": 1}, {}),
        ({"dp": 4, "zero": 3, "dp_replicas": 2}, {}),
        ({"pp": 4, "dp": 2}, {"micro_batches": 4}),
        ({"pp": 2, "schedule": "zbv", "virtual_stages": 2}, {"micro_batches": 4}),
        ({"pp": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}, {"micro_batches": 4}),
        ({"cp": 2, "dp": 2}, {}),
    ],
)
def test_predicted_bytes_of_rank_pairs_equal_those_of_the_planner(
    layout: dict[str, Any], train: dict[str, Any]
) -> None:
    data = {"model": {"preset": "gpt-tiny"}, "layout": layout, "train": {"global_batch": 16, **train}}
    spec = parse_spec(data)
    plan = estimate(spec)
    wanted = build_traffic_matrix(spec)
    assert wanted is not None
    body = "const s = m.predicted(x[0], x[1], () => true); return [...s.bytes];"
    found = call_in_node("heat/spread.js", body, [plan, spec.layout.model_dump()])
    world = spec.layout.world_size
    rows = [found[rank * world : (rank + 1) * world] for rank in range(world)]
    assert [[round(value) for value in row] for row in rows] == [pytest.approx(row, abs=64) for row in wanted]
    assert sum(map(sum, wanted)) > 0


def test_measured_bytes_spread_over_the_neighbors_in_the_axis() -> None:
    spec = parse_spec({"model": {"preset": "gpt-tiny"}, "layout": {"dp": 2, "tp": 2}})
    cells = [
        {"axis": axis, "op": "all_reduce", "group_size": 2, "algorithmic_bytes": size}
        for axis, size in (("dp", 300), ("tp", 70))
    ]
    body = """
    const ranks = new Map([0, 1, 2, 3].map((rank) => [rank, { exactStep: 10, exactCells: x[2] }]));
    const s = m.measured(ranks, x[1], 4, m.strides(x[0], x[1]), (axis) => !x[3] || axis === x[3]);
    return [...s.bytes];
    """
    argument = [estimate(spec), spec.layout.model_dump(), cells]
    both = call_in_node("heat/spread.js", body, [*argument, ""])
    assert both == [0, 7, 30, 0, 7, 0, 0, 30, 30, 0, 0, 7, 0, 30, 7, 0]
    assert call_in_node("heat/spread.js", body, [*argument, "tp"])[:4] == [0, 7, 0, 0]


@pytest.mark.parametrize(
    "items", [build_late_rank_step(), build_pipeline_step(2, 2, 2)], ids=["two ranks", "a pipeline"]
)
def test_page_and_download_attribute_waiting_to_the_same_rank(items: list[Any]) -> None:
    body = MADE + "return [...made(x).ranks].flatMap(([rank, own]) => own.calls.map((c) => [rank, c.last, c.whole]));"
    shown = call_in_node("timeline/step.js", body, items)
    found = combine_items((item, 0.0) for item in items)
    arrivals = find_arrivals(found.calls)
    wanted = []
    for one in found.calls:
        arrival = get_arrival(one, arrivals)
        assert arrival is not None
        wanted.append([one.rank, arrival.rank, round(arrival.time - found.began, 5)])
    assert sorted([rank, last, round(whole, 5)] for rank, last, whole in shown) == sorted(wanted)


def test_step_of_history_tables_equals_step_of_live_items() -> None:
    items = build_pipeline_step(2, 1, 2)
    tables = serialize_trace(combine_items((one, 0.0) for one in items))
    body = (
        MADE
        + """
    const plain = (step) => [...step.ranks].map(([rank, own]) => [rank, own.calls.length, own.spans.length,
      own.calls.map((c) => [step.groups[c.group].axis, c.op, c.sequence, +c.from.toFixed(6), +c.to.toFixed(6), c.last])
        .sort()]);
    return [plain(made(x[0])), plain(m.stepOfTables(8, x[1].calls.columns, x[1].spans.columns))];
    """
    )
    live, stored = call_in_node("timeline/step.js", body, [items, tables])
    assert live == stored
    assert len(live) == 4


def test_state_restored_from_history_continues_like_a_live_state(tmp_path: Path, settings: Any) -> None:
    settings.HISTORY_DIR = tmp_path
    gauge = {"kind": "gauge", "rank": -1, "time": records.BEGAN + 3, "cpu": 2.5}
    lines = {"kind": "log", "rank": 1, "time": records.BEGAN + 3, "first": 0, "lines": ["one", "two"]}
    saved = {"kind": "checkpoint", "rank": 0, "time": records.BEGAN + 3, "step": 6, "name": "job/1/step-00000006"}
    saved |= {"num_bytes": 5, "stall_s": 0.1, "save_s": 0.2, "problem": ""}
    evaluation = {"kind": "eval", "rank": 0, "time": records.BEGAN + 3, "step": 6, "loss": 4.5}
    standing = {
        "kind": "standing",
        "rank": 1,
        "time": records.BEGAN + 3,
        "step": 6,
        "phase": "step",
        "still": 2.0,
        "stack": [],
    }
    group = {"group": {"axis": "dp", "ranks": [0, 1], "nth": 0}, "issued": 5, "ended": 4, "op": "all_reduce"}
    standing |= {"stack": [], "groups": [{**group, "since": records.BEGAN, "payload_bytes": 8}]}
    batches = list(records.generate_run(2, 12))
    batches.insert(6, records.batch(3.1, gauge, lines, saved, evaluation, standing))
    records.record_batches(tmp_path, batches[:8])
    body = """
    const history = await import('/js/fold/history.js');
    const feed = (s, from) => x.batches.slice(from).forEach((b, i) => m.foldBatch(s, `${from + i + 1}-0`, b));
    const live = m.createState(), resumed = m.createState();
    feed(live, 0);
    history.foldHistory(resumed, x.answer);
    const begins = m.resumeFrom(resumed);
    feed(resumed, 8);
    const seen = (s) => ({
      cells: [...s.ranks].map(([rank, r]) => [rank, [...r.cells].sort(), r.exactStep, r.exactCells, r.phase]),
      bytes: [...s.whole.rows].map(([rank, keys]) => [rank, [...keys].map(([key, row]) =>
        [key, row.reduce((sum, v) => sum + (v ?? 0), 0)]).sort()]),
      progress: s.progress.step, follows: m.resumeFrom(s), checkpoints: [...s.checkpoints.keys()],
      marks: [...s.marks.keys()].sort(), steps: [...s.steps].map(([step, point]) => [step, point.loss, point.time]),
      standing: [...s.standing.keys()], places: [...s.places], steps_s: s.stepTimes,
      logs: [...s.logs].map(([key, log]) => [key, log.lines, log.next]), host: s.members.get(0).host,
    });
    return [begins, seen(live), seen(resumed), resumed.evals.get(6).loss, resumed.gauges.get(-1).cpu,
      resumed.ranks.get(0).parts[0].exposed];
    """
    argument = {"batches": batches, "answer": get_snapshot("job", 1)}
    begins, live, resumed, *others = call_in_node("store.js", body, argument)
    assert begins == "0:8-0"
    assert resumed == live
    assert others == [4.5, [2.5], {"dp": 0.1}]


def test_breakdown_covers_the_steps_that_a_diagnosis_measures() -> None:
    body = """
    const s = m.createState();
    m.foldBatch(s, '1-0', x);
    return (await import('/js/job/parts.js')).measuredParts(s.ranks);
    """
    parts = {"data": 0.0, "optimizer": 0.0, "exposed": {}, "hidden": {}}
    step = {"kind": "step", "rank": 0, "time": 1.0, "steps": 999, "tokens": 64, "loss": 2.0, "grad_norm": 1.0}
    step |= {"learning_rate": 0.1, "cells": [], "parts": parts}

    def measured(last: int) -> Any:
        items = [
            {**step, "step": at, "ran": at, "step_s": 9 if at <= WARMUP_STEPS else at} for at in range(1, last + 1)
        ]
        return call_in_node("store.js", body, {"v": 1, "job": "j", "attempt": 1, "time": 1.0, "items": items})

    assert measured(WARMUP_STEPS) is None
    assert measured(WARMUP_STEPS + 2)["step_s"] == WARMUP_STEPS + 1.5
    long = measured(MEASURED_STEPS + 100)
    assert (long["steps"], long["step_s"]) == (MEASURED_STEPS, 100 + (MEASURED_STEPS + 1) / 2)


def test_page_and_server_store_the_same_number_of_checkpoints() -> None:
    body = """
    const s = (await import("/js/store.js")).createState();
    for (const item of x) m.foldCheckpoint(s, item);
    return [...s.checkpoints.keys()];
    """
    item = {"kind": "checkpoint", "rank": 0, "time": 1.0, "num_bytes": 100, "stall_s": 0.1, "save_s": 0.2}
    items = [{**item, "step": step, "name": f"step-{step}"} for step in range(1, MAX_CHECKPOINTS + 11)]
    assert call_in_node("fold/steps.js", body, items) == list(range(11, MAX_CHECKPOINTS + 11))
