"""The job page's time and memory, planned and measured: what is too small or too early to be compared."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

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

    assert off(2**28 - 1, "cpu") == "too small"
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
