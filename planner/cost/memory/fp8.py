"""What a product in fp8 holds for a moment: its operands in 8 bits, as `workers/trainer/parallel/matmul.py` casts."""

from __future__ import annotations

from collections.abc import Sequence

from planner.cost.memory.tape import GRADIENTS, WORKING, Buffer, Tape
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
