"""A script under the meter imports, exits and prints as under plain Python."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.support.ranks import run_ranks

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


def test_script_imports_and_exits_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers/loader.py").write_text("WIDTH = 7\n")
    (tmp_path / "workers/__init__.py").touch()
    (tmp_path / "planner.py").touch()
    (tmp_path / "train.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{ITS_OWN}")
    ran = run_ranks(1, MODULE, str(tmp_path / "train.py"), "--lr", "1", limit_s=20)
    assert ran.returncode == 0, ran.stderr
    told = (tmp_path / "losses.csv").read_text().splitlines()
    assert told == ["child 3", "7 planner", "['--lr', '1'] <stdout> 1 None None", "Net"]
    assert "said" in ran.stdout
    assert ran.stderr.count("Rank 0 after") == 1, "a forked process prints no table"


def test_interrupted_script_prints_traceback_and_table(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(INTERRUPTED)
    ran = run_ranks(1, MODULE, str(tmp_path / "train.py"), limit_s=20)
    assert ran.returncode == signal.SIGINT
    told = ran.stderr.replace("[rank0]: ", "")
    trace = 'Traceback (most recent call last):\n  File "{}", line 6, in <module>\n    raise KeyboardInterrupt\n'
    assert trace.format(tmp_path / "train.py") in told, "the traceback has no frame of the meter"
    assert "last words" in ran.stdout
    assert "all_reduce" in told


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
