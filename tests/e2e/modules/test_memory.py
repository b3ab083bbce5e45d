"""The job page's memory, plan and measurement side by side."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

from tests.support.modules import call

MIB = 2**20
COUNTED = {"parameters": 100 * MIB, "gradients": 100 * MIB, "optimizer": 200 * MIB, "copies": 0}


def memory_lines(modules: Page, parts: dict[str, Any] | None, **stage: Any) -> dict[str, list[str | None]]:
    """Planned, measured and its error by name, on a pipe whose stage 0 the plan has fullest and whose rank 1 was."""
    counted = {"parameters": 100 * MIB, "gradients": 100 * MIB, "optimizer": 200 * MIB}
    memory = {**counted, "activations": 80 * MIB, "buffers": 20 * MIB, "allowance": 10 * MIB}
    told = {"stage": 1, "memory": memory, "memory_bytes": 510 * MIB, "gradients_bytes": 100 * MIB, **stage}
    stages = [{"stage": 0, "memory": memory, "memory_bytes": 520 * MIB}, told]
    estimate = {"stages": stages, "axes": {"pp": 2, "dp": 1, "tp": 1}, "cluster": {"reserved_bytes": 10 * MIB}}
    body = """
    const s = (await import('/js/store.js')).createState();
    s.peaks.set(0, 300 * 2 ** 20); s.peaks.set(1, 550 * 2 ** 20);
    if (x[1]) s.memory.set(1, x[1]);
    const lines = m.memoryLines(x[0], s, {device: "cuda", least: 0});
    return lines.map((line) => [line.name, line.planned, line.measured, line.off]);
    """
    return {name: figures for name, *figures in call(modules, "job/memory.js", body, [estimate, parts])}


REST = "other (activations, temporary tensors, buffers)"
REST_WITH_GRADIENTS = "other (activations, temporary tensors, buffers, gradients)"


def test_memory_is_told_part_by_part_beside_the_plan_of_the_rank_s_own_stage(modules: Page) -> None:
    parts = {**COUNTED, "optimizer": 160 * MIB, "gradients_then": 100 * MIB, "beside": 125 * MIB}
    assert memory_lines(modules, parts) == {
        "total": ["500 MiB", "550 MiB", "+10%"],
        "stage 0 (most planned memory)": ["510 MiB", "300 MiB", "\u221241%"],
        "parameters": ["100 MiB", "100 MiB", "0%"],
        "optimizer state": ["200 MiB", "160 MiB", "\u221220%"],
        "gradients": ["100 MiB", "100 MiB", "0%"],
        REST: ["100 MiB", "125 MiB", "+25%"],
        "other: activations": ["80.0 MiB", None, None],
        "other: communication buffers": ["20.0 MiB", None, None],
    }


def test_gradients_that_nobody_can_tell_apart_are_held_against_the_plan_with_the_rest(modules: Page) -> None:
    told = memory_lines(modules, {**COUNTED, "gradients_then": None, "beside": 200 * MIB})
    assert told["gradients after backward"] == ["100 MiB", "100 MiB", "0%"]
    assert told[REST_WITH_GRADIENTS] == ["200 MiB", "200 MiB", "0%"]
    assert told["other: gradients"] == ["100 MiB", None, None]
    told = memory_lines(modules, {**COUNTED, "gradients_then": 50 * MIB, "beside": 150 * MIB})
    assert told[REST_WITH_GRADIENTS] == ["200 MiB", "200 MiB", "0%"], "the plan's may be on their way"
    told = memory_lines(modules, {**COUNTED, "gradients_then": 125 * MIB, "beside": None})
    assert told["gradients at the peak"] == ["100 MiB", "125 MiB", "+25%"]
    assert told[REST] == ["100 MiB", None, None]


def test_what_an_older_host_or_plan_did_not_tell_is_not_made_up(modules: Page) -> None:
    _, elsewhere, *others = memory_lines(modules, None).values()
    assert elsewhere[1] == "300 MiB"
    assert {(measured, off) for _, measured, off in others} == {(None, None)}
    told = memory_lines(modules, {**COUNTED, "gradients_then": 0, "beside": 0}, gradients_bytes=None)
    assert told["gradients after backward"] == [None, "100 MiB", None]


def test_a_dry_run_is_held_against_tensors_alone_and_an_older_host_s_told_no_part(modules: Page) -> None:
    memory = {"parameters": 100 * MIB, "gradients": 100 * MIB, "optimizer": 200 * MIB, "logits": 80 * MIB}
    stage = {"stage": 1, "memory": {**memory, "allowance": 30 * MIB}, "memory_bytes": 510 * MIB}
    stages = [{**stage, "stage": 0, "memory_bytes": 1}, {**stage, "gradients_bytes": 100 * MIB}]
    estimate = {"stages": stages, "axes": {"pp": 2, "dp": 2, "tp": 1}}
    item = {"rank": 3, "peak_bytes": 280 * MIB, "optimizer_bytes": 200 * MIB}
    body = "return m.dryLines(...x).map((line) => [line.group, line.name, line.planned, line.measured, line.off])"
    parts = {**COUNTED, "gradients_then": 100 * MIB, "beside": 80 * MIB}
    assert call(modules, "job/memory.js", body, [estimate, {**item, "memory": parts}]) == [
        ["rank 3, stage 1", "total", "480 MiB", "480 MiB", "0%"],
        ["rank 3, stage 1", "parameters", "100 MiB", "100 MiB", "0%"],
        ["rank 3, stage 1", "optimizer state", "200 MiB", "200 MiB", "0%"],
        ["rank 3, stage 1", "gradients", "100 MiB", "100 MiB", "0%"],
        ["rank 3, stage 1", "other (activations, temporary tensors, buffers)", "80.0 MiB", "80.0 MiB", "0%"],
        ["rank 3, stage 1", "other: logits", "80.0 MiB", None, None],
    ]
    together, *others = call(modules, "job/memory.js", body, [estimate, item])
    assert together[3:] == ["480 MiB", "0%"]
    assert {(measured, off) for *_, measured, off in others} == {(None, None)}


def test_of_many_ranks_the_fullest_are_drawn_and_how_many_are_not(modules: Page) -> None:
    body = """
    const s = (await import('/js/store.js')).createState();
    const fold = (await import('/js/fold/gauges.js')).foldGauge;
    for (const item of x) fold(s, {kind: 'gauge', ...item}, 0);
    const told = m.memoryLines('resident_bytes', s.gauges, null, [0, 20]);
    const cpu = m.gaugeLines({of: 'ranks', fields: {resident_bytes: 'in use'}}, s.gauges, new Map());
    return [told.lines.map((line) => line.label), told.left, cpu.lines.length, cpu.left];
    """
    told = [{"rank": rank, "time": 1 + at, "resident_bytes": 100 + rank} for rank in range(64) for at in range(2)]
    told.append({"rank": 5, "time": 4, "resident_bytes": 900})  # once
    labels, left, lines, also = call(modules, "charts/gauges.js", body, told)
    assert labels == [f"rank {rank}" for rank in (5, *range(49, 64))]
    assert (left, lines, also) == (48, 16, 48)


def test_memory_of_ranks_has_the_plan_beside_it_over_the_whole_range(modules: Page) -> None:
    body = """
    const s = (await import('/js/store.js')).createState();
    const fold = (await import('/js/fold/gauges.js')).foldGauge;
    for (const item of x) fold(s, {kind: 'gauge', ...item}, 0);
    return [m.memoryFields(s.gauges), m.memoryLines('resident_bytes', s.gauges, 500, [0, 20]), [...s.gauges.keys()]];
    """
    told = [
        {"rank": 0, "time": 1, "resident_bytes": 100},
        {"rank": 1, "time": 2, "resident_bytes": 200},
        {"rank": -1, "time": 2, "cpu": 1.5, "resident_bytes": 9999},
        {"rank": 0, "time": 3, "resident_bytes": 120},
    ]
    fields, lines, keys = call(modules, "charts/gauges.js", body, told)
    assert fields == ["resident_bytes"]
    assert [line["label"] for line in lines["lines"]] == ["rank 0", "rank 1", "plan"]
    assert lines["columns"][0] == [0, 1, 2, 3, 20]
    assert lines["columns"][3] == [500, None, None, None, 500]
    assert keys == [0, 1, -1]
