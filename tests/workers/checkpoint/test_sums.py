"""A checksum of a whole tensor is the same however it is held, and of any other tensor another."""

from __future__ import annotations

import pytest
import torch

from planner.facts.placements import TensorBox
from workers.checkpoint.state import Boxed
from workers.checkpoint.tensor_checksums import BLOCK, box_sum


def part(whole: torch.Tensor, *spans: tuple[int, int]) -> Boxed:
    """What lies in [start, end) of each dimension."""
    box = TensorBox(tuple(start for start, _ in spans), tuple(end - start for start, end in spans))
    return Boxed(whole[box.slices], box, tuple(whole.shape))


def same(a: int, b: int) -> bool:
    return (a - b) % 2**64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_add_up_to_the_whole_whichever_way_it_is_cut(dtype: torch.dtype) -> None:
    whole = torch.randn(6, 10).to(dtype)
    total = box_sum(part(whole, (0, 6), (0, 10)))
    assert same(sum(box_sum(part(whole, span, (0, 10))) for span in ((0, 1), (1, 6))), total)
    assert same(sum(box_sum(part(whole, (0, 6), span)) for span in ((0, 7), (7, 10))), total)
    stacked = torch.randn(3, 4, 5)
    parts = [part(stacked, (0, 3), (0, 4), span) for span in ((0, 2), (2, 5))]
    assert same(sum(map(box_sum, parts)), box_sum(part(stacked, (0, 3), (0, 4), (0, 5))))


def test_long_tensors_are_taken_block_by_block() -> None:
    whole = torch.randn(BLOCK + 3)
    total = box_sum(part(whole, (0, len(whole))))
    assert same(sum(box_sum(part(whole, span)) for span in ((0, 5), (5, len(whole)))), total)


def test_every_changed_element_and_what_lies_elsewhere_shows() -> None:
    whole = torch.randn(4, 5)
    before = box_sum(part(whole, (0, 4), (0, 5)))
    for place in range(whole.numel()):
        changed = whole.clone()
        changed.view(-1)[place] += 1e-3
        assert box_sum(part(changed, (0, 4), (0, 5))) != before
    for moved in (whole[[1, 0, 2, 3]], whole[:, [0, 2, 1, 3, 4]], torch.zeros_like(whole)):
        assert box_sum(part(moved.contiguous(), (0, 4), (0, 5))) != before
    square = torch.randn(5, 5)
    assert box_sum(part(square, (0, 5), (0, 5))) != box_sum(part(square.T.contiguous(), (0, 5), (0, 5)))
