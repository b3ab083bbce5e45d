"""What each rank of a pipe computes in a step, in order.

The chunk of an action is its virtual stage in the whole pipe. Sends and receives follow from the chunks' neighbours.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from planner.facts.layout import chunk_indices
from planner.facts.spec import Layout

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """F forward, B whole backward, I backward of inputs, W backward of weights, of one micro-batch on one chunk."""

    kind: Kind
    micro_batch: int
    chunk: int


def actions(layout: Layout, rank: int, micro_batches: int) -> list[Action]:
    """The order of pipeline rank `rank`. The layout must keep its rules (`planner.facts.spec_rules.problems`)."""
    if layout.pp == 1:
        return [Action(kind, i, 0) for i in range(micro_batches) for kind in ("F", "B")]
    order = _Order(chunk_indices(layout, rank))
    _BUILDERS[layout.schedule](order, rank, layout.pp, micro_batches)
    return order.made


def splits(layout: Layout) -> bool:
    """Whether the schedule computes gradients of inputs and of weights apart."""
    return layout.pp > 1 and layout.schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")


class _Order:
    """Actions so far. Each kind takes the micro-batches of a chunk in turn."""

    def __init__(self, chunks: tuple[int, ...]) -> None:
        self.chunks = chunks
        self.made: list[Action] = []
        self.weights: deque[tuple[int, int]] = deque()  # inputs done, weights not: (chunk, micro-batch)
        self._next: Counter[tuple[str, int]] = Counter()

    def forward(self, local: int) -> None:
        self._add("F", self.chunks[local])

    def backward(self, local: int) -> None:
        self._add("B", self.chunks[local])

    def inputs(self, local: int) -> None:
        chunk = self.chunks[local]
        self.weights.append((chunk, self._add("I", chunk)))

    def pending_weights(self) -> None:
        """The weight gradient that has waited longest, if any."""
        if self.weights:
            chunk, micro_batch = self.weights.popleft()
            self.made.append(Action("W", micro_batch, chunk))

    def done(self, kind: Kind, local: int) -> int:
        return self._next[kind, self.chunks[local]]

    def _add(self, kind: Kind, chunk: int) -> int:
        key = "F" if kind == "F" else "B", chunk  # B and I draw from the same micro-batches
        micro_batch = self._next[key]
        self._next[key] += 1
        self.made.append(Action(kind, micro_batch, chunk))
        return micro_batch


def _naive(order: _Order, rank: int, pp: int, m: int) -> None:
    """One micro-batch at a time through the whole pipe: the model parallelism without a pipeline."""
    for _ in range(m):
        order.forward(0)
        order.backward(0)


def _gpipe(order: _Order, rank: int, pp: int, m: int) -> None:
    """All forwards, then all backwards (1811.06965)."""
    for _ in range(m):
        order.forward(0)
    for _ in range(m):
        order.backward(0)


def _looped_bfs(order: _Order, rank: int, pp: int, m: int) -> None:
    """Breadth first: each chunk takes all micro-batches before the next chunk starts (2211.05953 section 4)."""
    for chunk in order.chunks:
        order.made += [Action("F", i, chunk) for i in range(m)]
    for chunk in reversed(order.chunks):
        order.made += [Action("B", i, chunk) for i in reversed(range(m))]


def _one_forward_one_backward(order: _Order, rank: int, pp: int, m: int) -> None:
    """After pp - rank - 1 forwards, one of each in turn (2104.04473 section 2.2.1)."""
    warm_up = min(m, pp - rank - 1)
    for _ in range(warm_up):
        order.forward(0)
    for _ in range(m - warm_up):
        order.forward(0)
        order.backward(0)
    for _ in range(warm_up):
        order.backward(0)


def _interleaved(order: _Order, rank: int, pp: int, m: int) -> None:
    """Chunks take turns, pp micro-batches each (2104.04473 section 2.2.2)."""
    v = len(order.chunks)
    warm_up = min(m * v, (v - 1) * pp + 2 * (pp - rank - 1))
    for i in range(warm_up):
        order.forward(i // pp % v)
    for i in range(m * v):
        if warm_up + i < m * v:
            order.forward((warm_up + i) // pp % v)
        order.backward(v - 1 - i // pp % v)


def _zero_bubble(order: _Order, rank: int, pp: int, m: int) -> None:
    """Interleaved, with half the warm-up: weight gradients wait until the drain would idle (2401.10241 section 3)."""
    v = len(order.chunks)
    turn = m // max(1, m // pp)
    warm_up = min(m * v, (v - 1) * turn + pp - rank - 1)
    for i in range(warm_up):
        order.forward(i // turn % v)
    for i in range(m * v):
        if warm_up + i < m * v:
            order.forward((warm_up + i) // turn % v)
        order.inputs(v - 1 - i // turn % v)
        if i >= rank:
            order.pending_weights()
    while order.weights:
        order.pending_weights()


def _zbv(order: _Order, rank: int, pp: int, m: int) -> None:
    """Two chunks in a V: the last stage shares a rank with the first (2401.10241 section 6)."""
    down, up = 0, 1
    total = max(2 * pp - 1, m)  # the pattern needs so many; those beyond m are left out
    for _ in range(2 * (pp - rank) - 1):
        order.forward(down)
    for _ in range(rank):
        order.forward(up)
        order.forward(down)
    for _ in range(pp - rank):
        order.forward(up)
        order.inputs(up)
        order.pending_weights()
    while order.done("F", up) < order.done("F", down) or order.done("F", down) < total:
        if order.done("F", down) < total:
            order.forward(down)
        order.inputs(down)
        order.pending_weights()
        order.forward(up)
        order.inputs(up)
        order.pending_weights()
    for _ in range(rank):
        order.inputs(down)
        order.inputs(up)
    late: dict[int, list[tuple[int, int]]] = {chunk: [] for chunk in order.chunks}
    for chunk, micro_batch in order.weights:
        late[chunk].append((chunk, micro_batch))
    first, last = (deque(late[chunk]) for chunk in order.chunks)
    order.weights = first
    for _ in range(pp - rank):
        order.inputs(down)
        order.pending_weights()
    order.weights = last + order.weights
    while order.weights:
        order.pending_weights()
    order.made = [action for action in order.made if action.micro_batch < m]


def _dualpipev(order: _Order, rank: int, pp: int, m: int) -> None:
    """DeepSeek's DualPipe cut in half, in a V (2412.19437 section 3.2.1).

    Its overlapped pairs are a forward followed by a backward here.
    """
    down, up = 0, 1
    for _ in range(2 * (pp - rank - 1)):
        order.forward(down)
    for _ in range(rank + 1):
        order.forward(down)
        order.forward(up)
    for _ in range(pp - rank - 1):
        order.inputs(up)
        order.pending_weights()
        order.forward(up)
    for _ in range(m - 2 * pp + rank + 1):
        order.forward(down)
        order.backward(up)
        order.forward(up)
        order.backward(down)
    for _ in range(pp - rank - 1):
        order.backward(up)
        order.forward(up)
        order.backward(down)
    split = False
    for i in range(rank + 1):
        split = split or (i == (rank + 1) // 2 and rank % 2 == 1)
        (order.inputs if split else order.backward)(up)
        split = split or (i == (rank + 1) // 2 and rank % 2 == 0)
        (order.inputs if split else order.backward)(down)
    for _ in range(pp - rank - 1):
        order.pending_weights()
        (order.inputs if split else order.backward)(down)
    while order.weights:
        order.pending_weights()


_BUILDERS: dict[str, Callable[[_Order, int, int, int], None]] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _looped_bfs,
    "interleaved_zero_bubble": _zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
