"""Encode and decode messages between processes, and validate them in both directions.

A message that does not match its type is refused as a whole. A reader ignores unknown fields, so a newer writer can
add fields. A reader refuses another version `v`.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

import msgpack
from pydantic import TypeAdapter, ValidationError

from contracts.control import AllocationOrder, AttemptReport, Event, ExitReport, LaunchOrder, LendOrder, LoanAddress
from contracts.hosts import JoinRequest
from contracts.logs import MAX_LOG_PART_BYTES, LogOrder, LogPart
from contracts.telemetry.batches import Batch, Frame, Item

MAX_EVENT_BYTES = 8 * 2**20
MAX_EXIT_REPORT_BYTES = 2 * 2**20
MAX_REPORT_BYTES = 2 * MAX_EXIT_REPORT_BYTES
MAX_FRAME_BYTES = 8 * 2**20
MAX_BATCH_BYTES = 256 * 2**10
MAX_LOG_PART_MESSAGE_BYTES = MAX_LOG_PART_BYTES + 4096

T = TypeVar("T")


class BadMessageError(ValueError):
    """A message does not match its type. The text names the first wrong field and its problem."""


class _Codec(Generic[T]):
    """Validate one type of message. Each method raises BadMessageError."""

    def __init__(self, message_type: Any, max_bytes: int = 0) -> None:
        self._adapter: TypeAdapter[Any] = TypeAdapter(message_type)
        self._max_bytes = max_bytes

    def validate(self, message: object) -> T:
        """Return `message` if it matches the type."""
        try:
            return cast(T, self._adapter.validate_python(message, strict=True))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"]) or "message"
            raise BadMessageError(f"{field[:200]}: {first['msg'].removeprefix('Value error, ')[:300]}") from None

    def encode(self, message: T) -> bytes:
        """Return the msgpack bytes of `message`."""
        body: bytes = msgpack.packb(self.validate(message))
        self._check_size(body)
        return body

    def decode(self, body: bytes) -> T:
        """Return the message in msgpack bytes."""
        return self.validate(self._unpack(body))

    def salvage(self, body: bytes) -> tuple[T, list[str]]:
        """Return a frame or batch with its valid items, and the problems of the others.

        A newer host may send items that this version does not know.
        """
        message = self._unpack(body)
        try:
            return self.validate(message), []
        except BadMessageError:
            if not isinstance(message, dict) or not isinstance(message.get("items"), list):
                raise
        salvaged: Any = self.validate({**message, "items": []})
        problems: list[str] = []
        for item in message["items"]:
            try:
                salvaged["items"].append(validate_item(item))
            except BadMessageError as error:
                problems.append(str(error))
        return salvaged, problems

    def _unpack(self, body: bytes) -> Any:
        self._check_size(body)
        try:
            return msgpack.unpackb(body)
        except (ValueError, msgpack.UnpackException) as error:
            raise BadMessageError(f"not msgpack: {error}") from None

    def _check_size(self, body: bytes) -> None:
        if len(body) > self._max_bytes:
            raise BadMessageError(f"the message has {len(body):,} bytes, more than the limit of {self._max_bytes:,}")


_EVENT = _Codec[Event](Event, MAX_EVENT_BYTES)
_FRAME = _Codec[Frame](Frame, MAX_FRAME_BYTES)
_BATCH = _Codec[Batch](Batch, MAX_FRAME_BYTES)
_REPORT = _Codec[AttemptReport](AttemptReport, MAX_REPORT_BYTES)
_LOG_PART = _Codec[LogPart](LogPart, MAX_LOG_PART_MESSAGE_BYTES)
_LAUNCH_ORDER = _Codec[LaunchOrder](LaunchOrder)

encode_event, decode_event = _EVENT.encode, _EVENT.decode
decode_frame, salvage_frame = _FRAME.decode, _FRAME.salvage
decode_batch, salvage_batch = _BATCH.decode, _BATCH.salvage
encode_report, decode_report = _REPORT.encode, _REPORT.decode
encode_log_part, decode_log_part = _LOG_PART.encode, _LOG_PART.decode
validate_item = _Codec[Item](Item).validate
validate_log_order = _Codec[LogOrder](LogOrder).validate
validate_lend_order = _Codec[LendOrder](LendOrder).validate
validate_loan_address = _Codec[LoanAddress](LoanAddress).validate
validate_exit_report = _Codec[ExitReport](ExitReport).validate
validate_join_request = _Codec[JoinRequest](JoinRequest).validate
validate_allocation_order = _Codec[AllocationOrder](AllocationOrder).validate


def encode_batch(batch: Batch) -> bytes:
    """Return the msgpack bytes of a batch whose items are valid.

    The caller splits batches of more than MAX_BATCH_BYTES.
    """
    body: bytes = msgpack.packb(batch)
    return body


def validate_launch_order(message: object) -> LaunchOrder:
    """Return `message` if it is a valid launch order. Raises BadMessageError."""
    order = _LAUNCH_ORDER.validate(message)
    if "gang" in order:
        node, nodes = order["gang"]["node"], order["gang"]["nodes"]
        if node >= len(nodes):
            raise BadMessageError(f"gang.node is {node}, but the gang has {len(nodes)} hosts")
        if nodes[node]["ranks"] != len(order["slots"]):
            raise BadMessageError(
                f"slots has {len(order['slots'])} entries, but the number of local ranks is {nodes[node]['ranks']}"
            )
    return order
