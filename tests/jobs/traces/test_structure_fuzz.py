"""Replace each value of valid trace files by values of other types. Each import gives a trace or a clear error."""

from __future__ import annotations

import copy
import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from jobs.runs.traces.export import write_chrome, write_perfetto
from jobs.runs.traces.imports.common import ImportProblemError
from jobs.runs.traces.trace_events import serialize_trace
from tests.jobs.traces.kineto_builder import (
    NCCL,
    build_event,
    build_launch,
    build_step,
    collective_args,
    read_files,
)
from tests.support.structures import list_paths, replace
from tests.support.traces import build_collective, build_header, build_metadata

WRONG: list[Any] = [
    *(None, True, 0, -1, 2**63, 10**30, 1e300, 0.5, "", "x", "7", "\ud800", "a\x00b", [], [1], [[]], {}, {"a": {}}),
    *([None, "0"], {"ranks": 5}, "[0, 99999999]", "[1, 1]"),
]


def build_kineto() -> Any:
    args = {"External id": 4, "correlation": 3}
    p2p = collective_args(**{"Collective name": "send", "Seq": 1})
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [0, 1]}]
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": 10**18,
        "distributedInfo": {"rank": 0, "world_size": 2, "pg_config": groups},
        "traceEvents": [
            build_step(1, 0, 100),
            build_launch(3, 10),
            build_event("cpu_op", "record_param_comms", 5, 60, lane=9, **args, **collective_args(Seq=31)),
            build_event("user_annotation", "gloo:all_reduce", 5, 60, lane=9),
            build_event("kernel", NCCL, 100, 10, **args, **collective_args(Seq=31)),
            build_event("kernel", NCCL, 200, 10, **args, **p2p),
            build_event("kernel", "gemm", 100, 10, **args),
            build_event("gpu_user_annotation", "ProfilerStep#1", 100, 10, **args),
            build_event("gpu_memcpy", "Memcpy HtoD", 1, 10, **args),
        ],
    }


def build_dump() -> Any:
    entry = {
        "profiling_name": "nccl:send 0->1",
        "collective_seq_id": 1,
        "p2p_seq_id": 1,
        "is_p2p": True,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "input_sizes": [[3, 4]],
        "input_dtypes": ["Float"],
        "time_created_ns": 5,
        "time_discovered_started_ns": 6,
        "time_discovered_completed_ns": 7,
    }
    return {
        "version": "2.10",
        "pg_config": {"0": {"desc": "d", "ranks": "[0, 1]"}},
        "entries": [entry, copy.deepcopy(entry)],
    }


def build_log_line() -> Any:
    collective = build_collective(1, 0, 9)
    return {"header": build_header(0), "metadata": build_metadata(0), "coll_perf": collective}


def check_import(path: Path) -> None:
    """Import a file, and serialize and export its trace. Only an error for the user is accepted."""
    try:
        found = read_files(path)
    except ImportProblemError:
        return
    json.dumps(serialize_trace(found.trace), allow_nan=False).encode()
    write_chrome(found.trace, "x")
    write_perfetto(found.trace, "x")
    for note in found.notes:
        assert "\x00" not in note
        note.encode()


FORMATS = {"kineto": (build_kineto, "k0.json"), "dump": (build_dump, "r0.json"), "log": (build_log_line, "i.log")}


def list_changes(name: str) -> list[tuple[tuple[Any, ...], Any]]:
    return [(place, wrong) for place in list_paths(FORMATS[name][0]()) for wrong in WRONG]


def check_changes(path: Path, name: str, changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    build, file_name = FORMATS[name]
    for place, wrong in changes:
        (path / file_name).write_text(json.dumps(replace(build(), place, wrong)))
        check_import(path / file_name)


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_types_give_a_trace_or_a_clear_error(tmp_path: Path, name: str) -> None:
    check_changes(tmp_path, name, random.Random(51).sample(list_changes(name), 200))


@pytest.mark.extended
@pytest.mark.parametrize("name", FORMATS)
def test_each_wrong_type_gives_a_trace_or_a_clear_error(tmp_path: Path, name: str) -> None:
    check_changes(tmp_path, name, list_changes(name))


@pytest.mark.parametrize("seed", range(3))
def test_several_wrong_values_give_a_trace_or_a_clear_error(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        build, file_name = FORMATS[draw.choice([*FORMATS])]
        value = build()
        for _ in range(draw.randint(2, 4)):
            value = replace(value, draw.choice([*list_paths(value)]), draw.choice(WRONG))
        path = tmp_path / file_name
        path.write_text(json.dumps(value))
        check_import(path)


def test_wrong_types_in_pickles_give_a_trace_or_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "fr_rank_0"
    valid = build_dump()
    pickled = [*WRONG, (1, (2,)), {(1, 2): 3}, {None: 1}, float("nan"), float("inf")]
    changes = [(place, wrong) for place in list_paths(valid) for wrong in pickled]
    for place, wrong in random.Random(51).sample(changes, 200):
        path.write_bytes(pickle.dumps(replace(valid, place, wrong), 2))
        check_import(path)


def test_zero_ranks_in_a_communicator_are_refused(tmp_path: Path) -> None:
    """The import failed with HTTP 500."""
    path = tmp_path / "i.log"
    path.write_text(json.dumps({**build_log_line(), "header": {**build_header(0), "n_ranks": 0}}))
    with pytest.raises(ImportProblemError, match=r"`n_ranks` is 0"):
        read_files(path)


@pytest.mark.parametrize("category", [[], {}, [[]], 5, None, {"a": 1}])
def test_category_of_any_type_is_accepted(tmp_path: Path, category: Any) -> None:
    path = tmp_path / "k0.json"
    events = [{**build_event("kernel", NCCL, 1, 1), "cat": category}, build_event("kernel", NCCL, 5, 1)]
    path.write_text(json.dumps({"traceEvents": events}))
    assert len(read_files(path).trace.calls) == 1
