"""Pipeline parallelism: run the actions of `planner.facts.schedules` and exchange their messages.

Messages between two ranks travel in the order in which the sender produces them. Both ranks know the action list of
every rank, so messages need no tag. NCCL does not support tags.
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


class SendQueue:
    """Keep tensors until they are sent. On gloo, a thread waits for each send in order."""

    def __init__(self) -> None:
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []
        self._queue: Queue[tuple[dist.Work, torch.Tensor] | None] = Queue()
        self._errors: list[Exception] = []
        self._thread: Thread | None = None

    def add(self, work: dist.Work, sent: torch.Tensor) -> None:
        if sent.device.type != "cpu":
            self._pending = [(other, tensor) for other, tensor in self._pending if not other.is_completed()]
            self._pending.append((work, sent))
            return
        if self._thread is None:
            self._thread = Thread(target=_wait_for_each, args=(self._queue, self._errors), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None)
        self._queue.put((work, sent))

    def flush(self) -> None:
        """Wait until all tensors are sent."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
        self._queue.join()
        if self._errors:
            raise self._errors[0]


def _wait_for_each(sends: Queue[tuple[dist.Work, torch.Tensor] | None], errors: list[Exception]) -> None:
    while (send := sends.get()) is not None:
        try:
            send[0].wait()
        except Exception as error:  # `flush` raises the error.
            errors.append(error)
        del send  # Free the tensor before `task_done`.
        sends.task_done()


