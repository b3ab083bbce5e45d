"""Faults in flight recorder dumps, with the findings of torch's analyzer and of Meshboard.

`python -m tests.jobs.traces.flight_recorder_cases` prints the table.
"""

from __future__ import annotations

import argparse
import copy
import io
import logging
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jobs.runs.diagnosis.findings import RunFinding
from jobs.runs.traces.imports.common import ImportProblemError
from jobs.runs.traces.imports.reader import ImportResult, read_traces
from jobs.runs.traces.imports.trace_files import TraceFile
from tests.support.ranks import run_ranks

WORLD = 4
Dump = dict[str, Any]
Dumps = dict[int, Dump]
GROUPS = {"0": ("default_pg", [0, 1, 2, 3]), "1": ("mesh_dp", [0, 1]), "2": ("mesh_dp", [2, 3])}
NUMBERED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "coalesced")


class Call(NamedTuple):
    """Describe one entry of a dump."""

    op: str
    size: int = 64
    output: int | None = None  # elements, by default those of a correct call
    dtype: str = "Float"
    state: str = "completed"
    group: str = "0"
    line: int = 10
    sequence: int = 0  # by default the next of the group


class Case(NamedTuple):
    """A fault. `words`: in Meshboard's first finding. `notes`: words in a note of the import."""

    name: str
    dumps: Dumps
    words: tuple[str, ...]
    notes: tuple[str, ...] = ()


def make_dump(rank: int, calls: Iterable[Call], version: str = "2.10", first_record: int = 0) -> Dump:
    """Return a dump with the fields of NCCL's recorder."""
    numbers: dict[tuple[str, bool], int] = {}
    entries = []
    for index, call in enumerate(calls):
        kind = call.op.split(" ")[0]
        is_p2p = kind in ("send", "recv")
        key = (call.group, is_p2p)
        numbers[key] = call.sequence or numbers.get(key, 0) + 1
        description, ranks = GROUPS[call.group]
        factor = {"all_gather": len(ranks)}.get(kind, 1)
        divisor = {"reduce_scatter": len(ranks)}.get(kind, 1)
        output = call.size * factor // divisor if call.output is None else call.output
        began = 1_700_000_000_000_000_000 + (first_record + index) * 1_000_000 + rank * 1000
        frames = [{"name": "all_reduce", "filename": "/opt/lib/python3.11/c10d.py", "line": 3000}]
        frames.append({"name": "train_step", "filename": "/home/user/train.py", "line": call.line})
        has_tensors = call.op not in ("coalesced",)
        entries.append(
            {
                "record_id": first_record + index,
                "pg_id": int(call.group),
                "process_group": (call.group, description),
                "collective_seq_id": 0 if is_p2p else numbers[key],
                "p2p_seq_id": numbers[key] if is_p2p else 0,
                "op_id": index + 1,
                "profiling_name": f"nccl:{call.op}",
                "time_created_ns": began,
                "duration_ms": None,
                "input_sizes": [[call.size]] if has_tensors else [],
                "input_dtypes": [call.dtype] if has_tensors else [],
                "output_sizes": [[output]] if has_tensors else [],
                "output_dtypes": [call.dtype] if has_tensors else [],
                "state": call.state,
                "time_discovered_started_ns": None if call.state == "scheduled" else began + 1000,
                "time_discovered_completed_ns": began + 5000 if call.state == "completed" else None,
                "retired": call.state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": is_p2p,
                "frames": frames,
            }
        )
    own = {name: group for name, group in GROUPS.items() if rank in group[1]}
    config = {name: {"name": name, "desc": desc, "ranks": str(ranks)} for name, (desc, ranks) in own.items()}
    return {"version": version, "pg_config": config, "pg_status": {}, "entries": entries}


def make_dumps(make_calls: Callable[[int], list[Call]], ranks: Iterable[int] = range(WORLD), **options: Any) -> Dumps:
    return {rank: make_dump(rank, make_calls(rank), **options) for rank in ranks}


DONE = [Call("all_reduce"), Call("broadcast", 8)]
LAST = Call("all_reduce", state="started", line=30)


def _vary(rank: int, usual: list[Call], other: list[Call]) -> Callable[[int], list[Call]]:
    """Return the calls of ranks, of which one rank differs."""
    return lambda one: [*DONE, *(other if one == rank else usual)]


