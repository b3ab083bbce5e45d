"""Build the order of actions of each pipeline rank.

The chunk of an action is its virtual stage in the whole pipeline. `planner.facts.pipeline_messages` derives sends and
receives from it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from planner.facts.layout import V_SCHEDULES, get_chunk_indices
from planner.facts.spec import Layout

ActionKind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """Action of one micro-batch on one chunk.

    F is forward, B is full backward, I is backward of inputs, and W is backward of weights.
    """

    kind: ActionKind
    micro_batch: int
    chunk: int


def build_actions(layout: Layout, rank: int, micro_batches: int) -> list[Action]:
    """Return the actions of pipeline rank `rank` in order. The layout must be valid."""
    if layout.pp == 1:
        return [Action(kind, i, 0) for i in range(micro_batches) for kind in ("F", "B")]
    order = _ScheduleBuilder(get_chunk_indices(layout, rank))
    _BUILDERS[layout.schedule](order, rank, layout.pp, micro_batches)
    return order.actions


def splits_backward(layout: Layout) -> bool:
    """Return whether the schedule splits backward into inputs and weights."""
    return layout.pp > 1 and layout.schedule in ("interleaved_zero_bubble", *V_SCHEDULES)


class _ScheduleBuilder:
    """Ordered actions. Each kind processes the micro-batches of a chunk in order."""

    def __init__(self, chunks: tuple[int, ...]) -> None:
        self.chunks = chunks
        self.actions: list[Action] = []
        # (chunk, micro-batch) whose weight gradients are pending
        self.pending_weights: deque[tuple[int, int]] = deque()
        self._next: Counter[tuple[str, int]] = Counter()

    def forward(self, local: int) -> None:
        self._add("F", self.chunks[local])

    def backward(self, local: int) -> None:
        self._add("B", self.chunks[local])

    def backward_inputs(self, local: int) -> None:
        chunk = self.chunks[local]
        self.pending_weights.append((chunk, self._add("I", chunk)))

    def backward_weights(self) -> None:
        """Add the weight gradient that is pending for the longest time, if any."""
        if self.pending_weights:
            chunk, micro_batch = self.pending_weights.popleft()
            self.actions.append(Action("W", micro_batch, chunk))

    def count_done(self, kind: ActionKind, local: int) -> int:
        return self._next[kind, self.chunks[local]]

    def _add(self, kind: ActionKind, chunk: int) -> int:
        key = "F" if kind == "F" else "B", chunk  # B and I share one counter of micro-batches.
        micro_batch = self._next[key]
        self._next[key] += 1
        self.actions.append(Action(kind, micro_batch, chunk))
        return micro_batch


def _naive(order: _ScheduleBuilder, rank: int, pp: int, m: int) -> None:
    """Run one micro-batch at a time through the whole pipeline."""
    for _ in range(m):
        order.forward(0)
        order.backward(0)


def _gpipe(order: _ScheduleBuilder, rank: int, pp: int, m: int) -> None:
    """Run all forwards, then all backwards (1811.06965)."""
    for _ in range(m):
        order.forward(0)
    for _ in range(m):
        order.backward(0)


def _looped_bfs(order: _ScheduleBuilder, rank: int, pp: int, m: int) -> None:
    """Run all micro-batches of a chunk before the next chunk (2211.05953 section 4)."""
    for chunk in order.chunks:
        order.actions += [Action("F", i, chunk) for i in range(m)]
    for chunk in reversed(order.chunks):
        order.actions += [Action("B", i, chunk) for i in reversed(range(m))]


def _one_forward_one_backward(order: _ScheduleBuilder, rank: int, pp: int, m: int) -> None:
    """Alternate forward and backward after warm-up (2104.04473 section 2.2.1)."""
    warm_up = min(m, pp - rank - 1)
    for _ in range(warm_up):
        order.forward(0)
    for _ in range(m - warm_up):
        order.forward(0)
        order.backward(0)
    for _ in range(warm_up):
        order.backward(0)


def _interleaved(order: _ScheduleBuilder, rank: int, pp: int, m: int) -> None:
    """Alternate chunks, with pp micro-batches each (2104.04473 section 2.2.2)."""
    v = len(order.chunks)
    warm_up = min(m * v, (v - 1) * pp + 2 * (pp - rank - 1))
    for i in range(warm_up):
        order.forward(i // pp % v)
    for i in range(m * v):
        if warm_up + i < m * v:
            order.forward((warm_up + i) // pp % v)
        order.backward(v - 1 - i // pp % v)


def _zero_bubble(order: _ScheduleBuilder, rank: int, pp: int, m: int) -> None:
    """Interleave with half the warm-up, and delay weight gradients (2401.10241 section 3).

    The delayed weight gradients fill the drain of the pipeline.
    """
    v = len(order.chunks)
    turn = m // max(1, m // pp)
    warm_up = min(m * v, (v - 1) * turn + pp - rank - 1)
    for i in range(warm_up):
        order.forward(i // turn % v)
    for i in range(m * v):
        if warm_up + i < m * v:
            order.forward((warm_up + i) // turn % v)
        order.backward_inputs(v - 1 - i // turn % v)
        if i >= rank:
            order.backward_weights()
    while order.pending_weights:
        order.backward_weights()


def _zbv(order: _ScheduleBuilder, rank: int, pp: int, m: int) -> None:
    """Run two chunks per rank in a V, so the first and last stage share a rank.

    Source: 2401.10241 section 6.
    """
    down, up = 0, 1
    total = max(2 * pp - 1, m)  # The pattern needs this many. Those beyond m are removed.
    for _ in range(2 * (pp - rank) - 1):
        order.forward(down)
    for _ in range(rank):
        order.forward(up)
        order.forward(down)
    for _ in range(pp - rank):
        order.forward(up)
        order.backward_inputs(up)
        order.backward_weights()
    while order.count_done("F", up) < order.count_done("F", down) or order.count_done("F", down) < total:
        if order.count_done("F", down) < total:
            order.forward(down)
        order.backward_inputs(down)
        order.backward_weights()
        order.forward(up)
        order.backward_inputs(up)
        order.backward_weights()
    for _ in range(rank):
        order.backward_inputs(down)
        order.backward_inputs(up)
    late: dict[int, list[tuple[int, int]]] = {chunk: [] for chunk in order.chunks}
    for chunk, micro_batch in order.pending_weights:
        late[chunk].append((chunk, micro_batch))
    first, last = (deque(late[chunk]) for chunk in order.chunks)
    order.pending_weights = first
    for _ in range(pp - rank):
        order.backward_inputs(down)
        order.backward_weights()
    order.pending_weights = last + order.pending_weights
    while order.pending_weights:
        order.backward_weights()
    order.actions = [action for action in order.actions if action.micro_batch < m]


def _dualpipev(order: _ScheduleBuilder, rank: int, pp: int, m: int) -> None:
    """Run one half of DualPipe in a V (2412.19437 section 3.2.1).

    An overlapped pair of DualPipe is a forward followed by a backward here.
    """
    down, up = 0, 1
    for _ in range(2 * (pp - rank - 1)):
        order.forward(down)
    for _ in range(rank + 1):
        order.forward(down)
        order.forward(up)
    for _ in range(pp - rank - 1):
        order.backward_inputs(up)
        order.backward_weights()
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
        (order.backward_inputs if split else order.backward)(up)
        split = split or (i == (rank + 1) // 2 and rank % 2 == 0)
        (order.backward_inputs if split else order.backward)(down)
    for _ in range(pp - rank - 1):
        order.backward_weights()
        (order.backward_inputs if split else order.backward)(down)
    while order.pending_weights:
        order.backward_weights()


_BUILDERS: dict[str, Callable[[_ScheduleBuilder, int, int, int], None]] = {
    "naive": _naive,
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved_1f1b": _interleaved,
    "looped_bfs": _looped_bfs,
    "interleaved_zero_bubble": _zero_bubble,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
