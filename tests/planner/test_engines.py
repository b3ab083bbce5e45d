"""Engine settings of a spec: no value can become an option, a file or a shell command."""

from __future__ import annotations

from typing import Any

import pytest

from planner.facts.parse_spec import parse_spec
from planner.facts.validation import SpecError

BASE: dict[str, Any] = {"model": {"preset": "gpt-tiny"}, "layout": {"dp": 4}}


def get_problems(resources: dict[str, Any], **more: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as error:
        parse_spec({**BASE, **more, "resources": resources})
    return {problem.field: problem.message for problem in error.value.problems}


def build_resources(**slurm: Any) -> dict[str, Any]:
    return {"engine": "slurm", "slurm": slurm}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("partition", "--wrap=id"),
        ("partition", "a b"),
        ("partition", "a,"),
        ("account", "-x"),
        ("account", "$(id)"),
        ("qos", "a;b"),
        ("qos", "a\n--wrap=id"),
        ("time_limit", "5"),
        ("time_limit", "1:60:00"),
        ("constraint", "a&&b"),
        ("constraint", "a|`id`"),
        ("exclude", "/etc/passwd"),
        ("exclude", "./nodes"),
        ("exclude", "node1 node2"),
    ],
)
def test_invalid_name_is_rejected_at_its_field(field: str, value: str) -> None:
    (told,) = get_problems(build_resources(**{field: value})).items()
    assert told[0] == f"resources.slurm.{field}"
    assert ". Use " in told[1]


@pytest.mark.parametrize(
    "slurm",
    [
        {"partition": "gpu,gpu-long", "account": "team_1", "qos": "high.2", "time_limit": "2-00:00:00", "nodes": 2},
        {"constraint": "a100&nvlink|h100", "exclude": "node[3-5],node9", "time_limit": "12:00:00", "cpus_per_rank": 8},
    ],
)
def test_accepts_the_formats_of_slurm(slurm: dict[str, Any]) -> None:
    spec = parse_spec({**BASE, "resources": build_resources(**slurm)}, slots=1)
    assert spec.resources.slurm is not None
    assert spec.resources.slurm.model_dump(exclude_defaults=True) == slurm


def test_ranks_not_divisible_by_nodes_are_reported_with_arithmetic() -> None:
    told = get_problems(build_resources(nodes=3))
    text = "`resources.slurm.nodes` is 3, but 4 slots are not divisible by 3. Use 1, 2 or 4."
    assert told == {"resources.slurm.nodes": text}


def test_engine_rejects_settings_of_other_engines() -> None:
    text = "`resources.slurm` is set, but `resources.engine` is hosts. Omit it, or use engine slurm."
    assert get_problems({"slurm": {}}) == {"resources.slurm": text}
    assert list(get_problems({"engine": "slurm", "host": "here"})) == ["resources.host"]
    assert list(get_problems({"engine": "slurm"}, kind="lab")) == ["resources.engine"]


def test_slurm_rejects_settings_of_board_hosts() -> None:
    own = {"host": "here", "pool": "a100", "labels": ["ib"], "max_hosts": 1}
    told = get_problems({"engine": "slurm", **own}, run={"preemptible": True})
    assert sorted(told) == [*(f"resources.{name}" for name in sorted(own)), "run.preemptible"]
    text = "`resources.labels` is ib, but Slurm has no labels. Use `resources.slurm.constraint`."
    assert told["resources.labels"] == text


@pytest.mark.parametrize("limit", ["0:00:00", "0-00:00:00"])
def test_time_limit_of_zero_is_rejected_because_slurm_reads_it_as_unlimited(limit: str) -> None:
    words = f"`resources.slurm.time_limit` is {limit}. Use a time above zero."
    assert get_problems(build_resources(time_limit=limit)) == {"resources.slurm.time_limit": words}