def make_cases() -> list[Case]:
    """Return the constructed cases."""
    dtype, size = LAST._replace(dtype="BFloat16", line=40), LAST._replace(size=65, line=40)
    gather, scatter = Call("all_gather", 16, state="started"), Call("reduce_scatter", 64, state="started")
    bad_split = Call("all_to_all", 64, 60, state="started")
    split = Call("all_to_all", 64, state="started")
    dp = {rank: Call("all_reduce", group="1" if rank < 2 else "2", state="started") for rank in range(WORLD)}
    send, recv = (Call(op, group="1", state="started") for op in ("send 0->1", "recv 1<-0"))
    messages = {0: [send], 1: [recv._replace(size=63)]}
    coalesced = [Call("all_reduce", 4, sequence=3), Call("all_reduce", 8, sequence=3), Call("coalesced", sequence=3)]
    other = [coalesced[0], coalesced[1]._replace(size=9), coalesced[2]]
    dropped = make_dumps(lambda rank: [Call("all_reduce", sequence=9), *([LAST._replace(sequence=10)] if rank else [])])
    for rank, dump in dropped.items():
        for number, entry in enumerate(dump["entries"]):
            entry["record_id"] = 8 + number + (rank == 3)
    healthy = make_dumps(lambda rank: DONE)
    versions = make_dumps(_vary(2, [LAST], []))
    versions[1]["version"] = "2.4"
    old = make_dumps(_vary(2, [LAST], []), version="1.0")
    stalled = "ranks 0, 1 and 3 wait for rank 2, which did not enter all_reduce 3 on world"
    return [
        Case("missing rank", make_dumps(_vary(2, [LAST], [])), (stalled,)),
        Case("missing rank of a second group", make_dumps(lambda rank: [*DONE, *([dp[rank]] if rank != 3 else [])]),
             ("rank 2 waits for rank 3, which did not enter all_reduce 1 on dp (ranks 2 and 3)",)),
        Case("different operation", make_dumps(_vary(1, [LAST], [Call("broadcast", state="started", line=40)])),
             ("in call 3 on world, rank 1 calls broadcast of 64 float32", "call all_reduce of 64 float32")),
        Case("different size", make_dumps(_vary(1, [LAST], [size])),
             ("in call 3 on world, rank 1 calls all_reduce of 65 float32",)),
        Case("different dtype", make_dumps(_vary(3, [LAST], [dtype])),
             ("in call 3 on world, rank 3 calls all_reduce of 64 bfloat16",)),
        Case("different order", make_dumps(_vary(1, [Call("all_reduce"), Call("all_gather", 16, state="started")],
                                                [Call("all_gather", 16), Call("all_reduce", state="started")])),
             ("in call 3 on world, rank 1 calls all_gather of 64 float32",)),
        Case("skipped call", make_dumps(lambda rank: [Call("all_reduce"), Call("broadcast", 8), Call("all_reduce"),
                                                      *([LAST._replace(op="broadcast", size=8)] if rank != 1 else []),
                                                      *([Call("all_reduce", state="started")] if rank == 1 else [])]),
             ("in call 4 on world, rank 1 calls all_reduce of 64 float32",)),
        Case("different state", make_dumps(_vary(1, [LAST], [Call("all_reduce", line=30)])),
             ("the all_reduce 3 on world (ranks 0 to 3) does not complete",)),
        Case("wrong all-gather output", make_dumps(_vary(2, [gather], [gather._replace(output=60)])),
             ("rank 2 calls all_gather of 60 float32",)),
        Case("wrong all-gather output on all ranks", make_dumps(lambda rank: [*DONE, gather._replace(output=60)]),
             ("ranks 0 to 3 call all_gather with an output of 60 elements, but 64 elements are expected",)),
        Case("wrong reduce-scatter input", make_dumps(_vary(2, [scatter], [scatter._replace(output=15)])),
             ("rank 2 calls reduce_scatter with an input of 64 elements, but 60 elements are expected",)),
        Case("wrong all-to-all split", make_dumps(_vary(2, [split], [bad_split])),
             ("in all_to_all 3 on world, the ranks send 256 elements, but receive 252",)),
        Case("different message size", make_dumps(lambda rank: [*DONE, *messages.get(rank, [])]),
             ("in message 1 from rank 0 to rank 1 on dp, rank 0 calls send of 64 float32",)),
        Case("message never sent", make_dumps(lambda rank: [*DONE, *([recv] if rank == 1 else [])]),
             ("rank 1 waits in recv for rank 0 on dp (ranks 0 and 1)",)),
        Case("different coalesced operation", make_dumps(_vary(1, coalesced, other)),
             ("rank 1 calls coalesced all_reduce of 4 float32, all_reduce of 9 float32",)),
        Case("stuck transfer", make_dumps(lambda rank: [*DONE, LAST]),
             ("the all_reduce 3 on world (ranks 0 to 3) does not complete",)),
        Case("missing dump", make_dumps(_vary(3, [LAST], []), (0, 1, 2)),
             ("ranks 0 to 2 wait in all_reduce 3 on world, and the import has no dump of rank 3",)),
        Case("dropped start", dropped, ("wait for rank 0, which did not enter all_reduce 10 on world",),
             ("rank_3: the recorder has dropped the first 9 calls",)),
        Case("different versions", versions, (stalled,), ("the dumps have different versions (2.10, 2.4)",)),
        Case("unknown version", old, (stalled,), ("the version of the dump is '1.0'",)),
        Case("healthy", healthy, ("No hang found: all recorded calls of ranks 0 to 3",)),
    ]  # fmt: skip


