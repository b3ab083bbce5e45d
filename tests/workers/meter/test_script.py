"""The meter finds scripts below the script root, and counts them without changing their behavior."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from tests.support.processes import ROOT
from tests.support.ranks import build_torchrun_command, run_ranks, run_to_completion
from workers.meter.recorder import MAX_GROUP_LABELS, OTHER_GROUPS_LABEL, Recorder
from workers.meter.script import Script, ScriptError, find_script_of_spec, run_script
from workers.meter.script_groups import (
    find_p2p_axis,
    format_ranks,
    get_user_label,
    get_variable_label,
    names_pipeline,
)

HERE = Path(__file__).parent
MODULE = "tests.workers.meter.ended"
ITS_OWN = """
import atexit, os, pickle, sys
from concurrent.futures import ThreadPoolExecutor
import planner
from workers.loader import WIDTH

class Net:
    pass

def held():
    return pool, losses  # neither goes with the last name of it

pool, losses = ThreadPoolExecutor(1), open("losses.csv", "w")
if os.fork() == 0:
    sys.exit(3)
losses.write(f"child {os.waitstatus_to_exitcode(os.wait()[1])}\\n")
losses.write(f"{pool.submit(lambda: WIDTH).result()} {planner.__name__}\\n")
atexit.register(lambda: losses.write(f"{type(pickle.loads(pickle.dumps(Net()))).__name__}\\n"))
losses.write(f"{sys.argv[1:]} {sys.stdout.name} {__builtins__.len([1])} {__package__} {__spec__}\\n")
sys.__stdout__.write("said\\n")
sys.stdout.close()
"""
INTERRUPTED = """
import atexit, torch, torch.distributed as dist
atexit.register(print, "last words")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
raise KeyboardInterrupt
"""
OF_ITS_OWN_BACKEND = """
import torch.distributed as dist

class Group(dist.ProcessGroup):
    pass

dist.Backend.register_backend("mine", lambda *_: Group(0, 1), devices=["cpu"])
for _ in range(2):
    dist.init_process_group("mine")
    dist.destroy_process_group()
"""


def launch(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(ROOT)}
    argv = build_torchrun_command(ranks, "-m", "workers.meter", *arguments)
    return run_to_completion(argv, environment, cwd=Path("/"), limit_s=100)


def counted(messages: str) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return (phase, group, op) -> (calls, payload bytes) from the table of rank 0."""
    found = {}
    lines = messages[messages.index("Rank 0 after") :].splitlines()[2:]
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
    assert "Rank 0 after 5 steps" in ran.stderr
    gradients = (32 * 32 + 32) * 4
    report = counted(ran.stderr)
    assert report["step", "world", "all_reduce"] == (3, 3 * gradients)
    assert report["setup", "world", "all_reduce"][1] == 2 * gradients
    assert ("step", "world", "broadcast") not in report, "DDP regroups its buckets once, as the second step begins"
    assert report["setup", "world", "broadcast"][1] >= gradients, "DDP makes the replicas equal first"


def test_counts_fsdp2_script_by_mesh_axes() -> None:
    ran = run_ranks(4, "workers.meter.__main__", str(HERE / "scripts/fsdp.py"))
    assert ran.returncode == 0, ran.stderr
    report = counted(ran.stderr)
    layer = 16 * 16 * 4
    # Setup holds the first two steps. The last layer's weights are kept from forward to backward.
    assert report["setup", "dp", "reduce_scatter"] == (4, 4 * layer)
    assert report["step", "dp", "reduce_scatter"] == (2, 2 * layer)
    assert report["step", "dp", "all_gather"][1] % layer == 0
    assert not [key for key in report if key[1] == "tp"], "no traffic over the other axis"


@pytest.mark.slow
def test_counts_sparse_gradients_and_steps_of_two_optimizers() -> None:
    ran = launch(2, str(HERE / "scripts/named.py"))
    assert ran.returncode == 0, ran.stderr
    assert f"file {HERE / 'scripts/named.py'}" in ran.stdout
    assert "Rank 0 after 3 steps" in ran.stderr, "two optimisers take one step together"
    report = counted(ran.stderr)
    assert report["setup", "tp", "all_reduce"] == (2, 2 * 8)
    sparse = 3 * 8 + 3 * 4 * 4  # indices and values of the rows that were looked up
    assert report["step", "my pair", "all_reduce"] == (1, sparse)
    assert not [key for key in report if key[1] == "world"]


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


