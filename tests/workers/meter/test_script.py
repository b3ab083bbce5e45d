"""The meter counts unchanged scripts to the byte, and does not change their behavior."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from contracts.codec import decode_frame
from tests.support.processes import ROOT, scale_timeout
from tests.support.ranks import build_torchrun_command, run_ranks, run_to_completion
from workers.host.supervisor.exit_report import SummaryBuilder
from workers.meter.__main__ import StepCounter, count_steps, format_ranks, get_user_label
from workers.meter.exporter import Exporter
from workers.meter.recorder import MAX_GROUP_LABELS, OTHER_GROUPS_LABEL, Recorder

HERE = Path(__file__).parent


def launch(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    argv = build_torchrun_command(ranks, "-m", "workers.meter", *arguments)
    return run_to_completion(argv, environment, cwd=Path("/"), limit_s=100)


def counted(said: str) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return (phase, group, op) -> (calls, payload bytes) from the table of rank 0."""
    found = {}
    lines = said[said.index("Rank 0 after") :].splitlines()[2:]
    for line in lines:
        if not line.startswith(("setup", "step")):
            break
        phase, group, op = line[:8].strip(), line[8:32].strip(), line[32:48].strip()
        calls, payload = line[48:].split()[:2]
        found[phase, group, op] = int(calls.replace(",", "")), int(payload.replace(",", ""))
    return found


def test_ddp_script_all_reduces_gradients_every_step() -> None:
    ran = launch(2, str(HERE / "scripts/ddp.py"), "5", "--flag")
    assert ran.returncode == 0, ran.stderr
    assert "argv ['5', '--flag'] __main__" in ran.stdout
    assert "Rank 0 after 5 optimizer steps" in ran.stderr
    gradients = (32 * 32 + 32) * 4
    told = counted(ran.stderr)
    assert told["step", "world", "all_reduce"] == (3, 3 * gradients)
    assert told["setup", "world", "all_reduce"][1] == 2 * gradients
    assert ("step", "world", "broadcast") not in told, "DDP regroups its buckets once, as the second step begins"
    assert told["setup", "world", "broadcast"][1] >= gradients, "DDP makes the replicas equal first"


def test_counts_fsdp2_script_by_mesh_axes() -> None:
    ran = run_ranks(4, "workers.meter.__main__", str(HERE / "scripts/fsdp.py"))
    assert ran.returncode == 0, ran.stderr
    told = counted(ran.stderr)
    layer = 16 * 16 * 4
    # Setup holds the first two steps. The last layer's weights are kept from forward to backward.
    assert told["setup", "dp", "reduce_scatter"] == (4, 4 * layer)
    assert told["step", "dp", "reduce_scatter"] == (2, 2 * layer)
    assert told["step", "dp", "all_gather"][1] % layer == 0
    assert not [key for key in told if key[1] == "tp"], "no traffic over the other axis"


@pytest.mark.slow
def test_counts_sparse_gradients_and_steps_of_two_optimizers() -> None:
    ran = launch(2, str(HERE / "scripts/named.py"))
    assert ran.returncode == 0, ran.stderr
    assert f"file {HERE / 'scripts/named.py'}" in ran.stdout
    assert "rank 0 after 3 optimiser steps" in ran.stderr, "two optimisers take one step together"
    told = counted(ran.stderr)
    assert told["setup", "tp", "all_reduce"] == (2, 2 * 8)
    sparse = 3 * 8 + 3 * 4 * 4  # indices and values of the rows that were looked up
    assert told["step", "my pair", "all_reduce"] == (1, sparse)
    assert not [key for key in told if key[1] == "world"]


@pytest.mark.slow
def test_model_can_be_freed_during_a_callback() -> None:
    """Without the meter this script hangs: DDP waits with the GIL for a gloo thread that waits for the GIL."""
    ran = launch(2, str(HERE / "scripts/collected.py"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("collected") == 2


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("mesh_tp", "tp"),
        ("mesh_own axis", "own axis"),
        ("mesh_dim_0", ""),
        ("mesh_default", ""),
        ("undefined", ""),
        ("default_pg", ""),
        ("", ""),
        ("a\0b\n" + "x" * 100, "a?b?" + "x" * 56),
    ],
)
def test_group_has_label_of_its_description(description: str, name: str) -> None:
    assert get_user_label(description) == name


def test_reports_number_of_steps_with_the_counters(tmp_path: Path) -> None:
    recorder, tally, told = Recorder(0), SummaryBuilder(), []
    with socket.socket(socket.AF_UNIX) as supervisor:
        supervisor.bind(str(tmp_path / "s"))
        supervisor.listen()
        exporter = Exporter(recorder, str(tmp_path / "s"), "job", 1)
        exporter.add_source(StepCounter(recorder).poll)
        line, _ = supervisor.accept()
        with line:
            line.settimeout(scale_timeout(5))

            def hear() -> bool:
                size = line.recv(4)
                for item in decode_frame(line.recv(int.from_bytes(size), socket.MSG_WAITALL))["items"] if size else ():
                    tally.add(item)
                    told.extend([item["steps"]] if item["kind"] == "phase" else [])
                return bool(size)

            for steps in (1, 100):
                recorder.step = steps
                while tally.steps != steps:
                    hear()
            recorder.step = 101
            assert exporter.close()
            while hear():
                pass
    assert told == [1, 100, 101]