def analyze(dumps: Dumps, folder: Path, damage: Callable[[Path], None] = lambda path: None) -> ImportResult:
    """Return what Meshboard reads from dumps."""
    sources = []
    for rank, dump in dumps.items():
        path = folder / f"rank_{rank}"
        path.write_bytes(pickle.dumps(dump, protocol=2))
        damage(path)
        sources.append(TraceFile(path.name, path))
    return read_traces(sources)


class TorchFinding(NamedTuple):
    """Problem that torch's analyzer reports about the first failing collective."""

    kind: str  # "" if it finds nothing
    sequence: int
    ranks: tuple[int, ...]


def analyze_with_torch(dumps: Dumps) -> TorchFinding:
    """Return the first problem that torch's analyzer finds, or the error with which it ends."""
    from torch.distributed.flight_recorder.components.builder import build_db

    arguments = argparse.Namespace(
        verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10
    )
    details = {f"rank_{rank}": {"rank": rank, **copy.deepcopy(dump)} for rank, dump in dumps.items()}
    version = str(next(iter(dumps.values()))["version"])
    logging.getLogger("Flight Recorder").setLevel(logging.CRITICAL)
    output, sys.stdout = sys.stdout, io.StringIO()
    try:
        collectives = build_db(details, arguments, version).collectives
    except Exception as error:  # it ends with an assertion or a lookup error at files that it does not expect
        return TorchFinding(f"{type(error).__name__}: {str(error)[:60]}", 0, ())
    finally:
        sys.stdout = output
    for one in collectives:
        if one.missing_ranks:
            return TorchFinding("missing ranks", one.collective_seq_id, tuple(sorted(one.missing_ranks)))
        if not one.pass_check:
            mismatches = one.mismatch_collectives or {}
            kinds = sorted({each.type_of_mismatch.state.name for each in mismatches.values()})
            return TorchFinding(", ".join(kinds), one.collective_seq_id, tuple(sorted(mismatches)))
    return TorchFinding("", 0, ())


def record_gloo(kind: str) -> Dumps:
    """Return the dumps of two gloo ranks with a fault."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, "tests.jobs.traces.flight_recorder_rank", folder, kind, TORCH_FR_BUFFER_SIZE="100")
        return {rank: pickle.loads((Path(folder) / f"rank_{rank}").read_bytes()) for rank in range(2)}


GLOO_CASES = {
    "missing": ("rank 0 waits for rank 1, which did not enter all_reduce 2 on world",),
    "operation": ("in call 2 on world, rank 1 calls broadcast of 4 float32",),
    "size": ("in call 2 on world, rank 1 calls all_reduce of 8 float32",),
    "dtype": ("in call 2 on world, rank 1 calls all_reduce of 4 float64",),
    "order": ("in call 2 on world, rank 1 calls broadcast of 4 float32",),
}


def add_gloo_groups(dumps: Dumps) -> Dumps:
    """Return the dumps with the ranks of the default group, without which torch's analyzer fails."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {rank: {**dump, "pg_config": config} for rank, dump in dumps.items()}


def format_first(findings: list[RunFinding]) -> str:
    return findings[0].sentence if findings else "-"


def main() -> None:
    """Print the table. The exit status is 1 if Meshboard misses a fault."""
    rows, num_missed = [], 0
    cases = [*make_cases(), *(Case(f"gloo: {kind}", record_gloo(kind), words) for kind, words in GLOO_CASES.items())]
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = format_first(analyze(case.dumps, Path(folder)).findings)
            except ImportProblemError as error:
                found = str(error)
        is_named = all(word in found for word in case.words)
        num_missed += not is_named
        is_gloo = case.name.startswith("gloo")
        torch_found = analyze_with_torch(add_gloo_groups(case.dumps) if is_gloo else case.dumps)
        shown = f"{torch_found.kind} in {torch_found.sequence}, ranks {torch_found.ranks}" if torch_found.kind else "-"
        rows.append((case.name, shown, found, "named" if is_named else "MISSED"))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1, 2)]
    for row in rows:
        print("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]))
    print(f"{len(rows) - num_missed} of {len(rows)} faults named")
    sys.exit(bool(num_missed))


if __name__ == "__main__":
    main()