@pytest.mark.parametrize(
    ("variable", "label"),
    [
        ("tp_group", "tp"),
        ("_DATA_PARALLEL_GROUP", "data"),
        ("cp_dp_group", "cp_dp"),
        ("dp_mesh", "dp"),
        ("pp_process_group", "pp"),
        ("group", ""),
        ("mine", ""),
        ("my_tp_group", ""),
        ("", ""),
    ],
)
def test_label_of_a_variable_is_the_axis_that_it_names(variable: str, label: str) -> None:
    assert get_variable_label(variable) == label


def test_labels_groups_with_their_variables_or_ranks() -> None:
    ran = run_ranks(4, "workers.meter.__main__", str(HERE / "scripts/groups.py"))
    assert ran.returncode == 0, ran.stderr
    assert counted(ran.stderr) == {
        ("setup", "ranks 0,2", "all_reduce"): (1, 32),
        ("setup", "tp", "all_reduce"): (1, 32),
        ("setup", "pp", "send"): (1, 32),
        ("setup", "world", "all_to_all"): (1, 32),
        ("setup", "world", "barrier"): (1, 0),
    }


def make_code(source: str) -> CodeType:
    namespace: dict[str, FunctionType] = {}
    exec(source, namespace)
    return namespace[source.split()[1].partition("(")[0]].__code__


@pytest.mark.parametrize(
    ("source", "is_pipeline"),
    [
        ("def forward(x, next_stage): dist.send(x, next_stage)", True),
        ("def pipeline_communicate(x, peer): dist.send(x, peer)", True),
        ("def send(self, x): dist.send(x, self.pp_next_rank)", True),
        ("def rotate(x): dist.send(x, peer)", False),
        ("def ring_attention(x, stage): dist.send(x, stage)", False),
    ],
)
def test_names_in_the_calling_function_show_a_pipeline(source: str, is_pipeline: bool) -> None:
    assert names_pipeline(make_code(source)) == is_pipeline


def test_sends_over_the_default_group_belong_to_the_smallest_named_group_of_both_ranks() -> None:
    recorder = Recorder(0)
    groups = {"tp": [0, 1], "pp": [0, 2], "mp": [0, 1, 2, 3], "cp_dp": [0, 4], "cp": [0, 4], "world": range(8)}
    for name, ranks in groups.items():
        recorder.add_group(name, ranks)
        recorder.name_group(name, name)
    world = recorder.groups.get("world", 8)
    found = {peer: find_p2p_axis(recorder, "world", world, peer) for peer in (1, 2, 3, 4, 5)}
    assert found == {1: ("tp", 2), 2: ("pp", 2), 3: ("mp", 4), 4: ("cp", 2), 5: ("world", 8)}
    assert find_p2p_axis(recorder, "tp", recorder.groups.get("tp", 2), 1) == ("tp", 2)


def test_keeps_exit_code_during_a_collective() -> None:
    failed = launch(4, str(HERE / "scripts/groups.py"), "7")
    assert failed.returncode != 0
    assert "exitcode  : 7" in failed.stderr


