"""Messages to bytes and back, checked both ways: what does not fit its type is refused, never half understood.

A reader ignores fields it does not know, so a newer writer may add some; another `v` is refused.
"""

from __future__ import annotations

from typing import Any, cast

import msgpack
from pydantic import TypeAdapter, ValidationError

from contracts.allocations import AllocationOrder
from contracts.control import AttemptReport, Event, ExitReport, LaunchOrder
from contracts.join import JoinRequest
from contracts.loans import LendOrder, Loan
from contracts.logs import PART_BYTES, LogOrder, LogPart
from contracts.telemetry.batches import Batch, Frame, Item

EVENT_BYTES = 8 * 2**20
EXIT_BYTES = 2 * 2**20
REPORT_BYTES = 2 * EXIT_BYTES
FRAME_BYTES = 8 * 2**20
BATCH_BYTES = 256 * 2**10
LOG_PART_BYTES = PART_BYTES + 4096


class BadMessageError(ValueError):
    """Bytes that are no message of the type asked for; says which field is wrong and how."""


def encode_event(event: Event) -> bytes:
    """Raises BadMessageError."""
    return _encode(_EVENT, event, EVENT_BYTES)


def decode_event(body: bytes) -> Event:
    """Raises BadMessageError."""
    return cast(Event, _decode(_EVENT, body, EVENT_BYTES))


def decode_frame(body: bytes) -> Frame:
    """Raises BadMessageError."""
    return cast(Frame, _decode(_FRAME, body, FRAME_BYTES))


def salvage_frame(body: bytes) -> tuple[Frame, list[str]]:
    """A frame with those of its items that fit, and why the others do not.

    Raises:
        BadMessageError: it is no frame.
    """
    frame, problems = _salvaged(_FRAME, _unpacked(body, FRAME_BYTES))
    return cast(Frame, frame), problems


def checked_item(told: object) -> Item:
    """One item of a frame or a batch. Raises BadMessageError."""
    return cast(Item, _checked(_ITEM, told))


def encode_batch(batch: Batch) -> bytes:
    """A batch of checked items. Its size is the caller's to keep: one over BATCH_BYTES is split before."""
    packed: bytes = msgpack.packb(batch)
    return packed


def decode_batch(body: bytes) -> Batch:
    """Raises BadMessageError."""
    return cast(Batch, _decode(_BATCH, body, FRAME_BYTES))


def salvage_batch(body: bytes) -> tuple[Batch, list[str]]:
    """A batch with those of its items that fit, and why the others do not: a newer host may tell what we do not know.

    Raises:
        BadMessageError: it is no batch.
    """
    batch, problems = _salvaged(_BATCH, _unpacked(body, FRAME_BYTES))
    return cast(Batch, batch), problems


def encode_report(report: AttemptReport) -> bytes:
    """Raises BadMessageError."""
    return _encode(_REPORT, report, REPORT_BYTES)


def decode_report(body: bytes) -> AttemptReport:
    """Raises BadMessageError."""
    return cast(AttemptReport, _decode(_REPORT, body, REPORT_BYTES))


def checked_log_order(told: object) -> LogOrder:
    """An order as Celery brought it. Raises BadMessageError."""
    return cast(LogOrder, _checked(_LOG_ORDER, told))


def encode_log_part(part: LogPart) -> bytes:
    """Raises BadMessageError."""
    return _encode(_LOG_PART, part, LOG_PART_BYTES)


def decode_log_part(body: bytes) -> LogPart:
    """Raises BadMessageError."""
    return cast(LogPart, _decode(_LOG_PART, body, LOG_PART_BYTES))


def checked_lend_order(told: object) -> LendOrder:
    """An order as Celery brought it. Raises BadMessageError."""
    return cast(LendOrder, _checked(_LEND_ORDER, told))


def checked_loan(told: object) -> Loan:
    """What a supervisor left for rank 0. Raises BadMessageError."""
    return cast(Loan, _checked(_LOAN, told))


def checked_exit(told: object) -> ExitReport:
    """An exit report read back from JSON. Raises BadMessageError."""
    return cast(ExitReport, _checked(_EXIT, told))


def checked_order(told: object) -> LaunchOrder:
    """An order as Celery brought it. Raises BadMessageError."""
    order = cast(LaunchOrder, _checked(_ORDER, told))
    if "gang" in order:
        node, nodes = order["gang"]["node"], order["gang"]["nodes"]
        if node >= len(nodes):
            raise BadMessageError(f"gang.node is {node}, but the gang has {len(nodes)} hosts")
        if nodes[node]["ranks"] != len(order["slots"]):
            raise BadMessageError(
                f"slots has {len(order['slots'])} entries, but the number of local ranks is {nodes[node]['ranks']}"
            )
    return order


def checked_join(told: object) -> JoinRequest:
    """What a machine asked for over REST. Raises BadMessageError."""
    return cast(JoinRequest, _checked(_JOIN, told))


def checked_allocation(told: object) -> AllocationOrder:
    """An order as a node of an allocation read it. Raises BadMessageError."""
    return cast(AllocationOrder, _checked(_ALLOCATION, told))


def _encode(adapter: TypeAdapter[Any], message: object, most: int) -> bytes:
    packed: bytes = msgpack.packb(_checked(adapter, message))
    if len(packed) > most:
        raise BadMessageError(f"the message has {len(packed):,} bytes, more than the limit of {most:,}")
    return packed


def _decode(adapter: TypeAdapter[Any], body: bytes, most: int) -> Any:
    return _checked(adapter, _unpacked(body, most))


def _salvaged(adapter: TypeAdapter[Any], told: Any) -> tuple[Any, list[str]]:
    """What holds `items`, with those that fit."""
    try:
        return _checked(adapter, told), []
    except BadMessageError:
        if not isinstance(told, dict) or not isinstance(told.get("items"), list):
            raise
    whole = _checked(adapter, {**told, "items": []})
    problems: list[str] = []
    for item in told["items"]:
        try:
            whole["items"].append(_checked(_ITEM, item))
        except BadMessageError as error:
            problems.append(str(error))
    return whole, problems


def _unpacked(body: bytes, most: int) -> Any:
    if len(body) > most:
        raise BadMessageError(f"the message has {len(body):,} bytes, more than the limit of {most:,}")
    try:
        return msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadMessageError(f"not msgpack: {error}") from None


def _checked(adapter: TypeAdapter[Any], told: object) -> Any:
    try:
        return adapter.validate_python(told, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "message"
        raise BadMessageError(f"{field[:200]}: {first['msg'].removeprefix('Value error, ')[:300]}") from None


_EVENT: TypeAdapter[Any] = TypeAdapter(Event)
_FRAME: TypeAdapter[Any] = TypeAdapter(Frame)
_ITEM: TypeAdapter[Any] = TypeAdapter(Item)
_BATCH: TypeAdapter[Any] = TypeAdapter(Batch)
_REPORT: TypeAdapter[Any] = TypeAdapter(AttemptReport)
_EXIT: TypeAdapter[Any] = TypeAdapter(ExitReport)
_ORDER: TypeAdapter[Any] = TypeAdapter(LaunchOrder)
_LOG_ORDER: TypeAdapter[Any] = TypeAdapter(LogOrder)
_LEND_ORDER: TypeAdapter[Any] = TypeAdapter(LendOrder)
_LOAN: TypeAdapter[Any] = TypeAdapter(Loan)
_LOG_PART: TypeAdapter[Any] = TypeAdapter(LogPart)
_JOIN: TypeAdapter[Any] = TypeAdapter(JoinRequest)
_ALLOCATION: TypeAdapter[Any] = TypeAdapter(AllocationOrder)
