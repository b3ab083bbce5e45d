"""What a product in fp8 holds for a moment: its operands in 8 bits, as `workers/trainer/parallel/matmul.py` casts.

Autograd as far as memory goes: what a forward saves, what its backward makes of it, and when each is let go.

Rules of torch 2.13 that dry runs show: an operation's gradients are made before what it saved and the gradient it was
given are freed; two gradients of one tensor become a third; a parameter's first gradient is kept, a later one is added
and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from planner.cost.memory.tape import ACTIVATIONS, GRADIENTS, WORKING, Buffer, Stretch, Tape
from planner.facts.precision import FP8_BYTES


def cast(tape: Tape, elements: int, element: int, *, turned: bool = False) -> Buffer:
    """Scaled in the compute type, then narrowed; `turned`: and laid by columns, as a second operand must be."""
    scaled = tape.take(elements * element, WORKING)
    made = tape.take(elements * FP8_BYTES, WORKING)
    tape.drop(scaled)
    if not turned:
        return made
    columns = tape.take(elements * FP8_BYTES, WORKING)
    tape.drop(made)
    return columns


def input_gradient(tape: Tape, num_bytes: int, element: int, weights: Sequence[int]) -> Buffer:
    """The sum over products of so many weights' elements."""
    total = None
    for weight in weights:
        narrow = cast(tape, weight, element, turned=True)
        made = tape.take(num_bytes, WORKING)
        tape.drop(narrow, *([made] if total else []))
        total = total or made
    assert total is not None
    return total


def weight_gradients(
    tape: Tape, entered: int, element: int, rows: Sequence[Buffer], weights: Sequence[int]
) -> list[Buffer]:
    """Of an input of so many elements; `rows`: gradients of outputs in 8 bits."""
    columns, made = cast(tape, entered, element, turned=True), []
    for row, weight in zip(rows, weights, strict=True):
        turned = tape.take(row.num_bytes, WORKING)
        made.append(tape.take(weight * element, GRADIENTS))
        tape.drop(turned)
    tape.drop(columns)
    return made


Sums = Literal["keep", "add", "first master", "master"]


class Variable:
    """A tensor that autograd follows. `whole` bytes of its gradient; `remake` where backward must make it again."""

    __slots__ = ("buffer", "grad", "remake")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.grad: Buffer | None = None
        self.remake: Remake | None = None

    @property
    def num_bytes(self) -> int:
        return self.buffer.num_bytes


class Remake:
    """A tensor that forward did not keep: made once when backward first asks, so much `beside` it then, freed after
    the last use."""

    __slots__ = ("beside", "buffer", "num_bytes", "uses")

    def __init__(self, num_bytes: int, beside: int) -> None:
        self.num_bytes, self.beside = num_bytes, beside
        self.uses = 0
        self.buffer: Buffer | None = None


class Segment(NamedTuple):
    """Of a backward, up to a weight gradient of so many elements, of `grouped` experts or not, which is there then."""

    tape: Stretch
    weight: int
    grouped: bool


Kept = Buffer | Remake
# What makes so many elements, or none as it is made; whether grouped, and whether it casts.
Waiting = list[tuple[list[Kept], int, bool, bool]]


