"""Find out what a rank does while other ranks wait for it, and how long ranks paused at the same line before.

A rank that sleeps in one line makes no progress. A rank that computes, or is inside code that is known to pause, is
slow. Only the length of its earlier pauses shows whether a slow rank hangs.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Literal, NamedTuple

from contracts.telemetry.batches import Item
from contracts.telemetry.items import LIBRARY_PATHS, GaugeItem, ProcessItem, StallItem, find_user_frame
from jobs.runs.diagnosis.deadlocks import get_place
from jobs.runs.diagnosis.rank_reports import THROTTLED

MIN_AGREEING_REPORTS = 2  # before positions count as final
MIN_EQUAL_STACKS = 3  # of a rank that sleeps
MIN_PROCESS_SAMPLES = 2
MAX_IDLE_CPU = 0.1  # CPUs in use by a process that sleeps; the meter's thread needs some
MAX_TRANSFER_CPU = 0.03  # of a process whose transfer does not move
MAX_IDLE_GPU_PERCENT = 5.0
CROWDED = 0.2  # seconds per second that a main thread waits for a CPU
SAME_STALL_S = 0.5  # difference between the starts of one stall in two reports
MAX_PLACES = 4096
MAX_SAMPLES = 8

Kind = Literal[
    "moving",
    "stopped",
    "gone",
    "ended",
    "quota",
    "crowded",
    "data",
    "checkpoint",
    "compile",
    "evaluation",
    "network",
    "import",
    "file",
    "lock",
    "input",
    "idle",
    "busy",
    "outside",
    "unknown",
]
ENDED_KINDS: frozenset[Kind] = frozenset(("stopped", "gone", "ended"))
IDLE_KINDS: frozenset[Kind] = frozenset(("lock", "input", "idle"))

# Words in the file and function of frames, in lower case.
SAVING_FRAMES = (
    "workers/checkpoint",
    "distributed/checkpoint",
    "torch/serialization",
    "safetensors",
    "save_checkpoint",
)
LOADING_FRAMES = ("dataload", "corpus", "dataset", "next_batch", "tokenize", "fetch")
LIBRARY_KINDS: dict[Kind, tuple[str, ...]] = {
    "compile": ("torch/_dynamo", "torch/_inductor", "torch/_functorch", "triton/", "torch/utils/cpp_extension"),
    "import": ("<frozen importlib",),
    "network": (
        *("/ssl.py:", "/socket.py:", "http/client.py:", "urllib", "requests/", "httpx/", "httpcore/", "grpc/"),
        *("huggingface_hub/", "fsspec/", "boto", "wandb/", "mlflow/", "comet_ml/", "neptune/", "trackio/"),
        *("/subprocess.py:", "multiprocessing/", "concurrent/futures/", "filelock/", "torch/utils/file_baton"),
    ),
}
NUM_USER_FRAMES = 3  # innermost, whose functions name the work
EVALUATION_FUNCTION = re.compile(r"eval|valid|generat|inference|predict|benchmark|\btest")
SAVING_FUNCTION = re.compile(r"save|(write|dump|store|load)_?(checkpoint|ckpt|state)|^(checkpoint|ckpt)")
INPUT_SOURCE = re.compile(r"\binput\(|sys\.stdin|\bbreakpoint\(|set_trace\(")
LOCK_SOURCE = re.compile(r"\.acquire\(|\bwith \S*(lock|mutex)|\.join\(|\.wait\(|flock")
FILE_SOURCE = re.compile(r"\bopen\(|\.read\w*\(|\.write\w*\(|fsync|np\.load|os\.sync|memmap")
LOCK_FRAMES = ("/threading.py:", "/queue.py:")


class Activity(NamedTuple):
    """Describe what a rank outside of collectives does. `place`: line of the user's code.

    The kind "outside" is not yet known in detail, and for "unknown" the rank has sent no report.
    """

    kind: Kind
    place: str
    source: str


class Stall:
    """The time in which one rank made no progress."""

    def __init__(self, item: StallItem) -> None:
        self.since = item["time"] - item["still"]
        self.item = item
        self.reports = self.equal_stacks = 1
        self.places = {get_place(item["stack"])}
        self.has_slept = False

    def add(self, item: StallItem) -> None:
        self.reports += 1
        self.equal_stacks = self.equal_stacks + 1 if item["stack"] == self.item["stack"] else 1
        self.item = item
        if len(self.places) < MAX_PLACES:
            self.places.add(get_place(item["stack"]))


class RankActivities:
    """Collect the reports of ranks that make no progress, and the states of their processes."""

    def __init__(self) -> None:
        self._stalls: dict[int, Stall] = {}
        self._samples: dict[int, deque[ProcessItem]] = {}
        self._gpu_percent: dict[int, float] = {}
        self._pauses: dict[str, tuple[int, float]] = {}  # number and longest, by place
        self.ended: dict[int, StallItem] = {}  # last report of ranks that have ended by themselves

    def add(self, item: Item) -> None:
        match item["kind"]:
            case "standing":
                self._add_stall(item)
            case "process":
                self._samples.setdefault(item["rank"], deque(maxlen=MAX_SAMPLES)).append(item)
            case "gauge":
                self._add_gauge(item)
            case _:
                pass

    def _add_gauge(self, item: GaugeItem) -> None:
        if "gpu_percent" in item:
            self._gpu_percent[item["rank"]] = item["gpu_percent"]

    def _add_stall(self, item: StallItem) -> None:
        rank = item["rank"]
        stall = self._stalls.get(rank)
        if "ended" in item:
            self.ended[rank] = item
        if stall is not None and item["still"] > 0 and abs(item["time"] - item["still"] - stall.since) < SAME_STALL_S:
            stall.add(item)
            return
        if stall is not None:
            end = item["time"] if item["still"] == 0 else item["time"] - item["still"]
            self._learn_pause(stall, end - stall.since)
            del self._stalls[rank]
        if item["still"] > 0:
            self._stalls[rank] = Stall(item)

    def _learn_pause(self, stall: Stall, seconds: float) -> None:
        if any("op" in progress for progress in stall.item["groups"]):
            return  # the rank waited for another one
        for place in stall.places:
            if place and (place in self._pauses or len(self._pauses) < MAX_PLACES):
                number, longest_s = self._pauses.get(place, (0, 0.0))
                self._pauses[place] = (number + 1, max(seconds, longest_s))

    def has_agreed(self, rank: int) -> bool:
        """Return True if consecutive reports of a rank show one position."""
        stall = self._stalls.get(rank)
        return rank in self.ended or (stall is not None and stall.reports >= MIN_AGREEING_REPORTS)

    def is_settled(self, rank: int) -> bool:
        """Return True if consecutive reports of a rank also show one stack, so that its thread waits."""
        stall = self._stalls.get(rank)
        return rank in self.ended or (stall is not None and stall.equal_stacks >= MIN_AGREEING_REPORTS)

    def get_pause_s(self, rank: int, *, min_pauses: int = 1) -> float | None:
        """Return the longest earlier pause at the line where a rank is, None before `min_pauses` pauses."""
        stall = self._stalls.get(rank)
        number, longest_s = self._pauses.get(get_place(stall.item["stack"]) if stall else "", (0, 0.0))
        return longest_s if number >= min_pauses else None

    def is_transfer_idle(self, rank: int, since: float) -> bool:
        """Return True if the process of a rank in a collective uses no CPU."""
        samples = self._get_samples(rank, since)
        return len(samples) >= MIN_PROCESS_SAMPLES and all(_is_idle(item, MAX_TRANSFER_CPU) for item in samples)

    def classify(self, rank: int, since: float) -> Activity:
        """Return what a rank does. Samples of its process before `since` are ignored."""
        stall, samples = self._stalls.get(rank), self._get_samples(rank, since)
        if rank in self.ended:
            item = self.ended[rank]
            return Activity("ended", get_place(item["stack"]), item.get("source", ""))
        stack = stall.item["stack"] if stall is not None else []
        source = stall.item.get("source", "") if stall is not None else ""
        if stall is None and samples:
            stack = samples[-1]["stack"]
        place = get_place(stack)
        if kind := _get_process_kind(samples):
            return Activity(kind, place, source)
        if stall is None and not samples:
            return Activity("unknown", "", "")
        if kind := get_known_kind(stack, samples[-1]["state"] if samples else ""):
            return Activity(kind, place, source)
        return Activity(self._get_own_kind(rank, stall, samples, stack, source), place, source)

    def _get_own_kind(
        self, rank: int, stall: Stall | None, samples: list[ProcessItem], stack: list[str], source: str
    ) -> Kind:
        if len(samples) < MIN_PROCESS_SAMPLES:
            return "outside"
        idle = [_is_idle(item, MAX_IDLE_CPU) for item in samples[-MIN_PROCESS_SAMPLES:]]
        # On a crowded host, one sample of a rank that sleeps can show the meter's thread at work.
        sleeps_on = any(idle) and stall is not None and stall.has_slept
        if not all(idle) and not sleeps_on:
            return "busy"
        if self._gpu_percent.get(rank, 0.0) > MAX_IDLE_GPU_PERCENT:
            return "busy"
        if stall is not None and stall.equal_stacks < MIN_EQUAL_STACKS:
            return "busy" if stall.reports >= MIN_EQUAL_STACKS else "outside"
        if stall is not None:
            stall.has_slept = True
        if INPUT_SOURCE.search(source):
            return "input"
        if LOCK_SOURCE.search(source) or _has_innermost(stack, LOCK_FRAMES):
            return "lock"
        return "file" if FILE_SOURCE.search(source) else "idle"

    def _get_samples(self, rank: int, since: float) -> list[ProcessItem]:
        return [item for item in self._samples.get(rank, ()) if item["time"] >= since]


def _get_process_kind(samples: list[ProcessItem]) -> Kind | None:
    """Return the kind of a process that is stopped, gone, or lacks a CPU."""
    if not samples:
        return None
    states = [item["state"] for item in samples[-MIN_PROCESS_SAMPLES:]]
    if states[-1] in ("zombie", "gone"):
        return "gone"
    if states[-1] == "stopped":
        return "stopped"
    if samples[-1]["throttled"] >= THROTTLED:
        return "quota"
    return "crowded" if samples[-1].get("crowded", 0.0) >= CROWDED else None


def get_known_kind(stack: list[str], state: str = "") -> Kind | None:
    """Return the kind of code that is known to pause, from the frames of a stack."""
    own = [line for line in stack if not _is_library(line)]
    main = own[0].rpartition(":")[0] if own else ""
    names = [line.lower() for line in stack if _is_library(line) or "workers/" in line]
    names += [_get_name(line, main) for line in own[-NUM_USER_FRAMES:]]
    if any(word in name for name in names for word in SAVING_FRAMES):
        return "checkpoint"
    if any(word in name for name in names for word in LOADING_FRAMES):
        return "data"
    for kind, words in LIBRARY_KINDS.items():
        if any(word in name for name in names for word in words):
            return kind
    functions = [line.rpartition(" in ")[2].lower() for line in own[-NUM_USER_FRAMES:]]
    if any(SAVING_FUNCTION.search(function) for function in functions):
        return "checkpoint"
    if any(EVALUATION_FUNCTION.search(function) for function in functions):
        return "evaluation"
    return "file" if state == "disk" else None


def _get_name(line: str, main: str) -> str:
    """Return the file and function of a frame of the user's code. The name of the main script names no work."""
    file, _, function = line.rpartition(" in ")
    return (function if file.rpartition(":")[0] == main else line.rpartition("/")[2]).lower()


def _is_library(line: str) -> bool:
    return any(path in line for path in LIBRARY_PATHS)


def _has_innermost(stack: list[str], words: tuple[str, ...]) -> bool:
    """Return True if a frame that the user's innermost line called is in one of these files."""
    own = find_user_frame(stack)
    called = stack[stack.index(own) + 1 :] if own else stack[-3:]
    return any(word in line for line in called for word in words)


def _is_idle(item: ProcessItem, max_cpu: float) -> bool:
    return item["state"] == "sleeping" and item["cpu"] <= max_cpu and item.get("crowded", 0.0) <= MAX_IDLE_CPU