@pytest.mark.slow
def test_runs_script_without_process_groups(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import sys\nprint('here', sys.argv[0], sys.path[0])\n")
    ran = launch(1, str(tmp_path / "plain.py"))
    assert f"here {tmp_path / 'plain.py'} {tmp_path}" in ran.stdout
    assert "No collective ran" in ran.stderr
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
    assert torch.__version__.split("+")[0] == "2.13.0", "check workers.meter.script_groups against the new torch"
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
    report = ran.stderr.replace("[rank0]: ", "")
    assert "broken.py\", line 3, in <module>\n    raise ValueError('no luck')\nValueError: no luck" in report
    assert "last words" in ran.stdout
    assert "exitcode  : 1" in ran.stderr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Create a script root with links that leave it under every name."""
    outside, root = tmp_path / "outside", tmp_path / "root"
    (outside / "package").mkdir(parents=True)
    for file in ("evil.py", "package/__main__.py", "package/train.py"):
        (outside / file).write_text("print('I RAN')\n")
    root.mkdir()
    (root / "evil.py").symlink_to(outside / "evil.py")
    (root / "away").symlink_to(outside / "package")
    (root / "circle").symlink_to(root / "circle")
    (root / "circle.py").symlink_to(root / "circle.py")
    (root / "good").mkdir()
    (root / "good/away").symlink_to(outside / "package")
    (root / "good/other").symlink_to(root / "other")
    (root / "other").mkdir()
    (root / "good/train.py").write_text("print('fine')\n")
    (root / "good/__main__.py").write_text("print('fine')\n")
    (root / "good.py").write_text("print('hidden by the package of that name')\n")
    (root / "link.py").symlink_to(root / "good/train.py")
    (root / "json.py").write_text("print('not the one that Python has')\n")
    return root


def find(root: Path, **script: Any) -> Script:
    spec = root.parent / "spec.json"
    spec.write_text(json.dumps({"kind": "script", "script": script}))
    return find_script_of_spec(spec, root)


@pytest.mark.parametrize(
    ("script", "field"),
    [
        ({"path": "evil.py"}, "script.path"),
        ({"path": "away/train.py"}, "script.path"),
        ({"path": "circle"}, "script.path"),
        ({"path": "x" * 900}, "script.path"),
        ({"path": "absent.py"}, "script.path"),
        ({"module": "evil"}, "script.module"),
        ({"module": "away"}, "script.module"),
        ({"module": "away.train"}, "script.module"),
        ({"module": "circle"}, "script.module"),
        ({"module": "x" * 200}, "script.module"),
        ({"module": "http.server"}, "script.module"),
        ({"path": "good/train.py", "cwd": "good/away"}, "script.cwd"),
        ({"path": "good/train.py", "cwd": "good/absent"}, "script.cwd"),
    ],
)
def test_refuses_links_that_leave_the_root(root: Path, script: dict[str, str], field: str) -> None:
    with pytest.raises(ScriptError, match=f"^`{re.escape(field)}` is '.*', which does not exist"):
        find(root, **script)


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ({"path": "good"}, "`script.path` is 'good', which is a folder. Use a file."),
        (
            {"path": "good/train.py", "cwd": "good/train.py"},
            "`script.cwd` is 'good/train.py', which is a file. Use a folder.",
        ),
        (
            {"path": "good/train.py", "cwd": "good/other"},
            "`script.cwd` is 'good/other', which is outside the script folder 'good'.",
        ),
    ],
)
def test_reports_folder_in_place_of_file(root: Path, script: dict[str, str], problem: str) -> None:
    with pytest.raises(ScriptError, match=f"^{re.escape(problem)}$"):
        find(root, **script)


def test_finds_scripts_below_the_root(root: Path) -> None:
    file, folder = root / "good/train.py", root / "good"
    for path in ("good/train.py", "link.py", "good/./train.py"):
        assert find(root, path=path)[:1] == (file,)
        assert find(root, path=path)[4:] == (folder, folder)
    assert find(root, path="good/train.py", cwd="good").cwd == folder
    assert find(root, path="link.py", cwd="good").cwd == folder
    assert find(root, module="good.train")[4:] == (root, root)
    assert find(root, module="good").file == folder / "__main__.py"


def test_refuses_module_that_python_finds_elsewhere(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = find(root, module="json")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.chdir(root)
    assert run_script(script) == 2
    messages = capsys.readouterr()
    assert "error: `script.module` is 'json' in " in messages.err
    assert "but Python finds" in messages.err
    assert messages.out == ""


def test_script_imports_and_exits_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers/loader.py").write_text("WIDTH = 7\n")
    (tmp_path / "workers/__init__.py").touch()
    (tmp_path / "planner.py").touch()
    (tmp_path / "train.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{ITS_OWN}")
    ran = run_ranks(1, MODULE, str(tmp_path / "train.py"), "--lr", "1", limit_s=20)
    assert ran.returncode == 0, ran.stderr
    report = (tmp_path / "losses.csv").read_text().splitlines()
    assert report == ["child 3", "7 planner", "['--lr', '1'] <stdout> 1 None None", "Net"]
    assert "said" in ran.stdout
    assert ran.stderr.count("Rank 0 after") == 1, "a forked process prints no table"


def test_interrupted_script_prints_traceback_and_table(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(INTERRUPTED)
    ran = run_ranks(1, MODULE, str(tmp_path / "train.py"), limit_s=20)
    assert ran.returncode == signal.SIGINT
    report = ran.stderr.replace("[rank0]: ", "")
    trace = 'Traceback (most recent call last):\n  File "{}", line 6, in <module>\n    raise KeyboardInterrupt\n'
    assert trace.format(tmp_path / "train.py") in report, "the traceback has no frame of the meter"
    assert "last words" in ran.stdout
    assert "all_reduce" in report


def test_warns_once_about_uncounted_backend(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_ITS_OWN_BACKEND)
    ran = run_ranks(1, MODULE, str(tmp_path / "train.py"), limit_s=20)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("traffic over mine is not counted") == 1


def test_finds_module_as_python_does(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"x": 1}')
    ran = run_ranks(1, MODULE, "-m", "json.tool", "--compact", str(tmp_path / "x.json"), limit_s=20)
    assert (ran.returncode, ran.stdout) == (0, '{"x":1}\n'), ran.stderr
    ran = run_ranks(1, MODULE, "-m", "json.absent", limit_s=20)
    assert ran.returncode == 2
    assert "error: `script.module` is 'json.absent', but Python finds no such module that it can run." in ran.stderr
