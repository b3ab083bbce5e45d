"""Run the actions of a rank (`planner.facts.schedules`) and its messages (`planner.facts.pipeline_messages`).

A message travels between two ranks in the order in which the sender's list produces it, whatever order the receiver
needs it in: both know every rank's list. So no message needs a tag, which NCCL has not.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from queue import Queue
from threading import Thread
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from planner.facts.layout import get_num_chunks
from planner.facts.pipeline_messages import (
    Exchange,
    Message,
    get_chunk_stages,
    get_links,
    get_sent_message,
    order_exchanges,
)
from planner.facts.schedules import Action, build_actions, splits_backward
from planner.facts.spec import Layout
from workers.device import SideStream
from workers.torch_private.groups import connect_pair
from workers.trainer.parallel.mesh import Mesh
from workers.trainer.parallel.tensor_parallel import TensorParallel


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
        self._owners = get_chunk_stages(mesh.layout)
        self._here: dict[Message, torch.Tensor] = {}
        self._to_send: dict[Message, tuple[torch.Tensor, torch.cuda.Event | None]] = {}
        self._arriving: dict[Message, tuple[torch.Tensor, dist.Work]] = {}
        self._sends, self._aside = Sends(), SideStream(device)
        me = mesh.place.pp
        for sender, receiver in (link for link in get_links(mesh.layout) if me in link):
            group = self._group(sender, receiver)
            assert group is not None
            connect_pair(group, receiver if me == sender else sender, sends=me == sender)

    def give(self, message: Message, x: torch.Tensor) -> None:
        """Have a message ready for the rank that holds its chunk, be it this one."""
        if self._owners[message.chunk] == self._mesh.place.pp:
            self._here[message] = x.detach()
            return
        part = self._tp.flat_part(x.detach().contiguous())
        self._to_send[message] = part, self._aside.record_event()

    def exchange(self, asked: Iterable[Exchange]) -> None:
        """Ask for messages, which travel while this rank computes."""
        for message, sender, receiver in asked:
            group = self._group(sender, receiver)
            if receiver == self._mesh.place.pp:
                part = torch.empty(self._shape.numel() // self._tp.degree, dtype=self._dtype, device=self._device)
                work = dist.irecv(part, self._mesh.pipe[sender], group=group)
                assert work is not None
                self._arriving[message] = part, work
                continue
            part, made = self._to_send.pop(message)
            with self._aside.after(made):
                work = dist.isend(part, self._mesh.pipe[receiver], group=group)
            assert work is not None
            self._sends.add(work, part)

    def take(self, message: Message) -> torch.Tensor:
        """Wait for a message."""
        if message in self._here:
            return self._here.pop(message)
        part, work = self._arriving.pop(message)
        work.wait()
        return self._tp.from_flat_parts(part, self._shape)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        self._sends.flush()
        assert not self._here, "an unreceived message"
        assert not self._to_send
        assert not self._arriving

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
        self._order = build_actions(layout, stage, micro_batches)
        self._forwards = [action for action in self._order if action.kind == "F"]
        self._boundary, self._last_chunk = boundary, get_num_chunks(layout) - 1
        self._exchanges = order_exchanges(layout, micro_batches)[stage]
        self._forward_exchanges = order_exchanges(layout, micro_batches, forwards=True)[stage]
        self._splits = splits_backward(layout)
        self._final = {a.chunk: i for i, a in enumerate(self._order) if a.kind in ("B", "W")}

    def step(self, chunks: Chunks) -> torch.Tensor | None:
        """All forwards and backwards. Returns the summed losses on the rank of the last chunk."""
        pending: dict[tuple[int, int], Pending] = {}
        total: torch.Tensor | None = None
        self._exchange(self._exchanges[0])
        for index, action in enumerate(self._order):
            kind, i, chunk = action
            self._leave(chunks, self._order, index)
            last = self._final[chunk] == index
            if kind == "F":
                pending[chunk, i] = self._forward(chunks, chunk, i)
                total = self._pass_on(action, pending[chunk, i].output, total)
            elif kind == "W":
                chunks.weights(chunk, i, last=last)
            else:
                self._backward(chunks, action, pending.pop((chunk, i)), last=last)
            self._exchange(self._exchanges[index + 1])
            if kind == "B" and self._splits:
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
        total: torch.Tensor | None = None
        self._exchange(self._forward_exchanges[0])
        for index, action in enumerate(self._forwards):
            self._leave(chunks, self._forwards, index)
            output = chunks.forward(action.chunk, action.micro_batch, self._input(action.chunk, action.micro_batch))
            total = self._pass_on(action, output, total)
            self._exchange(self._forward_exchanges[index + 1])
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
        message = get_sent_message(action, self._last_chunk)
        if message is not None:
            self._give(message, output)
            return total
        return output.detach() if total is None else total + output.detach()

    def _exchange(self, asked: Sequence[Exchange]) -> None:
        if self._boundary is not None:
            self._boundary.exchange(asked)

    def _give(self, message: Message, x: torch.Tensor) -> None:
        assert self._boundary is not None
        self._boundary.give(message, x)

    def _take(self, message: Message) -> torch.Tensor:
        assert self._boundary is not None
        return self._boundary.take(message)

    def _flush(self) -> None:
        if self._boundary is not None:
            self._boundary.flush()
