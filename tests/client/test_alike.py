"""Only runs of one spec can be averaged: rejected runs and excluded runs."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from meshboard.errors import WrongError
from meshboard.gate import check_same_spec

SPEC = {
    "name": "a",
    "model": {"preset": "x", "num_layers": 2, "moe": None},
    "layout": {"tp": 2, "dp": 1},
    "train": {"steps": 10, "seed": 1},
    "resources": {"device": "cpu", "host": None},
}


def test_accepts_runs_with_other_names_seeds_and_hosts() -> None:
    other = {
        **SPEC,
        "name": "b",
        "project": "p",
        "train": {**SPEC["train"], "seed": 2, "lately": True},  # type: ignore[dict-item]
        "resources": {"device": "cpu", "host": "h"},
    }
    check_same_spec([{"id": "j", "spec": SPEC}, {"id": "k", "spec": other}, {"id": "old"}])


def test_rejects_runs_of_different_specs() -> None:
    other = {**SPEC, "model": {**SPEC["model"], "moe": {"num_experts": 2}}, "layout": {"tp": 1, "dp": 2}}  # type: ignore[dict-item]
    with pytest.raises(
        WrongError, match=r"Jobs j and k have .*: model.moe: None and .*, layout.tp: 2 and 1, layout.dp"
    ):
        check_same_spec([{"id": "j", "spec": SPEC}, {"id": "i", "spec": SPEC}, {"id": "k", "spec": other}])


def test_gate_rejects_runs_of_different_specs(meshboard: Any, server: Any) -> None:
    ended = {"status": "succeeded", "finished": True, "name": "n", "exit": {"summary": {}}}
    server.respond_at("jobs/j", {**ended, "id": "j", "spec": SPEC})
    server.respond_at("jobs/k", {**ended, "id": "k", "spec": {**SPEC, "layout": {"tp": 1}}})
    ran = meshboard("gate", "j", "k", "--max", "loss=9", at=server)
    assert (ran.code, "layout.tp: 2 and 1" in ran.err) == (2, True)


FACTS = {"steps": 9, "step_s": 2.0, "tokens_per_s": 1.0, "peak_bytes": 1, "losses": [], "sent": [], "apart": None}


def branch(spec: Any, **more: Any) -> dict[str, Any]:
    run = {"job": "newest", "name": "n", "by": "ann", "at": "2026-11-26T00:00:00+00:00"}
    return {"project": "default", "branch": "main", "spec": spec, "runs": [{**run, "facts": FACTS}], **more}


def test_names_excluded_runs_of_a_baseline(meshboard: Any, server: Any, tmp_path: Any) -> None:
    exited = {"summary": {"steps": 9, "measured": {"steps": 7, "step_s": 2.0}}}
    server.respond_at("jobs/j", {"id": "j", "status": "succeeded", "finished": True, "name": "ci", "exit": exited})
    aside = [{"job": job, "name": "n", "by": "ann", "at": "", "why": "layout.tp 1, not 2"} for job in ("a", "b")]
    server.respond_at("projects/default/baselines/main", branch(SPEC, left_aside=aside))
    xml, markdown = tmp_path / "gate.xml", tmp_path / "gate.md"
    requested = ("gate", "j", "--baseline", "main", "--max", "step_time=+1%")
    ran = meshboard(*requested, "--junit", str(xml), "--markdown", str(markdown), at=server)
    words = "Baseline main excludes 2 of 3 runs: layout.tp 1, not 2 (a, b)"
    assert (ran.code, ran.out.splitlines()[-1]) == (0, words)
    assert markdown.read_text().splitlines()[-1] == ElementTree.parse(xml).findtext(".//system-out") == words
    content = json.loads(meshboard(*requested, "--json", at=server).out)
    assert [(one["baseline"], one["job"], one["why"]) for one in content["left_aside"]] == [
        ("main", job, "layout.tp 1, not 2") for job in ("a", "b")
    ]
    assert meshboard("baseline", "show", "main", at=server).out.splitlines()[-1] == words


def test_rejects_baselines_of_different_specs(meshboard: Any, server: Any, tmp_path: Any) -> None:
    """All runs of a comparison need the same spec."""
    server.respond_at(
        "jobs/j", {"id": "j", "status": "succeeded", "finished": True, "name": "ci", "exit": {"summary": {}}}
    )
    server.respond_at("projects/default/baselines/main", branch(SPEC))
    file = tmp_path / "kept.json"
    for spec, words in (({**SPEC, "layout": {"tp": 1}}, "layout.tp: 2 and 1"), (None, "has no stored spec")):
        file.write_text(json.dumps(branch(spec)))
        ran = meshboard("gate", "j", "--baseline", "main", "--baseline", str(file), "--max", "loss=9", at=server)
        assert (ran.code, words in ran.err) == (2, True), ran.err
