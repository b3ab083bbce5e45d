"""Pipeline schedules as lists of forwards and backwards, and the engine that runs one.

GPipe (1811.06965): all forwards, then all backwards. 1F1B (PipeDream-Flush, 2104.04473 section 2.2): after a
warm-up of pp - stage - 1 forwards, one forward and one backward in turn, so no more than pp - stage are in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from planner.spec import Schedule
from workers.trainer.mesh import Mesh


class Action(NamedTuple):
    """Forward (F) or backward (B) of one micro-batch."""

    kind: Literal["F", "B"]
    micro_batch: int


def actions(schedule: Schedule, stage: int, pp: int, num_micro_batches: int) -> list[Action]:
    """What one stage does in a step, in order. With pp 1, a forward and a backward in turn."""
    m = num_micro_batches
    warm_up = m if schedule == "gpipe" and pp > 1 else min(m, pp - stage - 1)
    order = [Action("F", i) for i in range(warm_up)]
    for i in range(warm_up, m):
        order += [Action("F", i), Action("B", i - warm_up)]
    return order + [Action("B", i) for i in range(m - warm_up, m)]


class Boundary:
    """Hidden states to the next stage and their gradients back. Sends are kept until `flush`, then waited for."""

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._mesh, self._shape, self._dtype, self._device = mesh, shape, dtype, device
        self._sends: list[tuple[dist.Work, torch.Tensor]] = []

    def receive_input(self) -> torch.Tensor:
        return self._receive(self._mesh.place.pp - 1, self._mesh.forward)

    def receive_gradient(self) -> torch.Tensor:
        return self._receive(self._mesh.place.pp + 1, self._mesh.backward)

    def send_output(self, x: torch.Tensor) -> None:
        self._send(x, self._mesh.place.pp + 1, self._mesh.forward)

    def send_gradient(self, x: torch.Tensor) -> None:
        self._send(x, self._mesh.place.pp - 1, self._mesh.backward)

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()

    def _receive(self, stage: int, group: dist.ProcessGroup | None) -> torch.Tensor:
        buffer = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        work = dist.irecv(buffer, self._mesh.stage_rank(stage), group=group)
        assert work is not None
        work.wait()
        return buffer

    def _send(self, x: torch.Tensor, stage: int, group: dist.ProcessGroup | None) -> None:
        self._sends = [(work, kept) for work, kept in self._sends if not work.is_completed()]
        x = x.detach().contiguous()
        work = dist.isend(x, self._mesh.stage_rank(stage), group=group)
        assert work is not None
        self._sends.append((work, x))


def run_step(
    order: list[Action],
    mesh: Mesh,
    boundary: Boundary,
    forward: Callable[[int, torch.Tensor | None], torch.Tensor],
    before_backward: Callable[[bool], None],
) -> torch.Tensor | None:
    """Run one step's actions on this stage.

    `forward(micro_batch, hidden)` gives hidden states, or the loss on the last stage; `hidden` is None on the first.
    `before_backward(last)` is called before each backward. Returns the summed losses on the last stage.
    """
    pending: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
    total: torch.Tensor | None = None
    last_micro_batch = max(action.micro_batch for action in order)
    for kind, i in order:
        if kind == "F":
            hidden = None if mesh.is_first else boundary.receive_input().requires_grad_()
            output = forward(i, hidden)
            pending[i] = hidden, output
            if mesh.is_last:
                total = output.detach() if total is None else total + output.detach()
            else:
                boundary.send_output(output)
            continue
        hidden, output = pending.pop(i)
        gradient = None if mesh.is_last else boundary.receive_gradient()
        before_backward(i == last_micro_batch)
        torch.autograd.backward(output, gradient)
        if hidden is not None:
            assert hidden.grad is not None
            boundary.send_gradient(hidden.grad)
    boundary.flush()
    return total


def run_forward(
    num_micro_batches: int,
    mesh: Mesh,
    boundary: Boundary,
    forward: Callable[[int, torch.Tensor | None], torch.Tensor],
) -> torch.Tensor | None:
    """Forwards only, as a validation does. Returns the summed losses on the last stage."""
    total: torch.Tensor | None = None
    for i in range(num_micro_batches):
        output = forward(i, None if mesh.is_first else boundary.receive_input())
        if mesh.is_last:
            total = output if total is None else total + output
        else:
            boundary.send_output(output)
    boundary.flush()
    return total
