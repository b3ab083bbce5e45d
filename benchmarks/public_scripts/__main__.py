"""Run public training scripts with and without the meter, and compare losses and step times.

`make scripts SCRIPTS=FOLDER` reads checkouts that you fetched into FOLDER. The name of each checkout is the name of its
repository. Set SCRIPTS_PYTHON to a Python with the packages of the scripts and py-spy. The scripts are unmodified and
run on the CPU. Arguments choose scripts by a part of their names.

In a third run, py-spy samples the stacks of the ranks, which show the overhead of the meter. On a shared machine, step
times of two runs differ by more than this overhead.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.public_scripts.cases import CASES, Case, get_python, prepare
from contracts.codec import decode_frame
from contracts.telemetry.items import LogItem, list_step_times
from workers.host.hook import build_hook_variables
from workers.host.rank_files import LAUNCHER_RANK
from workers.host.supervisor.log_metrics import LogMetrics

TIMEOUT_S = 900
WARMUP_STEPS = 3
STACKS = ".stacks"
METER = re.compile(r"\((workers|contracts)/")
CALLS_OF_SCRIPT = ("MeteredProcessGroup._call (", "time_wait (")  # of the wrapped backend
THREAD = "Thread._bootstrap ("
COLUMNS = (
    *("script", "commit", "ranks", "losses", "loss read by Meshboard", "steps", "script's clock (ms)", "page (ms)"),
    *("difference", "benchmark's clock (ms)", "difference", "meter's share of active time", "axes"),
)


class Result(NamedTuple):
    """Printed losses and step times of a run, the recorded steps of its processes, and the items of its ranks.

    `stacks` are those that py-spy saw, without idle threads, with their numbers of samples.
    """

    losses: list[str]
    step_ms: list[float]
    clocks: list[list[float]]  # seconds at the end of each step
    stacks: dict[str, int]
    items: dict[int, list[Any]]
    lines: list[str]


def main() -> int:
    folder = Path(os.environ.get("SCRIPTS", "")).absolute()
    wanted = [name.lower() for name in sys.argv[1:]]
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for case in CASES:
        if wanted and not any(name in case.name.lower() for name in wanted):
            continue
        if not (folder / case.checkout).is_dir():
            print(f"| {case.name} | {case.commit} | not in {folder} |")
            continue
        cwd = prepare(case, folder)
        try:
            plain, metered = (run(case, folder, cwd, metered=metered) for metered in (False, True))
            profiled = run(case, folder, cwd, metered=True, profiler=get_profiler())
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"| {case.name} | {case.commit} | {error}", flush=True)
            continue
        print(format_row(case, plain, metered, profiled), flush=True)
    return 0


def get_profiler() -> str:
    return str(Path(get_python()).with_name("py-spy"))


def run(case: Case, folder: Path, cwd: Path, *, metered: bool, profiler: str = "") -> Result:
    """Run a script, and read its output. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as name:
        own = Path(name) / "own"
        own.mkdir()
        shutil.copy(Path(__file__).with_name("step_clock.py"), own / "sitecustomize.py")
        paths = [str(own), str(cwd), *([str(folder / case.python_path)] if case.python_path else [])]
        items, server = listen(Path(name) / "socket")
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(get_python()).parent), os.environ["PATH"]]),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "work/huggingface"),
            "TORCH_EXTENSIONS_DIR": str(folder / "work/extensions"),
            "WANDB_MODE": "offline",
            "ACCELERATE_USE_CPU": "true",
            "STEP_CLOCK": str(Path(name) / "clock"),
            "PROFILER": profiler,
            "FAKE_ACCELERATOR": "1" if case.fakes_accelerator else "",
            **dict(case.variables),
        }
        if metered:
            environment |= build_hook_variables(Path(name) / "socket", paths)
        done = subprocess.run(
            [word.replace("{folder}", str(folder)) for word in case.command],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
        time.sleep(0.3)  # the last frames are read
        server.close()
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}:\n{done.stdout[-3000:]}")
        if log := os.environ.get("SCRIPTS_LOG"):
            Path(log).write_text(done.stdout)
        files = sorted(Path(name).glob("clock.*"))
        clocks = [[*map(float, file.read_text().split())] for file in files if file.suffix != STACKS]
        stacks = read_stacks([file for file in files if file.suffix == STACKS])
    losses = re.findall(case.loss, done.stdout) if case.loss else []
    step_ms = [case.to_ms(text) for text in re.findall(case.step_time, done.stdout)] if case.step_time else []
    return Result(losses, step_ms, clocks, stacks, items, done.stdout.splitlines())


def read_stacks(files: list[Path]) -> dict[str, int]:
    """Read lines such as `<module> (train.py:3);step (optimizer.py:9) 12`, and sum the samples of equal stacks."""
    stacks: dict[str, int] = defaultdict(int)
    for file in files:
        for line in file.read_text().splitlines():
            stack, _, samples = line.rpartition(" ")
            stacks[stack] += int(samples)
    return stacks


