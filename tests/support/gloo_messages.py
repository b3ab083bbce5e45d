"""Compute the bytes that gloo puts on its connections, in contrast to payload and algorithmic bytes.

The module follows the algorithms of gloo in torch 2.13.0, message by message. All-reduce, all-gather and reduce use
rings, a broadcast uses a binomial tree, and other operations send directly. A reduce-scatter is an all-reduce of the
whole input, whose other shards are discarded.

The sender announces a message, the receiver requests it, and the message has a header. Each of the three takes
HEADER_BYTES. Here, a place is a rank in a group's own numbering.
"""

from __future__ import annotations

from collections.abc import Sequence

from contracts.telemetry.items import Op

HEADER_BYTES = 48
MAX_SEGMENT_BYTES = 2**20

_Messages = list[tuple[int, int]]  # place it goes to, bytes it carries


def gloo_bytes(
    op: Op, payload_bytes: int, members: Sequence[int], rank: int, root: int | None = None, element_bytes: int = 4
) -> dict[int, int]:
    """Return the bytes that one rank's part in a collective puts on its connection to each peer, with headers.

    Args:
        op: The collective. An all-to-all has equal parts.
        payload_bytes: Metered bytes: the FULL buffer for all_gather, reduce_scatter, gather and scatter.
        members: Global ranks of the group, in the group's order.
        rank: Global rank of the sender.
        root: Global rank of the root of a broadcast, reduce, gather or scatter, or of the peer of a send or recv.
        element_bytes: Size of an element. A segment of a sum is rounded up to it.
    Returns:
        Bytes by global rank of the peer. Peers that receive nothing are omitted.
    Raises:
        ValueError: A rank or root is outside the group, or the root that `op` needs is missing.
    """
    if rank not in members:
        raise ValueError(f"rank {rank} is not in the group {list(members)}")
    if op in ("broadcast", "reduce", "gather", "scatter", "send", "recv") and root not in members:
        raise ValueError(f"{op} needs a root (or other end) in the group {list(members)}, got {root}")
    here, size = members.index(rank), len(members)
    far = 0 if root is None else members.index(root)
    sent = dict.fromkeys(range(size), 0)
    for place in range(size):
        for to, carried in _messages(op, payload_bytes, size, place, here, far, element_bytes):
            if place == here:
                sent[to] += carried + 2 * HEADER_BYTES
            elif to == here:
                sent[place] += HEADER_BYTES
    return {members[place]: total for place, total in sent.items() if total}


def _messages(op: Op, payload: int, size: int, place: int, here: int, far: int, element: int) -> _Messages:
    """Yield the messages of the rank at `place` for the call that the rank at `here` recorded."""
    others = [other for other in range(size) if other != place]
    match op:
        case "all_reduce" | "reduce_scatter":
            return _all_reduce(payload, size, place, element)
        case "all_gather":
            return _all_gather(payload, size, place)
        case "all_to_all":
            return [(other, payload // size) for other in others]
        case "broadcast":
            return _broadcast(payload, size, place, far)
        case "reduce":
            return _reduce(payload, size, place, far, element)
        case "gather":
            return [] if place == far else [(far, payload // size)]
        case "scatter":
            return [(other, payload // size) for other in others] if place == far else []
        case "send":
            return [(far, payload)] if place == here else []
        case "recv":
            return [(here, payload)] if place == far else []
        case "barrier":
            return [((place + 2**turn) % size, 0) for turn in range((size - 1).bit_length())]


def _all_reduce(payload: int, size: int, place: int, element: int) -> _Messages:
    """Yield messages of a ring in segments, two or more per rank, in reverse order. Sums precede their results."""
    if size == 1:
        return []
    count = _round_up(max(_parts(payload, MAX_SEGMENT_BYTES), 2 * size), size)
    segment = _round_up(_parts(payload, count), element)
    each = count // size
    lengths = [
        length
        for start in (place + 1, place)
        for length in _segments(payload, segment, start * each, count - each, count)
    ]
    return [((place - 1) % size, length) for length in lengths]


def _reduce(payload: int, size: int, place: int, root: int, element: int) -> _Messages:
    """Yield messages of an all-reduce's ring for the sums, then each rank's shard to the root.

    gloo sends all segments except two around the ring. With more than two segments per rank, it sends more than a
    ring
    needs.
    """
    if size == 1 or payload == 0:
        return []
    segment = _round_up(min(_parts(payload, 2 * size), MAX_SEGMENT_BYTES), element)
    count = _round_up(max(_parts(payload, segment), 2 * size), size)
    each = count // size
    around = _segments(payload, segment, (place + 1) * each, count - 2, count)
    part = min(each * segment, payload - place * each * segment)
    last = [(root, part)] if place != root and part > 0 else []
    return [*(((place - 1) % size, length) for length in around), *last]


def _all_gather(payload: int, size: int, place: int) -> _Messages:
    """Yield messages of a ring in forward order, with each rank's shard in two halves."""
    part = payload // size
    halves = [part // 2, part - part // 2]
    return [((place + 1) % size, half) for half in halves * (size - 1)]


def _broadcast(payload: int, size: int, place: int, root: int) -> _Messages:
    """Yield messages of a binomial tree. In round i, ranks less than 2^i after the root send 2^i places further."""
    after = (place - root) % size
    steps = [2**turn for turn in range((size - 1).bit_length())]
    return [((place + step) % size, payload) for step in steps if after < step and after + step < size]


def _segments(payload: int, segment: int, first: int, number: int, count: int) -> list[int]:
    """Yield the bytes of `number` segments after the `first`, around a ring of `count`. Skip empty segments."""
    lengths = (min(segment, payload - (first + i) % count * segment) for i in range(number))
    return [length for length in lengths if length > 0]


def _parts(total: int, part: int) -> int:
    return -(-total // part)


def _round_up(number: int, multiple: int) -> int:
    return _parts(number, multiple) * multiple
