"""The memory of an update: gradients, and the fp32 copies of the gradients that it converts together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from planner.facts.model_shapes import ParameterUnit
from planner.facts.precision import FP32_BYTES
from planner.facts.stages import BUCKET_BYTES, is_expert_unit

MAX_CONVERTED_ELEMENTS = 2**24  # together, or one larger tensor


class UpdatePeak(NamedTuple):
    """Bytes of gradients in their own type and in fp32 at the peak of the update."""

    gradients: int
    fp32: int


@cache
def find_update_peak(
    units: tuple[ParameterUnit, ...], element: int, *, summed: bool, experts_summed: bool
) -> UpdatePeak:
    """Return the peak while gradients of `element` bytes are converted to fp32. Each is freed after its conversion.

    Gradients of replicas that were `summed` in buckets share memory, which is freed with the last one of a bucket.
    """
    sizes = [parameter.numel for unit in units for parameter in unit.parameters]
    bucket_of = dict(enumerate(range(len(sizes))))
    for experts, shares in ((False, summed), (True, experts_summed)):
        if shares:
            bucket_of |= _buckets(units, element, experts=experts)
    left: Counter[int] = Counter()
    for index, size in enumerate(sizes):
        left[bucket_of[index]] += size
    whole, came = left.copy(), sum(sizes) * element
    most = UpdatePeak(came, 0)
    for some in _at_a_time(sizes):
        fp32 = 0
        for index in some:
            fp32 += sizes[index] * FP32_BYTES
            most = max(most, UpdatePeak(came, fp32), key=sum)
            bucket = bucket_of[index]
            left[bucket] -= sizes[index]
            came -= 0 if left[bucket] else whole[bucket] * element
    return most


def _at_a_time(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of tensors that are converted together."""
    some: list[int] = []
    filled = 0
    for index, size in enumerate(sizes):
        if filled + size > MAX_CONVERTED_ELEMENTS:
            yield some
            some, filled = [], 0
        some.append(index)
        filled += size
    yield some


def _buckets(units: Sequence[ParameterUnit], element: int, *, experts: bool) -> dict[int, int]:
    """Return the bucket of each tensor, in backward order, named by the index of its first tensor."""
    places, place = [], 0
    for number, unit in enumerate(units):
        for parameter in unit.parameters:
            if is_expert_unit(unit) == experts:
                ends = 0 if parameter.name.startswith(("final_norm", "head")) else 2 if unit.name == "root" else 1
                places.append((ends, -number, -place, parameter.numel * element))
            place += 1
    found: dict[int, int] = {}
    bucket, filled = -1, 0
    for _, _, negative, size in sorted(places):
        if filled == 0:
            bucket = -negative
        found[-negative] = bucket
        filled = 0 if filled + size >= BUCKET_BYTES else filled + size
    return found
