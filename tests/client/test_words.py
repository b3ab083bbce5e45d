"""Figures as they are read: none in powers of ten, none of a unit that it has outgrown."""

from __future__ import annotations

import pytest

from meshboard.formatting import format_bytes, format_seconds


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0123, "12.3 ms"),
        (0.9996, "0.9996 s"),
        (1.5, "1.5 s"),
        (999.96, "1000 s"),
        (12345.6, "12,346 s"),
        (86400, "86,400 s"),
    ],
)
def test_seconds(value: float, words: str) -> None:
    assert format_seconds(value) == words


@pytest.mark.parametrize(
    ("value", "words"), [(999.7, "1000 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**50 * 5000, "5000 PiB")]
)
def test_sizes(value: float, words: str) -> None:
    assert format_bytes(value) == words
