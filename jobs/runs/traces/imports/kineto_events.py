"""Collect the events of a torch.profiler (Kineto) trace in compact columns.

A device kernel has the correlation id and the External id of its launch. The launch can be far away in the file. A
trace of 1 GiB has millions of launches, so launches are stored as columns of numbers.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from jobs.core.text import is_storable
from jobs.runs.traces.imports.common import (
    MAX_EVENTS,
    MAX_TEXT_LENGTH,
    ImportProblemError,
    get_element_bytes,
    parse_op,
)
from jobs.runs.traces.imports.trace_files import TraceFile

STEP: Final = re.compile(r"ProfilerStep\s?#\s?([0-9]{1,9})")
LIBRARY_EVENT: Final = re.compile(r"(gloo|mpi|ucc|nccl|rccl|xccl|hccl):(.+)", re.DOTALL)
CPU_LIBRARIES: Final = frozenset({"gloo", "mpi", "ucc"})  # their annotations have the duration of the collective
COLLECTIVE_KERNEL: Final = re.compile(r"nccl|rccl|msccl|hccl|oneccl", re.IGNORECASE)
SIGNATURE: Final = re.compile(r"[<(]")  # begins the template arguments or the parameters of a kernel
KERNEL_OP: Final = re.compile(
    r"AllReduce|AllGather|ReduceScatter|AllToAll|AlltoAll|Broadcast|Reduce|Gather|Scatter", re.IGNORECASE
)
# Kineto's categories, and the categories before PyTorch 1.12.
KERNEL_CATEGORIES: Final = frozenset({"kernel", "concurrent_kernel", "mtia_ccp_events"})
COPY_CATEGORIES: Final = frozenset({"gpu_memcpy", "gpu_memset", "memcpy", "memset"})
DEVICE_CATEGORIES: Final = KERNEL_CATEGORIES | COPY_CATEGORIES
GPU_ANNOTATION: Final = "gpu_user_annotation"
OPERATOR_CATEGORIES: Final = frozenset({"cpu_op", "operator"})
ANNOTATION_CATEGORIES: Final = frozenset({"user_annotation", "cpu_op", "operator"})
IGNORED_CATEGORIES: Final = frozenset({"python_function", "ac2g", "fwdbwd", "async_cpu_to_gpu", "trace"})
COLLECTIVE_NAME: Final = "Collective name"
PARAMETERS: Final = "record_param_comms"  # the operator that has the arguments of a collective
UNKNOWN_ID: Final = -1
MAX_ID: Final = 2**63 - 1
MAX_TIME_US: Final = 1e16
MAX_NAMED_BAD_EVENTS: Final = 3
MAX_RANKS_TEXT: Final = 2**16


class CollectiveArgs(NamedTuple):
    """Hold the arguments of a collective without its sequence number. Many collectives share one object."""

    op: str
    group: str
    description: str
    ranks: str  # "[0, 1]", possibly truncated with "..."
    stride: tuple[int, int, int] | None  # first rank, stride, and number of ranks
    payload_bytes: int | None  # None: not recorded


class DeviceEvent(NamedTuple):
    """Describe a communication kernel. Times are microseconds of the trace."""

    op: str  # from the name of the kernel, "" if the name has none
    began: float
    duration: float
    stream: int
    correlation: int
    external: int
    args: CollectiveArgs | None
    sequence: int | None


class Annotation(NamedTuple):
    """Describe a collective on the CPU: its launch, or with gloo the collective itself."""

    library: str  # "" for record_param_comms
    op: str
    began: float
    ended: float
    thread: int
    external: int
    args: CollectiveArgs | None
    sequence: int | None


class StepMark(NamedTuple):
    """Describe a ProfilerStep annotation. `stream`: -1 on the CPU."""

    began: float
    ended: float
    number: int
    stream: int


class Launches:
    """Store the time and the thread of launches by correlation id and by External id."""

    def __init__(self) -> None:
        self.correlations, self.external = _Ids(), _Ids()

    def resolve(self, correlations: set[int], external: set[int]) -> None:
        """Build the lookup tables of the ids in use."""
        self.correlations.resolve(correlations)
        self.external.resolve(external)


class _Ids:
    """Store (id, time, thread) in columns."""

    def __init__(self) -> None:
        self._ids, self._times, self._threads = array("q"), array("d"), array("q")
        self._found: dict[int, tuple[float, int]] = {}
        self.first: int | None = None  # the smallest id

    def add(self, number: int, time: float, thread: int) -> None:
        self._ids.append(number)
        self._times.append(time)
        self._threads.append(thread)

    def resolve(self, wanted: set[int]) -> None:
        self.first = min(self._ids, default=None)
        for number, time, thread in zip(self._ids, self._times, self._threads, strict=True):
            if number in wanted and number not in self._found:
                self._found[number] = time, thread
        self._ids, self._times, self._threads = array("q"), array("d"), array("q")

    def get(self, number: int) -> tuple[float, int] | None:
        return self._found.get(number)


class Intervals:
    """Store intervals in columns, with the ids that lead to their launch."""

    def __init__(self) -> None:
        self.began, self.ended = array("d"), array("d")
        self.streams, self.correlations, self.external = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self.began)

    def add(self, began: float, ended: float, stream: int, correlation: int, external: int) -> None:
        self.began.append(began)
        self.ended.append(ended)
        self.streams.append(stream)
        self.correlations.append(correlation)
        self.external.append(external)


class KinetoEvents:
    """Collect the events of one trace. A bad event is left out, with a note."""

    def __init__(self, source: TraceFile) -> None:
        self._source = source
        self.collectives: list[DeviceEvent] = []
        self.annotations: list[Annotation] = []
        self.kernels, self.copies = Intervals(), Intervals()
        self.operators: dict[int, tuple[array[float], array[float]]] = defaultdict(lambda: (array("d"), array("d")))
        self.steps: list[StepMark] = []
        self.launches = Launches()
        self.num_begin_end = 0
        self._bad: Counter[str] = Counter()
        self._threads: dict[tuple[str, str], int] = {}
        self._args: dict[CollectiveArgs, CollectiveArgs] = {}
        self._add_by_category: dict[str, Callable[[int, dict[str, Any]], None]] = {
            **dict.fromkeys(KERNEL_CATEGORIES, self._add_kernel),
            **dict.fromkeys(COPY_CATEGORIES, self._add_copy),
            **dict.fromkeys(IGNORED_CATEGORIES, lambda index, event: None),
            GPU_ANNOTATION: self._add_gpu_annotation,
        }

    @property
    def has_device_events(self) -> bool:
        return bool(self.collectives or len(self.kernels) or len(self.copies))

    def add(self, index: int, event: Any) -> None:
        """Add a member of `traceEvents`. Events that are not imported are ignored."""
        if not isinstance(event, dict):
            self._add_bad(f"traceEvents[{index}]: the event is not a JSON object")
            return
        phase = event.get("ph")
        if phase != "X":
            self.num_begin_end += phase == "B"
            return
        category = event.get("cat")
        category = category.lower() if isinstance(category, str) else ""
        self._add_by_category.get(category, self._add_cpu_event)(index, event)

    def _add_bad(self, description: str) -> None:
        self._bad[description if len(self._bad) < MAX_NAMED_BAD_EVENTS else ""] += 1

    def add_notes(self) -> None:
        """Add notes about events that were left out."""
        for description, number in self._bad.items():
            if description:
                self._source.add_note(f"{description}, so this event is left out")
            else:
                self._source.add_note(f"{number:,} further invalid events are left out")
        if self.num_begin_end:
            self._source.add_note(
                f"{self.num_begin_end:,} events with separate begin and end (`ph` is `B`) are left out, "
                "because torch.profiler writes complete events (`ph` is `X`)"
            )

    def _get_times(
        self, index: int, event: dict[str, Any], *, needs_duration: bool = True
    ) -> tuple[float, float] | None:
        """Return the begin and the duration of an event in microseconds, or None for a bad event."""
        began, duration = event.get("ts"), event.get("dur") if needs_duration else 0
        for name, value in (("ts", began), ("dur", duration)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MAX_TIME_US:
                shown = "missing" if value is None else repr(str(value)[:40]) if isinstance(value, str) else None
                shown = shown or (str(value)[:40] if isinstance(value, int | float) else f"a {type(value).__name__}")
                self._add_bad(f"traceEvents[{index}].{name} is {shown}, and a number of microseconds is expected")
                return None
        assert isinstance(began, int | float)
        assert isinstance(duration, int | float)
        return float(began), float(duration)

    def _get_lane(self, event: dict[str, Any]) -> int:
        """Return a small number for a process and thread, or for a device and stream."""
        key = str(event.get("pid"))[:60], str(event.get("tid"))[:60]
        return self._threads.setdefault(key, len(self._threads))

    def get_device(self, stream: int) -> str:
        """Return the device of a stream."""
        if not hasattr(self, "_devices"):
            self._devices = {lane: device for (device, _), lane in self._threads.items()}
        return self._devices.get(stream, "")

    def _add_kernel(self, index: int, event: dict[str, Any]) -> None:
        times = self._get_times(index, event)
        if times is None:
            return
        began, duration = times
        args = _get_args(event)
        name = _get_text(event.get("name"))
        head = SIGNATURE.split(name, maxsplit=1)[0]
        stream, correlation, external = self._get_lane(event), _get_id(args, "correlation"), _get_external(args)
        if COLLECTIVE_NAME not in args and not COLLECTIVE_KERNEL.search(head):
            self.kernels.add(began, began + duration, stream, correlation, external)
            return
        if len(self.collectives) >= MAX_EVENTS:
            message = f"The file has more than {MAX_EVENTS:,} collectives. Record fewer steps."
            raise ImportProblemError(self._source.name, "traceEvents", message)
        op = KERNEL_OP.search(head)
        ids = stream, correlation, external, self._get_collective_args(args), _get_sequence(args)
        self.collectives.append(DeviceEvent(parse_op(op[0]) if op else "", began, duration, *ids))

    def _add_copy(self, index: int, event: dict[str, Any]) -> None:
        times = self._get_times(index, event)
        if times is None:
            return
        args = _get_args(event)
        ids = _get_id(args, "correlation"), _get_external(args)
        self.copies.add(times[0], times[0] + times[1], self._get_lane(event), *ids)

    def _add_gpu_annotation(self, index: int, event: dict[str, Any]) -> None:
        if step := STEP.fullmatch(_get_text(event.get("name"))):
            self._add_step(index, event, int(step[1]), self._get_lane(event))

    def _add_step(self, index: int, event: dict[str, Any], number: int, stream: int) -> None:
        times = self._get_times(index, event)
        if times is not None and len(self.steps) < MAX_EVENTS:
            self.steps.append(StepMark(times[0], sum(times), number, stream))

    def _add_cpu_event(self, index: int, event: dict[str, Any]) -> None:
        args = _get_args(event)
        correlation, external = _get_id(args, "correlation"), _get_external(args)
        category, name = event.get("cat"), event.get("name")
        is_named = isinstance(category, str) and category.lower() in ANNOTATION_CATEGORIES and isinstance(name, str)
        if correlation == external == UNKNOWN_ID and not is_named:
            return
        is_operator = is_named and str(category).lower() in OPERATOR_CATEGORIES
        times = self._get_times(index, event, needs_duration=is_named)
        if times is None:
            return
        thread = self._get_lane(event)
        if correlation != UNKNOWN_ID:
            self.launches.correlations.add(correlation, times[0], thread)
        if external != UNKNOWN_ID:
            self.launches.external.add(external, times[0], thread)
        if not is_named:
            return
        assert isinstance(name, str)
        if step := STEP.fullmatch(name):
            self._add_step(index, event, int(step[1]), -1)
        elif collective := self._get_collective_args(args):
            ids = external, collective, _get_sequence(args)
            self._add_annotation(Annotation("", collective.op, times[0], sum(times), thread, *ids))
        elif library := LIBRARY_EVENT.fullmatch(name):
            self._add_annotation(
                Annotation(library[1], parse_op(name), times[0], sum(times), thread, external, None, None)
            )
        elif is_operator and not name.startswith(("c10d::", PARAMETERS)):
            began, ended = self.operators[thread]
            began.append(times[0])
            ended.append(sum(times))

    def _add_annotation(self, annotation: Annotation) -> None:
        if annotation.op in ("wait", "init"):
            return
        if len(self.annotations) >= MAX_EVENTS:
            message = f"The file has more than {MAX_EVENTS:,} collectives. Record fewer steps."
            raise ImportProblemError(self._source.name, "traceEvents", message)
        self.annotations.append(annotation)

    def _get_collective_args(self, args: dict[str, Any]) -> CollectiveArgs | None:
        if COLLECTIVE_NAME not in args:
            return None
        stride = tuple(args.get(key) for key in ("Global rank start", "Global rank stride", "Group size"))
        parsed = CollectiveArgs(
            op=parse_op(_get_text(args[COLLECTIVE_NAME])),
            group=_get_text(args.get("Process Group Name")),
            description=_get_text(args.get("Process Group Description")),
            ranks=_get_ranks_text(args.get("Process Group Ranks")),
            stride=stride if all(type(value) is int for value in stride) else None,  # type: ignore[arg-type]
            payload_bytes=_get_payload_bytes(args),
        )
        return self._args.setdefault(parsed, parsed)


def _get_args(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _get_text(value: object) -> str:
    """Return a text or a number as text, "" for other values."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    text = str(value)[:MAX_TEXT_LENGTH]
    return text if is_storable(text) else ""


def _get_ranks_text(value: object) -> str:
    if isinstance(value, list):
        value = str(value)
    return value if isinstance(value, str) and len(value) <= MAX_RANKS_TEXT else ""


def _get_id(args: dict[str, Any], name: str) -> int:
    value = args.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_ID else UNKNOWN_ID


def _get_external(args: dict[str, Any]) -> int:
    """Return the External id. Early versions of Kineto wrote it in lower case, and wrote 0 for an unknown launch."""
    number = _get_id(args, "External id" if "External id" in args else "external id")
    return number if number else UNKNOWN_ID


def _get_sequence(args: dict[str, Any]) -> int | None:
    """Return the sequence number of the process group. -1 in a trace means unknown."""
    number = _get_id(args, "Seq")
    return None if number == UNKNOWN_ID else number


def _get_payload_bytes(args: dict[str, Any]) -> int | None:
    """Return the bytes of the larger of input and output, which is the full buffer. None: not recorded."""
    counts = [args.get(name) for name in ("In msg nelems", "Out msg nelems")]
    known = [count for count in counts if type(count) is int and 0 <= count < 2**48]
    element_bytes = get_element_bytes(args.get("dtype"))
    return max(known) * element_bytes if known and element_bytes else None
