"""Checksums of whole tensors do not depend on the layout."""

from __future__ import annotations

import pytest
import torch

from planner.facts.placements import TensorBox
from workers.checkpoint.state import BLOCK, BoxedTensor, compute_box_checksum


def part(whole: torch.Tensor, *spans: tuple[int, int]) -> BoxedTensor:
    """Return the part of a tensor in [start, end) of each dim."""
    box = TensorBox(tuple(start for start, _ in spans), tuple(end - start for start, end in spans))
    return BoxedTensor(whole[box.slices], box, tuple(whole.shape))


def same(a: int, b: int) -> bool:
    return (a - b) % 2**64 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksums_of_parts_add_up_to_the_whole(dtype: torch.dtype) -> None:
    whole = torch.randn(6, 10).to(dtype)
    total = compute_box_checksum(part(whole, (0, 6), (0, 10)))
    assert same(sum(compute_box_checksum(part(whole, span, (0, 10))) for span in ((0, 1), (1, 6))), total)
    assert same(sum(compute_box_checksum(part(whole, (0, 6), span)) for span in ((0, 7), (7, 10))), total)
    stacked = torch.randn(3, 4, 5)
    parts = [part(stacked, (0, 3), (0, 4), span) for span in ((0, 2), (2, 5))]
    assert same(sum(map(compute_box_checksum, parts)), compute_box_checksum(part(stacked, (0, 3), (0, 4), (0, 5))))


def test_sums_long_tensors_in_blocks() -> None:
    whole = torch.randn(BLOCK + 3)
    total = compute_box_checksum(part(whole, (0, len(whole))))
    assert same(sum(compute_box_checksum(part(whole, span)) for span in ((0, 5), (5, len(whole)))), total)


def test_detects_changed_and_moved_elements() -> None:
    whole = torch.randn(4, 5)
    before = compute_box_checksum(part(whole, (0, 4), (0, 5)))
    for place in range(whole.numel()):
        changed = whole.clone()
        changed.view(-1)[place] += 1e-3
        assert compute_box_checksum(part(changed, (0, 4), (0, 5))) != before
    for moved in (whole[[1, 0, 2, 3]], whole[:, [0, 2, 1, 3, 4]], torch.zeros_like(whole)):
        assert compute_box_checksum(part(moved.contiguous(), (0, 4), (0, 5))) != before
    square = torch.randn(5, 5)
    assert compute_box_checksum(part(square, (0, 5), (0, 5))) != compute_box_checksum(
        part(square.T.contiguous(), (0, 5), (0, 5))
    )