class StageChannel:
    """Send hidden states to other stages, and their gradients back.

    A message has `shape` (batch, seq, hidden). With `scatter_gather`, each tp rank sends a part, and the receivers
    gather (2104.04473, section 4.1).
    """

    def __init__(
        self, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, tp: TensorParallel
    ) -> None:
        self._mesh, self._shape, self._dtype, self._device = mesh, torch.Size(shape), dtype, device
        self._tp = tp if mesh.layout.scatter_gather else TensorParallel(None)
        self._owners = get_chunk_stages(mesh.layout)
        self._local: dict[Message, torch.Tensor] = {}
        self._to_send: dict[Message, tuple[torch.Tensor, torch.cuda.Event | None]] = {}
        self._arriving: dict[Message, tuple[torch.Tensor, dist.Work]] = {}
        self._sends, self._aside = SendQueue(), SideStream(device)
        me = mesh.coordinates.pp
        for sender, receiver in (link for link in get_links(mesh.layout) if me in link):
            group = self._group(sender, receiver)
            assert group is not None
            connect_pair(group, receiver if me == sender else sender, sends=me == sender)

    def put(self, message: Message, x: torch.Tensor) -> None:
        """Provide a message for the rank of its chunk, which can be this rank."""
        if self._owners[message.chunk] == self._mesh.coordinates.pp:
            self._local[message] = x.detach()
            return
        part = self._tp.flat_part(x.detach().contiguous())
        self._to_send[message] = part, self._aside.record_event()

    def exchange(self, exchanges_now: Iterable[Exchange]) -> None:
        """Start sends and receives, which overlap with computation."""
        for message, sender, receiver in exchanges_now:
            group = self._group(sender, receiver)
            if receiver == self._mesh.coordinates.pp:
                part = torch.empty(self._shape.numel() // self._tp.degree, dtype=self._dtype, device=self._device)
                work = dist.irecv(part, self._mesh.pp_ranks[sender], group=group)
                assert work is not None
                self._arriving[message] = part, work
                continue
            part, made = self._to_send.pop(message)
            with self._aside.after(made):
                work = dist.isend(part, self._mesh.pp_ranks[receiver], group=group)
            assert work is not None
            self._sends.add(work, part)

    def take(self, message: Message) -> torch.Tensor:
        """Wait for a message and return it."""
        if message in self._local:
            return self._local.pop(message)
        part, work = self._arriving.pop(message)
        work.wait()
        return self._tp.from_flat_parts(part, self._shape)

    def flush(self) -> None:
        """Wait until all messages are sent."""
        self._sends.flush()
        assert not self._local, "an unreceived message"
        assert not self._to_send
        assert not self._arriving

    def _group(self, sender: int, receiver: int) -> dist.ProcessGroup | None:
        return self._mesh.pp_forward if sender < receiver else self._mesh.pp_backward


class ChunkRunner(Protocol):
    """Run the chunks of this rank."""

    def forward(self, chunk: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return hidden states, or the loss on the last chunk. `hidden` is None on the first chunk."""

    def backward(
        self, action: Action, output: torch.Tensor, gradient: torch.Tensor | None, *, last: bool, split: bool
    ) -> None:
        """Run backward from the gradient of `output`, which is None on the last chunk.

        `last` marks the last backward of the chunk in this step. With `split`, only input gradients are computed.
        """

    def compute_weight_gradients(self, chunk: int, micro_batch: int, *, last: bool) -> None:
        """Compute the weight gradients that a split backward deferred."""

    def release(self, chunk: int) -> None:
        """Handle the switch to another chunk."""


class ForwardResult(NamedTuple):
    """Store input and output of a forward until its backward. The first chunk has no input."""

    hidden: torch.Tensor | None
    output: torch.Tensor


class PipelineRunner:
    """Run the schedule of training steps and validations on one rank."""

    def __init__(self, layout: Layout, stage: int, micro_batches: int, channel: StageChannel | None) -> None:
        self._order = build_actions(layout, stage, micro_batches)
        self._forwards = [action for action in self._order if action.kind == "F"]
        self._channel, self._last_chunk = channel, get_num_chunks(layout) - 1
        self._exchanges = order_exchanges(layout, micro_batches)[stage]
        self._forward_exchanges = order_exchanges(layout, micro_batches, forwards=True)[stage]
        self._splits = splits_backward(layout)
        self._last_action = {a.chunk: i for i, a in enumerate(self._order) if a.kind in ("B", "W")}

    def run_step(self, chunks: ChunkRunner) -> torch.Tensor | None:
        """Run all forwards and backwards. Return the summed losses on the rank of the last chunk."""
        pending: dict[tuple[int, int], ForwardResult] = {}
        total: torch.Tensor | None = None
        self._exchange(self._exchanges[0])
        for index, action in enumerate(self._order):
            kind, i, chunk = action
            self._release_previous(chunks, self._order, index)
            last = self._last_action[chunk] == index
            if kind == "F":
                pending[chunk, i] = self._forward(chunks, chunk, i)
                total = self._pass_on(action, pending[chunk, i].output, total)
            elif kind == "W":
                chunks.compute_weight_gradients(chunk, i, last=last)
            else:
                self._backward(chunks, action, pending.pop((chunk, i)), last=last)
            self._exchange(self._exchanges[index + 1])
            if kind == "B" and self._splits:
                chunks.compute_weight_gradients(chunk, i, last=last)
        self._flush()
        return total

    def _forward(self, chunks: ChunkRunner, chunk: int, micro_batch: int) -> ForwardResult:
        hidden = self._input(chunk, micro_batch)
        return ForwardResult(hidden, chunks.forward(chunk, micro_batch, hidden))

    def _backward(self, chunks: ChunkRunner, action: Action, pending: ForwardResult, *, last: bool) -> None:
        """Run a backward. Afterwards nothing references the graph or the received messages."""
        _, i, chunk = action
        gradient = self._take(Message("B", chunk, i)) if chunk < self._last_chunk else None
        chunks.backward(action, pending.output, gradient, last=last, split=self._splits)
        if pending.hidden is not None:
            assert pending.hidden.grad is not None
            self._give(Message("B", chunk - 1, i), pending.hidden.grad)

    def run_forward(self, chunks: ChunkRunner) -> torch.Tensor | None:
        """Run only forwards. Return the summed losses on the rank of the last chunk."""
        total: torch.Tensor | None = None
        self._exchange(self._forward_exchanges[0])
        for index, action in enumerate(self._forwards):
            self._release_previous(chunks, self._forwards, index)
            output = chunks.forward(action.chunk, action.micro_batch, self._input(action.chunk, action.micro_batch))
            total = self._pass_on(action, output, total)
            self._exchange(self._forward_exchanges[index + 1])
        self._flush()
        return total

    def _release_previous(self, chunks: ChunkRunner, order: list[Action], index: int) -> None:
        before = order[index - 1] if index else order[index]
        if before.chunk != order[index].chunk:
            chunks.release(before.chunk)

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

    def _exchange(self, exchanges_now: Sequence[Exchange]) -> None:
        if self._channel is not None:
            self._channel.exchange(exchanges_now)

    def _give(self, message: Message, x: torch.Tensor) -> None:
        assert self._channel is not None
        self._channel.put(message, x)

    def _take(self, message: Message) -> torch.Tensor:
        assert self._channel is not None
        return self._channel.take(message)

    def _flush(self) -> None:
        if self._channel is not None:
            self._channel.flush()
