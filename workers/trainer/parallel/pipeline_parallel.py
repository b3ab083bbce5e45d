"""The engine that runs a rank's list of actions (`planner.facts.schedules`), and its messages.

A message travels between two ranks in the order in which the sender's list produces it, whatever order the receiver
needs it in; a receiver knows every sender's list. So no message needs a tag, which NCCL has not.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from queue import Queue
from threading import Thread
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from planner.facts.layout import chunk_indices, num_chunks
from planner.facts.schedules import Action, actions, splits
from planner.facts.spec import Layout
from workers.torch_private.groups import connect_pair
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.parallel.tensor_parallel import TensorParallel


class Message(NamedTuple):
    """Hidden states into a chunk (F), or the gradient of its output (B)."""

    kind: Literal["F", "B"]
    chunk: int
    micro_batch: int


def message_of(action: Action, last_chunk: int) -> Message | None:
    """What an action gives to the chunk after or before it, if anything."""
    if action.kind == "F":
        return Message("F", action.chunk + 1, action.micro_batch) if action.chunk < last_chunk else None
    if action.kind == "W" or action.chunk == 0:
        return None
    return Message("B", action.chunk - 1, action.micro_batch)


def owners(layout: Layout) -> dict[int, int]:
    """Pipeline rank by chunk."""
    return {chunk: stage for stage in range(layout.pp) for chunk in chunk_indices(layout, stage)}


def links(layout: Layout) -> list[tuple[int, int]]:
    """(sender, receiver) of all messages, by stage, in an order in which each rank can meet the other of its own."""
    owner = owners(layout)
    ways = {(owner[chunk], owner[chunk + 1]) for chunk in range(num_chunks(layout) - 1)}
    both = ways | {(receiver, sender) for sender, receiver in ways}
    return sorted((link for link in both if link[0] != link[1]), key=lambda link: (sorted(link), link))


class Sends:
    """Keeps what is being sent until it has left. gloo says so only to who waits for it: a thread does, in order."""

    def __init__(self) -> None:
        self._asked: list[tuple[dist.Work, torch.Tensor]] = []
        self._waited_for: Queue[tuple[dist.Work, torch.Tensor] | None] = Queue()
        self._errors: list[Exception] = []
        self._thread: Thread | None = None

    def add(self, work: dist.Work, sent: torch.Tensor) -> None:
        if sent.device.type != "cpu":
            self._asked = [(other, kept) for other, kept in self._asked if not other.is_completed()]
            self._asked.append((work, sent))
            return
        if self._thread is None:
            self._thread = Thread(target=_wait_for_each, args=(self._waited_for, self._errors), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._waited_for.put, None)
        self._waited_for.put((work, sent))

    def flush(self) -> None:
        """Wait until everything has left."""
        for work, _ in self._asked:
            work.wait()
        self._asked.clear()
        self._waited_for.join()
        if self._errors:
            raise self._errors[0]


def _wait_for_each(sends: Queue[tuple[dist.Work, torch.Tensor] | None], errors: list[Exception]) -> None:
    while (send := sends.get()) is not None:
        try:
            send[0].wait()
        except Exception as error:  # the peer is gone; whoever flushes hears of it
            errors.append(error)
        del send  # before the queue says that it is done
        sends.task_done()


class Boundary:
    """Hidden states to other stages and their gradients back. Sends are kept until they have left.

    A message has `shape` (batch, seq, hidden); with `scatter_gather` each tp rank sends its part, and the receivers
    gather (2104.04473 section 4.1).
    """

    def __init__(
        self, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, tp: TensorParallel
    ) -> None:
        self._mesh, self._shape, self._dtype, self._device = mesh, torch.Size(shape), dtype, device
        self._tp = tp if mesh.layout.scatter_gather else TensorParallel(None)
        self._owners = owners(mesh.layout)
        self._here: dict[Message, torch.Tensor] = {}
        self._expected: dict[int, deque[Message]] = {}
        self._arriving: dict[int, tuple[Message, torch.Tensor, dist.Work]] = {}
        self._sends = Sends()
        me = mesh.place.pp
        for sender, receiver in (link for link in links(mesh.layout) if me in link):
            group = self._group(sender, receiver)
            assert group is not None
            connect_pair(group, receiver if me == sender else sender, sends=me == sender)

    def expect(self, lists: Iterable[list[Action]]) -> None:
        """Say what every stage will do, in order."""
        last, me = num_chunks(self._mesh.layout) - 1, self._mesh.place.pp
        for stage, order in enumerate(lists):
            made = (message_of(action, last) for action in order)
            mine = deque(m for m in made if m is not None and self._owners[m.chunk] == me)
            if stage != me and mine:
                self._expected[stage] = mine
                self._receive_ahead(stage)

    def give(self, message: Message, x: torch.Tensor) -> None:
        """Hand over to the rank that holds the message's chunk, be it this one."""
        stage = self._owners[message.chunk]
        if stage == self._mesh.place.pp:
            self._here[message] = x.detach()
            return
        part = self._tp.flat_part(x.detach().contiguous())
        work = dist.isend(part, self._mesh.pipe[stage], group=self._group(self._mesh.place.pp, stage))
        assert work is not None
        self._sends.add(work, part)

    def take(self, message: Message) -> torch.Tensor:
        """Wait for a message."""
        stage = self._sender(message)
        while message not in self._here:
            arrived, part, work = self._arriving.pop(stage)
            work.wait()
            self._here[arrived] = self._tp.from_flat_parts(part, self._shape)
            self._receive_ahead(stage)
        return self._here.pop(message)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        self._sends.flush()
        assert not self._here, "a message nobody took"
        assert not self._arriving

    def _sender(self, message: Message) -> int:
        return self._owners[message.chunk + (-1 if message.kind == "F" else 1)]

    def _receive_ahead(self, stage: int) -> None:
        """Post the next receive from a stage, so that it travels while this rank computes."""
        if not self._expected[stage]:
            return
        message = self._expected[stage].popleft()
        buffer = torch.empty(self._shape.numel() // self._tp.degree, dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, self._mesh.pipe[stage], group=self._group(stage, self._mesh.place.pp))
        assert work is not None
        self._arriving[stage] = message, buffer, work

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        return self._mesh.forward if sender < receiver else self._mesh.backward


class Chunks(Protocol):
    """What the engine asks of this rank's chunks."""

    def forward(self, chunk: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Hidden states, or the loss on the last chunk; `hidden` is None on the first."""

    def backward(
        self, action: Action, output: torch.Tensor, gradient: torch.Tensor | None, *, last: bool, split: bool
    ) -> None:
        """From the gradient of `output`, None on the last chunk. `last` of the chunk in this step; `split`: only
        gradients of inputs."""

    def weights(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        """The weight gradients that a split backward left."""

    def leave(self, chunk: int) -> None:
        """Called when what comes next is another chunk's."""


class Pending(NamedTuple):
    """A forward whose backward is to come: what went into it (none into the first chunk) and what came out."""

    hidden: torch.Tensor | None
    output: torch.Tensor


class Pipeline:
    """Runs steps and validations of one rank."""

    def __init__(self, layout: Layout, stage: int, micro_batches: int, boundary: Boundary | None) -> None:
        self._lists = [actions(layout, rank, micro_batches) for rank in range(layout.pp)]
        self._order, self._boundary, self._last_chunk = self._lists[stage], boundary, num_chunks(layout) - 1
        self._stage = stage
        self._splits = splits(layout)
        self._final = {a.chunk: i for i, a in enumerate(self._order) if a.kind in ("B", "W")}

    def step(self, chunks: Chunks) -> torch.Tensor | None:
        """All forwards and backwards. Returns the summed losses on the rank of the last chunk."""
        self._expect(self._lists)
        pending: dict[tuple[int, int], Pending] = {}
        total: torch.Tensor | None = None
        for index, action in enumerate(self._order):
            kind, i, chunk = action
            self._leave(chunks, self._order, index)
            last = self._final[chunk] == index
            if kind == "F":
                pending[chunk, i] = self._forward(chunks, chunk, i)
                total = self._pass_on(action, pending[chunk, i].output, total)
                continue
            if kind != "W":
                self._backward(chunks, action, pending.pop((chunk, i)), last=last)
            if kind == "W" or (kind == "B" and self._splits):
                chunks.weights(chunk, i, last=last)
        self._flush()
        return total

    def _forward(self, chunks: Chunks, chunk: int, micro_batch: int) -> Pending:
        hidden = self._input(chunk, micro_batch)
        return Pending(hidden, chunks.forward(chunk, micro_batch, hidden))

    def _backward(self, chunks: Chunks, action: Action, pending: Pending, *, last: bool) -> None:
        """When it returns nothing holds the graph any more, nor the messages that came in."""
        _, i, chunk = action
        gradient = self._take(Message("B", chunk, i)) if chunk < self._last_chunk else None
        chunks.backward(action, pending.output, gradient, last=last, split=self._splits)
        if pending.hidden is not None:
            assert pending.hidden.grad is not None
            self._give(Message("B", chunk - 1, i), pending.hidden.grad)

    def forward(self, chunks: Chunks) -> torch.Tensor | None:
        """Forwards only, as a validation does. Returns the summed losses on the rank of the last chunk."""
        forwards = [[action for action in order if action.kind == "F"] for order in self._lists]
        self._expect(forwards)
        total: torch.Tensor | None = None
        for index, action in enumerate(forwards[self._stage]):
            self._leave(chunks, forwards[self._stage], index)
            output = chunks.forward(action.chunk, action.micro_batch, self._input(action.chunk, action.micro_batch))
            total = self._pass_on(action, output, total)
        self._flush()
        return total

    def _leave(self, chunks: Chunks, order: list[Action], index: int) -> None:
        before = order[index - 1] if index else order[index]
        if before.chunk != order[index].chunk:
            chunks.leave(before.chunk)

    def _input(self, chunk: int, micro_batch: int) -> torch.Tensor | None:
        if chunk == 0:
            return None
        hidden = self._take(Message("F", chunk, micro_batch))
        return hidden.requires_grad_() if torch.is_grad_enabled() else hidden

    def _pass_on(self, action: Action, output: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor | None:
        message = message_of(action, self._last_chunk)
        if message is not None:
            self._give(message, output)
            return total
        return output.detach() if total is None else total + output.detach()

    def _expect(self, lists: list[list[Action]]) -> None:
        if self._boundary is not None:
            self._boundary.expect(lists)

    def _give(self, message: Message, x: torch.Tensor) -> None:
        assert self._boundary is not None
        self._boundary.give(message, x)

    def _take(self, message: Message) -> torch.Tensor:
        assert self._boundary is not None
        return self._boundary.take(message)

    def _flush(self) -> None:
        if self._boundary is not None:
            self._boundary.flush()