def test_counts_step_of_several_optimizers_once() -> None:
    recorder = Recorder(0)
    parameter = torch.nn.Parameter(torch.ones(1))
    hook = count_steps(recorder)
    try:
        first, second = (torch.optim.SGD([parameter], lr=0.1) for _ in range(2))
        for optimizer in (first, second, first, second):
            optimizer.step()
        assert recorder.step == 2
        first.step()
        first.step()
        assert recorder.step == 4, "one that steps twice makes two"
        del first, second, optimizer
        torch.optim.SGD([parameter], lr=0.1).step()
        assert recorder.step == 5, "a new optimizer continues after the old ones are freed"
    finally:
        hook.remove()


def test_labels_groups_with_their_ranks() -> None:
    ran = run_ranks(4, "workers.meter.__main__", str(HERE / "scripts/groups.py"))
    assert ran.returncode == 0, ran.stderr
    assert counted(ran.stderr) == {
        ("setup", "ranks 0,2", "all_reduce"): (1, 32),
        ("setup", "world", "all_to_all"): (1, 32),
        ("setup", "world", "barrier"): (1, 0),
    }


def test_keeps_exit_code_during_a_collective() -> None:
    failed = launch(4, str(HERE / "scripts/groups.py"), "7")
    assert failed.returncode != 0
    assert "exitcode  : 7" in failed.stderr


@pytest.mark.slow
def test_runs_script_without_process_groups(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys\nprint('here', sys.argv[0], sys.path[0])\n")
    ran = launch(1, str(tmp_path / "plain.py"))
    assert f"here {tmp_path / 'plain.py'} {tmp_path}" in ran.stdout
    assert "no collective passed" in ran.stderr
    missing = launch(1, str(tmp_path / "none.py"))
    assert f"`script.path` is '{tmp_path / 'none.py'}', which does not exist." in missing.stderr


@pytest.mark.parametrize(
    ("ranks", "world", "words"),
    [
        ([0, 1], 2, "world"),
        ([0, 1], 4, "ranks 0-1"),
        ([0, 2], 4, "ranks 0,2"),
        ([3], 4, "ranks 3"),
        (list(range(0, 64, 8)), 64, "ranks 0,8..56 (8)"),
    ],
)
def test_formats_ranks_of_a_group(ranks: list[int], world: int, words: str) -> None:
    assert format_ranks(ranks, world) == words


def test_number_of_group_labels_is_bounded() -> None:
    recorder = Recorder(0)
    for index in range(1000):
        recorder.name_group(str(index), f"ranks {index}")
        recorder.issue("all_reduce", str(index), 2, 8)()
    assert len(recorder.get_cells()) == MAX_GROUP_LABELS + 1
    (rest,) = [cell for cell in recorder.get_cells() if cell["axis"] == OTHER_GROUPS_LABEL]
    assert rest["payload_bytes"] == 8 * (1000 - MAX_GROUP_LABELS)


def test_torch_registers_groups_where_the_meter_replaces_them() -> None:
    assert torch.__version__.split("+")[0] == "2.13.0", "check workers.meter.__main__ against the new torch"
    made = inspect.getsource(DeviceMesh)
    assert "_dim_group_names = self._init_process_groups(" in made
    assert "device_mesh._dim_group_names = [group.group_name for group in groups]" in made
    assert 'group_desc = f"mesh_{dim_name}"' in made
    entered = inspect.getsource(c10d._register_pg_in_world)
    places = ("pg_map", "pg_names", "pg_backend_config", "_register_process_group", "tags_to_pg", "pg_to_tag")
    assert all(f"_world.{place}" in entered or f"{place}(" in entered for place in places)
    for maker in (c10d.init_process_group, c10d._new_group_with_tag):
        assert "_new_process_group_helper(" in inspect.getsource(inspect.unwrap(maker))


def test_prints_exception_as_python_does(tmp_path: Path) -> None:
    lines = ("import atexit", "atexit.register(print, 'last words')", "raise ValueError('no luck')")
    (tmp_path / "broken.py").write_text("\n".join(lines))
    ran = launch(1, str(tmp_path / "broken.py"))
    told = ran.stderr.replace("[rank0]: ", "")
    assert "broken.py\", line 3, in <module>\n    raise ValueError('no luck')\nValueError: no luck" in told
    assert "last words" in ran.stdout
    assert "exitcode  : 1" in ran.stderr
