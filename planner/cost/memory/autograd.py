"""Model autograd's memory: what forward saves, what backward allocates, and when each tensor is freed.

Rules of torch 2.13 that dry runs show:

- The gradients of an operation are allocated before its saved tensors and its own gradient are freed.
- The sum of two gradients of one tensor is a third tensor.
- The first gradient of a parameter is kept. A later one is added and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from planner.cost.memory.tape import ACTIVATIONS, GRADIENTS, WORKING, Buffer, Stretch, Tape
from planner.facts.precision import FP8_BYTES, FP32_BYTES

GradientSum = Literal["keep", "add", "first master", "master"]


class Tensor:
    """A tensor that autograd follows. With `recomputed`, forward does not save it."""

    __slots__ = ("buffer", "grad", "recomputed")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.grad: Buffer | None = None
        self.recomputed: Recomputed | None = None

    @property
    def num_bytes(self) -> int:
        return self.buffer.num_bytes


class Recomputed:
    """A tensor that backward computes at its first use with `extra_bytes` of workspace, and frees after the last."""

    __slots__ = ("buffer", "extra_bytes", "num_bytes", "uses")

    def __init__(self, num_bytes: int, extra_bytes: int) -> None:
        self.num_bytes, self.extra_bytes = num_bytes, extra_bytes
        self.uses = 0
        self.buffer: Buffer | None = None


class Segment(NamedTuple):
    """A backward up to a weight gradient of `weight` elements, of `grouped` experts or not."""

    tape: Stretch
    weight: int
    grouped: bool


Saved = Buffer | Recomputed


class PendingWeight(NamedTuple):
    """Tensors that make a weight gradient of `weight` elements later, or the gradient itself if `weight` is 0."""

    saved: list[Saved]
    weight: int
    grouped: bool
    narrow: bool


class Graph:
    """Records forwards on a tape and runs their backwards.

    Args:
        element: bytes per element of the compute type.
        sums: what happens to the gradient of a parameter.
        grouped_sums: what happens to the gradients of grouped experts, by default the same.
        waits: weight gradients wait for `compute_weights`.
        narrow: matmuls cast their operands to fp8.
    """

    def __init__(
        self,
        tape: Tape,
        element: int,
        *,
        sums: GradientSum,
        grouped_sums: GradientSum | None = None,
        waits: bool = False,
        narrow: bool = False,
    ) -> None:
        self.tape, self.element, self.waits, self.narrow = tape, element, waits, narrow
        self._sums = {False: sums, True: grouped_sums or sums}
        self.saving = True  # False in the first forward of a checkpointed layer
        self.tied: Buffer | None = None
        self._saves = 0
        self._last_save: int | None = None
        self._num_needed = 0
        self._backwards: list[Callable[[], None]] = []
        self._pending: list[PendingWeight] = []
        self._made: list[tuple[Buffer, int, bool]] = []
        self.segments: list[Segment] = []

    def allocate(self, num_bytes: int, part: int = ACTIVATIONS) -> Tensor:
        return Tensor(self.tape.take(num_bytes, part))

    def drop(self, *tensors: Tensor) -> None:
        """Remove the references of local names to tensors."""
        self.tape.drop(*(v.buffer for v in tensors))

    def save(self, *tensors: Tensor) -> list[Saved]:
        """Save tensors for backward."""
        self._count_save()
        if not self.saving:
            return []
        saved: list[Saved] = []
        for tensor in tensors:
            if tensor.recomputed is not None:
                tensor.recomputed.uses += 1
                saved.append(tensor.recomputed)
            else:
                saved.append(self.tape.hold(tensor.buffer))
        return saved

    def save_bytes(self, num_bytes: int) -> list[Saved]:
        """Save bytes that belong to no tensor."""
        if not num_bytes:
            return []
        saved = [self.tape.take(num_bytes, ACTIVATIONS)] if self.saving else []
        self._count_save()
        return list(saved)

    def _count_save(self) -> None:
        self._saves += 1
        if self._saves == self._last_save:
            self._num_needed = len(self._backwards) + 1
            self.tape.end_deferred()

    def checkpoint(
        self, inputs: Sequence[Tensor], forward: Callable[..., Tensor], *, saved_bytes: int = 0, whole: bool = False
    ) -> Tensor:
        """Run a forward that saves its inputs and `saved_bytes` of its outputs.

        As in torch.utils.checkpoint (2.13), backward runs the forward again at the first use of a saved tensor, up to
        the last saved tensor. With `whole`, as in a reentrant checkpoint, all of it runs before the backward.
        """
        tape, before, self.saving = self.tape, self._saves, False
        out = forward(*inputs)
        saves, self.saving = self._saves - before, True
        saved, outputs = self.save(*inputs), self.save_bytes(saved_bytes)

        def backward() -> None:
            grad, mark = self.take_grad(out), self.count_backwards()
            copies = [Tensor(tape.hold(x.buffer)) for x in inputs]
            tape.defer()
            self._last_save = None if whole else self._saves + saves
            made = forward(*copies)
            self.drop(made)
            made.grad, later = grad, tape.resume()
            if not whole:
                self.run_backward(self._num_needed)
            self.release(outputs)
            tape.replay(later)
            self.run_backward(mark)
            self.release([*(x.buffer for x in copies), *saved])
            for tensor, copy in zip(inputs, copies, strict=True):
                self.add_grad(tensor, self.take_grad(copy))

        self.record(backward)
        return out

    def record(self, backward: Callable[[], None]) -> None:
        """Add the backward of an operation."""
        if self.saving:
            self._backwards.append(backward)

    def apply(
        self,
        inputs: Sequence[Tensor],
        num_bytes: int,
        *,
        saves: Sequence[Tensor] = (),
        extra: int = 0,
        saves_output: bool = False,
    ) -> Tensor:
        """Run an operation on tensors that saves `extra` bytes in addition to `saves`."""
        tape, saved = self.tape, self.save(*saves) + self.save_bytes(extra)
        out = self.allocate(num_bytes)
        if saves_output:
            saved += self.save(out)

        def backward() -> None:
            grad = self.take_grad(out)
            self.recompute(saved)
            grads = [tape.take(v.num_bytes, WORKING) for v in inputs]
            tape.drop(grad)
            self.release(saved)
            for tensor, made in zip(inputs, grads, strict=True):
                self.add_grad(tensor, made)

        self.record(backward)
        return out

    def linear(
        self,
        x: Tensor,
        num_bytes: int,
        weight: int,
        *,
        clones: bool = False,
        grouped: bool = False,
        narrow: bool = True,
        part: int = ACTIVATIONS,
    ) -> Tensor:
        """Run a matmul with a weight of `weight` elements.

        Args:
            clones: the gradient arrives in another order of elements.
            grouped: several experts in one call. Their weight gradients are computed at once, even if others wait.
            narrow: operands may be cast to fp8.
        """
        tape, saved, narrow = self.tape, self.save(x), narrow and self.narrow and not grouped
        num_inputs = x.num_bytes // self.element
        if narrow:
            operands = [cast(tape, elements, self.element) for elements in (num_inputs, weight)]
        out = self.allocate(num_bytes, part)
        if narrow:
            tape.drop(*operands)

        def backward() -> None:
            grad = self.take_grad(out)
            if clones:
                copied = tape.take(grad.num_bytes, WORKING)
                tape.drop(grad)
                grad = copied
            self.recompute(saved)
            rows = [cast(tape, grad.num_bytes // self.element, self.element)] if narrow else []
            waits = self.waits and not grouped
            if narrow:
                made = compute_input_gradient(tape, x.num_bytes, self.element, [weight])
            elif waits:
                made = tape.take(x.num_bytes, WORKING)
            if waits:
                tape.drop(*rows)
                self._pending.append(PendingWeight([grad, *saved], weight, False, narrow))
                self.add_grad(x, made)
                return
            if narrow:
                (weight_grad,) = compute_weight_gradients(tape, num_inputs, self.element, rows, [weight])
            else:
                weight_grad = tape.take(weight * self.element, GRADIENTS)
                made = tape.take(x.num_bytes, WORKING)
            tape.drop(grad, *rows)
            self.release(saved)
            self.add_grad(x, made)
            if self.waits:
                self._pending.append(PendingWeight([weight_grad], 0, grouped, False))
            else:
                self.accumulate(weight_grad, weight, grouped=grouped)

        self.record(backward)
        return out

    def look_up(self, rows: Tensor, weight: int) -> None:
        """Record the backward of a lookup in a table, whose gradient is dense."""

        def backward() -> None:
            grad = self.take_grad(rows)
            made = self.tape.take(weight * self.element, GRADIENTS)
            self.tape.drop(grad)
            if self.waits:
                self._pending.append(PendingWeight([made], 0, False, False))
                return
            if self.tied is not None and weight * self.element == self.tied.num_bytes:
                other, made = made, self.tape.take(made.num_bytes, GRADIENTS)
                self.tape.drop(self.tied, other)
            self.accumulate(made, weight)

        self.record(backward)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a sum, whose gradient both terms share."""
        out = self.allocate(a.num_bytes)

        def backward() -> None:
            grad = self.take_grad(out)
            self.add_grad(a, self.tape.hold(grad))
            self.add_grad(b, grad)

        self.record(backward)
        return out

    def copy(self, x: Tensor) -> Tensor:
        """Return a new tensor of equal size, whose gradient is also that of x: a reordered copy, or x plus a bias."""
        out = self.allocate(x.num_bytes)
        self.record(lambda: self.add_grad(x, self.take_grad(out)))
        return out

    def view(self, x: Tensor) -> Tensor:
        """Return a view of x with a separate gradient."""
        out = Tensor(self.tape.hold(x.buffer))
        self.record(lambda: self.add_grad(x, self.take_grad(out)))
        return out

    def keep_until_backward(self, x: Tensor) -> None:
        """Save x until the backward of all operations that follow has run."""
        saved = self.save(x)
        self.record(lambda: self.release(saved))

    def add_grad(self, tensor: Tensor, grad: Buffer) -> None:
        """Pass a gradient on, with the reference to it."""
        before = tensor.grad
        if before is None:
            tensor.grad = grad
            return
        tensor.grad = self.tape.take(tensor.num_bytes, WORKING)
        self.tape.drop(before, grad)

    def take_grad(self, tensor: Tensor) -> Buffer:
        """Return the gradient of a tensor, and remove it there."""
        grad, tensor.grad = tensor.grad, None
        assert grad is not None
        return grad

    def recompute(self, saved: Sequence[Saved]) -> None:
        """Compute tensors that forward did not save."""
        for tensor in saved:
            if isinstance(tensor, Recomputed) and tensor.buffer is None:
                extra = self.tape.take(tensor.extra_bytes, WORKING)
                tensor.buffer = self.tape.take(tensor.num_bytes, WORKING)
                self.tape.drop(extra)

    def release(self, saved: Sequence[Saved]) -> None:
        """Remove the references of a backward to its saved tensors."""
        for tensor in saved:
            if not isinstance(tensor, Recomputed):
                self.tape.drop(tensor)
                continue
            tensor.uses -= 1
            if not tensor.uses:
                assert tensor.buffer is not None
                self.tape.drop(tensor.buffer)

    def accumulate(self, grad: Buffer, weight: int, *, grouped: bool = False) -> None:
        """Add the new gradient of a parameter to the earlier ones."""
        sums = self._sums[grouped]
        if sums == "first master":
            self.tape.take(weight * FP32_BYTES, GRADIENTS)
        if sums != "keep":
            self.tape.drop(grad)
        if not self.waits:
            self.segments.append(Segment(self.tape.cut(), weight, grouped))

    def count_backwards(self) -> int:
        return len(self._backwards)

    def run_backward(self, remaining: int = 0) -> None:
        """Run the recorded backwards, the last first, until `remaining` are left."""
        while len(self._backwards) > remaining:
            self._backwards.pop()()

    def compute_weights(self) -> None:
        """Compute the pending weight gradients. Each frees its inputs. A matmul adds to an earlier gradient."""
        for pending in self._pending:
            if pending.narrow:
                self._compute_narrow_weight(pending)
                continue
            adds = self._sums[pending.grouped] == "add"
            if pending.weight and adds:
                self.release(pending.saved)
                continue
            if pending.weight:
                made = [self.tape.take(pending.weight * self.element, GRADIENTS)]
                self.release(pending.saved)
            else:
                made = [grad for grad in pending.saved if isinstance(grad, Buffer)]
            if adds:
                self.tape.drop(*made)
            else:
                self._made += [(grad, grad.num_bytes // self.element, pending.grouped) for grad in made]

    def _compute_narrow_weight(self, pending: PendingWeight) -> None:
        """Compute a weight gradient in fp8, which is added in a separate kernel."""
        tape, element, (grad, inputs) = self.tape, self.element, pending.saved
        rows = [cast(tape, grad.num_bytes // element, element)]
        made = compute_weight_gradients(tape, inputs.num_bytes // element, element, rows, [pending.weight])
        tape.drop(*rows)
        if self._sums[False] == "add":
            tape.drop(*made)
        else:
            self._made += [(one, pending.weight, False) for one in made]
        self.release(pending.saved)

    def accumulate_weights(self) -> None:
        """Add the gradients of `compute_weights` to the earlier ones."""
        for grad, weight, grouped in self._made:
            self.accumulate(grad, weight, grouped=grouped)


def cast(tape: Tape, elements: int, element: int, *, transposed: bool = False) -> Buffer:
    """Return an operand in fp8, as `workers/trainer/parallel/matmul.py` casts: scaled, then narrowed."""
    scaled = tape.take(elements * element, WORKING)
    made = tape.take(elements * FP8_BYTES, WORKING)
    tape.drop(scaled)
    if not transposed:  # a second operand is stored by columns
        return made
    columns = tape.take(elements * FP8_BYTES, WORKING)
    tape.drop(made)
    return columns


def compute_input_gradient(tape: Tape, num_bytes: int, element: int, weights: Sequence[int]) -> Buffer:
    """Return the gradient of an input: the sum of fp8 matmuls with weights of these numbers of elements."""
    total = None
    for weight in weights:
        narrow = cast(tape, weight, element, transposed=True)
        made = tape.take(num_bytes, WORKING)
        tape.drop(narrow, *([made] if total else []))
        total = total or made
    assert total is not None
    return total


def compute_weight_gradients(
    tape: Tape, num_inputs: int, element: int, rows: Sequence[Buffer], weights: Sequence[int]
) -> list[Buffer]:
    """Return the weight gradients of fp8 matmuls that share an input. `rows`: output gradients in fp8."""
    columns, made = cast(tape, num_inputs, element, transposed=True), []
    for row, weight in zip(rows, weights, strict=True):
        transposed = tape.take(row.num_bytes, WORKING)
        made.append(tape.take(weight * element, GRADIENTS))
        tape.drop(transposed)
    tape.drop(columns)
    return made