class Graph:
    """Records forwards on a tape and runs their backwards.

    `sums` says what becomes of a parameter's gradient, `grouped_sums` of grouped experts' ones; `narrow`: products cast
    their operands to fp8. With `waits`, weight gradients are left for `weights`. Without `saving` nothing is kept, as
    the first forward of a recomputed layer runs.
    """

    def __init__(
        self,
        tape: Tape,
        element: int,
        *,
        sums: Sums,
        grouped_sums: Sums | None = None,
        waits: bool = False,
        narrow: bool = False,
    ) -> None:
        self.tape, self.element, self.waits, self.narrow = tape, element, waits, narrow
        self._sums = {False: sums, True: grouped_sums or sums}
        self.saving = True
        self.tied: Buffer | None = None
        self._saves = 0
        self._last_save: int | None = None
        self._needing = 0
        self._nodes: list[Callable[[], None]] = []
        self._waiting: Waiting = []
        self._made: list[tuple[Buffer, int, bool]] = []
        self.segments: list[Segment] = []

    def variable(self, num_bytes: int, part: int = ACTIVATIONS) -> Variable:
        return Variable(self.tape.take(num_bytes, part))

    def done(self, *variables: Variable) -> None:
        """The name that held them is gone."""
        self.tape.drop(*(v.buffer for v in variables))

    def save(self, *variables: Variable) -> list[Kept]:
        """Keep for backward."""
        self._count()
        if not self.saving:
            return []
        kept: list[Kept] = []
        for variable in variables:
            if variable.remake is not None:
                variable.remake.uses += 1
                kept.append(variable.remake)
            else:
                kept.append(self.tape.hold(variable.buffer))
        return kept

    def save_bytes(self, num_bytes: int) -> list[Kept]:
        """Keep something that no variable is."""
        if not num_bytes:
            return []
        kept = [self.tape.take(num_bytes, ACTIVATIONS)] if self.saving else []
        self._count()
        return list(kept)

    def _count(self) -> None:
        self._saves += 1
        if self._saves == self._last_save:
            self._needing = len(self._nodes) + 1
            self.tape.end_deferred()

    def recomputed(
        self, inputs: Sequence[Variable], forward: Callable[..., Variable], *, kept_bytes: int = 0, whole: bool = False
    ) -> Variable:
        """Forward keeps the inputs and so many bytes of what is between, which backward finds made.

        As with torch's checkpoint (2.13), backward runs it again when the first backward in it asks for what it saved,
        up to the last tensor that it saves; all of it at once where it is `whole`, as with a reentrant checkpoint.
        """
        tape, before, self.saving = self.tape, self._saves, False
        out = forward(*inputs)
        saves, self.saving = self._saves - before, True
        kept, outputs = self.save(*inputs), self.save_bytes(kept_bytes)

        def run() -> None:
            grad, mark = self.taken(out), self.mark()
            again = [Variable(tape.hold(x.buffer)) for x in inputs]
            tape.defer()
            self._last_save = None if whole else self._saves + saves
            made = forward(*again)
            self.done(made)
            made.grad, later = grad, tape.resume()
            if not whole:
                self.backward(self._needing)
            self.release(outputs)
            tape.replay(later)
            self.backward(mark)
            self.release([*(x.buffer for x in again), *kept])
            for variable, copy in zip(inputs, again, strict=True):
                self.give(variable, self.taken(copy))

        self.node(run)
        return out

    def node(self, run: Callable[[], None]) -> None:
        if self.saving:
            self._nodes.append(run)

    def op(
        self,
        inputs: Sequence[Variable],
        num_bytes: int,
        *,
        saves: Sequence[Variable] = (),
        extra: int = 0,
        beside: int = 0,
        backward_beside: int = 0,
        part: int = ACTIVATIONS,
        saves_output: bool = False,
    ) -> Variable:
        """An operation on tensors. `extra` bytes are saved besides; `beside` are needed for a moment."""
        tape = self.tape
        if beside:
            tape.touch(beside, WORKING)
        kept = self.save(*saves) + self.save_bytes(extra)
        out = self.variable(num_bytes, part)
        if saves_output:
            kept += self.save(out)

        def run() -> None:
            grad = self.taken(out)
            self.unpack(kept)
            if backward_beside:
                tape.touch(backward_beside, WORKING)
            grads = [tape.take(v.num_bytes, WORKING) for v in inputs]
            tape.drop(grad)
            self.release(kept)
            for variable, made in zip(inputs, grads, strict=True):
                self.give(variable, made)

        self.node(run)
        return out

    def linear(
        self,
        x: Variable,
        num_bytes: int,
        weight: int,
        *,
        bias: bool = False,
        clones: bool = False,
        grouped: bool = False,
        narrow: bool = True,
        part: int = ACTIVATIONS,
    ) -> Variable:
        """A product with a weight of so many elements. `clones`: its gradient arrives in another order of elements.
        `grouped`: of several weights, whose gradient no turn of the weights makes: it is made at once, and waits.
        Where it is not `narrow` its operands are never cast."""
        tape, kept, narrow = self.tape, self.save(x), narrow and self.narrow and not grouped
        entered = x.num_bytes // self.element
        if narrow:
            operands = [cast(tape, elements, self.element) for elements in (entered, weight)]
        out = self.variable(num_bytes, part)
        if narrow:
            tape.drop(*operands)

        def run() -> None:
            grad = self.taken(out)
            if clones:
                copied = tape.take(grad.num_bytes, WORKING)
                tape.drop(grad)
                grad = copied
            self.unpack(kept)
            rows = [cast(tape, grad.num_bytes // self.element, self.element)] if narrow else []
            if self.waits and not grouped:
                made = self._input_gradient(x.num_bytes, weight, narrow=narrow)
                tape.drop(*rows)
                self._waiting.append(([grad, *kept], weight, False, narrow))
                self.give(x, made)
                return
            if narrow:
                made = self._input_gradient(x.num_bytes, weight, narrow=True)
                (weight_grad,) = weight_gradients(tape, entered, self.element, rows, [weight])
            else:
                weight_grad = tape.take(weight * self.element, GRADIENTS)
                made = tape.take(x.num_bytes, WORKING)
            tape.drop(grad, *rows)
            self.release(kept)
            self.give(x, made)
            if self.waits:
                self._waiting.append(([weight_grad], 0, grouped, False))
                return
            self.accumulate(weight_grad, weight, grouped=grouped)

        self.node(run)
        return out

    def _input_gradient(self, num_bytes: int, weight: int, *, narrow: bool) -> Buffer:
        if narrow:
            return input_gradient(self.tape, num_bytes, self.element, [weight])
        return self.tape.take(num_bytes, WORKING)

    def table(self, rows: Variable, weight: int) -> None:
        """What looks rows up in a table: its gradient is dense."""

        def run() -> None:
            grad = self.taken(rows)
            made = self.tape.take(weight * self.element, GRADIENTS)
            self.tape.drop(grad)
            if self.waits:
                self._waiting.append(([made], 0, False, False))
                return
            if self.tied is not None and weight * self.element == self.tied.num_bytes:
                other, made = made, self.tape.take(made.num_bytes, GRADIENTS)
                self.tape.drop(self.tied, other)
            self.accumulate(made, weight)

        self.node(run)

    def add(self, a: Variable, b: Variable) -> Variable:
        """Their sum: both take its gradient as it is."""
        out = self.variable(a.num_bytes)

        def run() -> None:
            grad = self.taken(out)
            self.give(a, self.tape.hold(grad))
            self.give(b, grad)

        self.node(run)
        return out

    def shifted(self, x: Variable) -> Variable:
        """x and a bias: its gradient is that of the sum."""
        out = self.variable(x.num_bytes)
        self.node(lambda: self.give(x, self.taken(out)))
        return out

    def copied(self, x: Variable) -> Variable:
        """The same in another order of elements; its gradient is a view."""
        return self.shifted(x)

    def keep_until_backward(self, x: Variable) -> None:
        """Held from here until what is recorded next is over in backward."""
        kept = self.save(x)
        self.node(lambda: self.release(kept))

    def passes(self, x: Variable) -> Variable:
        """A view of x with a gradient of its own."""
        out = Variable(self.tape.hold(x.buffer))
        self.node(lambda: self.give(x, self.taken(out)))
        return out

    def give(self, variable: Variable, grad: Buffer) -> None:
        """Hand over a gradient with the hold on it."""
        before = variable.grad
        if before is None:
            variable.grad = grad
            return
        variable.grad = self.tape.take(variable.num_bytes, WORKING)
        self.tape.drop(before, grad)

    def taken(self, variable: Variable) -> Buffer:
        grad = variable.grad
        assert grad is not None
        variable.grad = None
        return grad

    def unpack(self, kept: Sequence[Kept]) -> None:
        """What was not kept is made again."""
        for saved in kept:
            if isinstance(saved, Remake) and saved.buffer is None:
                beside = self.tape.take(saved.beside, WORKING)
                saved.buffer = self.tape.take(saved.num_bytes, WORKING)
                self.tape.drop(beside)

    def release(self, kept: Sequence[Kept]) -> None:
        for saved in kept:
            if not isinstance(saved, Remake):
                self.tape.drop(saved)
                continue
            saved.uses -= 1
            if not saved.uses:
                assert saved.buffer is not None
                self.tape.drop(saved.buffer)

    def accumulate(self, grad: Buffer, weight: int, *, grouped: bool = False) -> None:
        """A parameter's new gradient joins what is there."""
        sums = self._sums[grouped]
        if sums == "first master":
            self.tape.take(weight * 4, GRADIENTS)
        if sums != "keep":
            self.tape.drop(grad)
        if not self.waits:
            self.segments.append(Segment(self.tape.cut(), weight, grouped))

    def mark(self) -> int:
        """How many backwards there are to run."""
        return len(self._nodes)

    def backward(self, down_to: int = 0) -> None:
        """Run what was recorded since, last first."""
        while len(self._nodes) > down_to:
            self._nodes.pop()()

    def make_weights(self) -> None:
        """The weight gradients that wait, each letting go of what it was made from. A product adds to what is there."""
        for kept, weight, grouped, narrow in self._waiting:
            if narrow:
                self._make_narrow(kept, weight)
                continue
            if weight and self._sums[grouped] == "add":
                self.release(kept)
                continue
            if weight:
                made = [self.tape.take(weight * self.element, GRADIENTS)]
                self.release(kept)
            else:
                made = [grad for grad in kept if isinstance(grad, Buffer)]
            if self._sums[grouped] == "add":
                self.tape.drop(*made)
            else:
                self._made += [(grad, grad.num_bytes // self.element, grouped) for grad in made]

    def _make_narrow(self, kept: list[Kept], weight: int) -> None:
        """A product in fp8 adds to nothing: it is made, then added."""
        grad, entered = kept
        rows = [cast(self.tape, grad.num_bytes // self.element, self.element)]
        made = weight_gradients(self.tape, entered.num_bytes // self.element, self.element, rows, [weight])
        self.tape.drop(*rows)
        if self._sums[False] == "add":
            self.tape.drop(*made)
        else:
            self._made += [(one, weight, False) for one in made]
        self.release(kept)

    def add_weights(self) -> None:
        for grad, weight, grouped in self._made:
            self.accumulate(grad, weight, grouped=grouped)