def listen(path: Path) -> tuple[dict[int, list[Any]], socket.socket]:
    """Receive the items of all ranks."""
    items: dict[int, list[Any]] = defaultdict(list)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()

    def receive(connection: socket.socket) -> None:
        while size := connection.recv(4, socket.MSG_WAITALL):
            frame = decode_frame(connection.recv(int.from_bytes(size), socket.MSG_WAITALL))
            items[frame["rank"]] += frame["items"]

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=receive, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return items, server


def format_row(case: Case, plain: Result, metered: Result, profiled: Result) -> str:
    items = metered.items.get(0, [])
    steps = [item for item in items if item["kind"] == "step"]
    page = [1000 * seconds for item in steps for seconds in list_step_times(item)]
    # The first step has no time on the page, because its start is unknown.
    own = list(zip(metered.step_ms[1:], page[case.second_printed :: case.printed_every], strict=False))[1:]
    row = (
        *(case.name, case.commit, len(metered.items), compare_losses(case, plain, metered), describe_loss(metered)),
        *(steps[-1]["step"] if steps else 0, *compare_times(own), *compare_times(compare_clocks(metered, page))[::2]),
        *(describe_overhead(profiled), describe_axes(case, metered)),
    )
    return "| " + " | ".join(map(str, row)) + " |"


def compare_losses(case: Case, plain: Result, metered: Result) -> str:
    if not case.loss:
        return "prints none"
    return f"{len(plain.losses)} equal" if plain.losses == metered.losses else "DIFFERENT"


def describe_overhead(result: Result) -> str:
    """Return the shares of the meter in the samples of active threads, in threads of the script and in its own."""
    samples = {stack: count for stack, count in result.stacks.items() if not is_waiting(stack)}
    total = sum(samples.values())
    if not total:
        return "not sampled"
    inline, own = 0, 0
    for stack, count in samples.items():
        if is_in_meter(stack):
            own += count * stack.startswith(THREAD)
            inline += count * (not stack.startswith(THREAD))
    return f"{100 * inline / total:.2f}% + {100 * own / total:.2f}% of {total} samples"


def is_waiting(stack: str) -> bool:
    """Return whether a thread waits for a lock. py-spy counts the moment in which it wakes up."""
    return stack.rpartition(";")[2].startswith(("Condition.wait (", "Event.wait ("))


def is_in_meter(stack: str) -> bool:
    """Return whether the meter works. Functions that its hooks and its process group call belong to the script."""
    frames = stack.split(";")
    last = max((place for place, frame in enumerate(frames) if METER.search(frame)), default=None)
    if last is None or any("(torch/" in frame for frame in frames[last + 1 :]):
        return False
    return not frames[last].startswith(CALLS_OF_SCRIPT)


def compare_times(times: list[tuple[float, float]]) -> tuple[str, str, str]:
    """Return the medians of two clocks, and the median of their differences per step in percent."""
    if not times:
        return "none", "none", "none"
    own_ms, page_ms = (median(values) for values in zip(*times, strict=True))
    difference = median(page / own - 1 for own, page in times if own)
    return f"{own_ms:.1f}", f"{page_ms:.1f}", f"{100 * difference:+.2f}%"


def compare_clocks(result: Result, page: list[float]) -> list[tuple[float, float]]:
    """Pair the steps of the benchmark's clock with those of the page. All ranks step together."""
    if not result.clocks:
        return []
    wall = [1000 * (end - begin) for begin, end in pairwise(result.clocks[0])]
    return list(zip(wall, page, strict=False))[WARMUP_STEPS:]


def describe_loss(result: Result) -> str:
    """Return the source and the number of losses that Meshboard reads."""
    found: dict[str, int] = defaultdict(int)
    lines = [line[:500] for line in result.lines]
    log = LogMetrics(range(max(1, len(result.items))))
    for start in range(0, len(lines), 100):
        item = LogItem(kind="log", rank=LAUNCHER_RANK, time=time.time(), first=start, lines=lines[start : start + 100])
        result.items[0].extend(log.read(item))
    result.items[0].extend(log.take_last())
    for item in (item for per_rank in result.items.values() for item in per_rank if item["kind"] == "metric"):
        for name in item["values"]:
            if "loss" in name:
                found[f"{item['source']} {name}"] += 1
    return ", ".join(f"{name} ({count})" for name, count in found.items()) or "none"


def describe_axes(case: Case, result: Result) -> str:
    """Return the axes with their operations, and the expected axes if they differ."""
    cells: dict[str, set[str]] = defaultdict(set)
    for per_rank in result.items.values():
        for item in per_rank:
            for cell in item["cells"] if item["kind"] == "traffic" else ():
                if cell["phase"] == "step":
                    cells[cell["axis"]].add(cell["op"])
    text = "; ".join(f"{axis}: {', '.join(sorted(ops))}" for axis, ops in sorted(cells.items())) or "none"
    return text if set(cells) == set(case.axes) else f"{text} (EXPECTED {', '.join(case.axes) or 'none'})"


if __name__ == "__main__":
    sys.exit(main())
