"""Bytes that gloo really puts on its connections, apart from what a collective hands over or would ideally cost.

gloo's own algorithms as of torch 2.13.0, message by message: rings for all-reduce, all-gather and reduce, a binomial
tree for a broadcast, direct messages for the rest; a reduce-scatter is carried as an all-reduce of the whole input,
whose other parts are thrown away. A message is announced by its sender and asked for by its receiver, and carries a
header itself: each of the three is HEADER_BYTES. Ranks in a group's own numbering are called places here.
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
    """Bytes that one rank's part in a collective puts on its connection to each peer, headers and all.

    Args:
        op: The collective. An all-to-all is taken to have equal parts.
        payload_bytes: As metered: the FULL buffer for all_gather, reduce_scatter, gather and scatter.
        members: Global ranks of the group, in the group's order.
        rank: Global rank of the sender.
        root: Global rank of the root of a broadcast, reduce, gather or scatter; of the other end of a send or recv.
        element_bytes: Size of an element, which a segment of a sum is rounded up to.

    Returns:
        Bytes by global rank of the peer; peers that are sent nothing are left out.

    Raises:
        ValueError: For a rank or root outside the group, or without the root that `op` needs.
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
    """What the rank at `place` sends for the call that the rank at `here` has recorded."""
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
    """Backwards around a ring in segments, two or more a rank: sums first, then what they came to."""
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
    """The sums of an all-reduce's ring, then each rank's part to the root.

    gloo goes around for all segments but two, so beyond two segments a rank it sends more than a ring needs.
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
    """Forwards around a ring, each rank's part in two halves."""
    part = payload // size
    halves = [part // 2, part - part // 2]
    return [((place + 1) % size, half) for half in halves * (size - 1)]


def _broadcast(payload: int, size: int, place: int, root: int) -> _Messages:
    """Down a binomial tree: in turn i, those less than 2^i after the root send to the one 2^i further on."""
    after = (place - root) % size
    steps = [2**turn for turn in range((size - 1).bit_length())]
    return [((place + step) % size, payload) for step in steps if after < step and after + step < size]


def _segments(payload: int, segment: int, first: int, number: int, count: int) -> list[int]:
    """Bytes of `number` segments from the `first` on, around a ring of `count`; empty ones are not sent."""
    lengths = (min(segment, payload - (first + i) % count * segment) for i in range(number))
    return [length for length in lengths if length > 0]


def _parts(total: int, part: int) -> int:
    return -(-total // part)


def _round_up(number: int, multiple: int) -> int:
    return _parts(number, multiple) * multiple
