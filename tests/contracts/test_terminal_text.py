"""Text of a log as a terminal shows it."""

from __future__ import annotations

import random

import pytest

from contracts.terminal_text import HEAD_CHARS, MAX_LINE_CHARS, MAX_OPEN_ROWS, TAIL_CHARS, TerminalText

NESTED = (  # output of tqdm 4.67 for two bars, `position=0` and `position=1`
    b"\router:   0%|          | 0/2",
    b"\n",
    b"\rinner:   0%|          | 0/9",
    b"\x1b[A",
    b"\n",
    b"\rinner: 100%|##########| 9/9",
    b"\x1b[A",
    b"\router:  50%|#####     | 1/2",
)


def fold(*parts: bytes) -> list[str]:
    """Return all lines of a log that is read in these parts."""
    text = TerminalText()
    lines = [line for part in parts for line in text.feed(part)]
    return lines + text.feed(b"", final=True)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\r\n\nc", ["a", "b", "", "c"]),
        (b"\r 10%\r 20%\r100%\nnext\n", ["100%", "next"]),
        (b" 10%\r100%\r", ["100%"]),
        (b"long text\rbar\n", ["barg text"]),  # a terminal keeps what is not overwritten
        (b"long text\r\x1b[Kbar\n", ["bar"]),
        (b"long text\r\x1b[2Kbar\n", ["bar"]),
        (b"long text\rbar      \n", ["bar"]),
        (b"1/9\x08\x08\x089/9\n", ["9/9"]),
        (b"ab\x1b[1D\x1b[1Dxy\x1b[5G!\n", ["xy  !"]),
        (b"\x1b[31mred\x1b[0m\n", ["\x1b[31mred\x1b[0m"]),
        (b"\x1b[31m 10%\x1b[0m\r\x1b[32m100%\x1b[0m\n", ["\x1b[32m100%\x1b[0m"]),
        (b"\x1b[31mred\x1b[0m ok\rRE\n", ["RE\x1b[31md\x1b[0m ok"]),
        (b"\x1b[31\ncut\x1b[\n", ["\x1b[31", "cut\x1b["]),
        (b"\x1b]0;title\x07text\rT\n", ["Text"]),
        (b"\xff\xfe\0\0ok\n", ["\ufffd\ufffdok"]),
        (b"\0" * 5000 + b"x\n", ["x"]),
        (b"\x1b[2J\x1b[H\x1b[?25lstep 1\n", ["\x1b[2J\x1b[H\x1b[?25lstep 1"]),
        (b"".join(NESTED), ["outer:  50%|#####     | 1/2", "inner: 100%|##########| 9/9"]),
        (b"a1\nb1\n\x1b[2Aa2\nb2\n\x1b[2Aa3\nb3\n", ["a1", "b1", "a3", "b3"]),  # a first frame is complete lines
        (b"\x1b[999999999999A\x1b[99999999C\x1b[9999999999Dx\n", ["x"]),
        ("\ré 1\r€ 2\n".encode(), ["€ 2"]),
    ],
)
def test_folds_text_read_in_any_pieces(data: bytes, lines: list[str]) -> None:
    assert fold(data) == lines
    assert fold(*(data[i : i + 1] for i in range(len(data)))) == lines
    draw = random.Random(7)
    for _ in range(20):
        cuts = sorted(draw.randrange(len(data) + 1) for _ in range(3))
        assert fold(*(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))) == lines


def test_keeps_bars_open_that_a_cursor_can_reach() -> None:
    text = TerminalText()
    assert [line for part in NESTED for line in text.feed(part)] == []
    assert text.get_open_lines() == ["outer:  50%|#####     | 1/2", "inner: 100%|##########| 9/9"]
    assert text.feed(b"\n\nplain\n") == ["outer:  50%|#####     | 1/2", "inner: 100%|##########| 9/9"]
    assert text.get_open_lines() == ["plain"], "the cursor has moved up one line before"
    assert text.feed(b"next\n") == ["plain"]


def test_a_finished_bar_settles_without_further_text() -> None:
    text = TerminalText()
    assert text.feed(b"\r100%\n") == []
    assert text.settle() == [], "it was written just now"
    assert text.settle() == ["100%"]


def test_bars_of_many_epochs_are_complete_lines() -> None:
    lines = fold(b"".join(b"\rEpoch %d: 10%%\rEpoch %d: 100%%\n" % (epoch, epoch) for epoch in range(100)))
    assert lines == [f"Epoch {epoch}: 100%" for epoch in range(100)]
    text = TerminalText()
    assert len(text.feed(b"\rbar\n" * 100)) >= 100 - MAX_OPEN_ROWS


def test_a_long_line_shows_its_head_tail_and_length() -> None:
    (line, after) = fold(*(b"<" + b"x" * 9_999_998 + b">" + b"\nafter\n",))
    assert line == f"<{'x' * (HEAD_CHARS - 1)} … [10,000,000 characters in this line, 9,996,000 are not shown] … " + (
        "x" * (TAIL_CHARS - 1) + ">"
    )
    assert after == "after"
    pieces = [b"x" * 4090, b"y" * 20, b"\n"]
    assert len(fold(*pieces)[0]) <= MAX_LINE_CHARS
    assert fold(*pieces)[0].endswith("x" * (TAIL_CHARS - 20) + "y" * 20)
    assert fold(b"z" * MAX_LINE_CHARS) == ["z" * MAX_LINE_CHARS]


def test_left_out_bytes_end_the_open_lines() -> None:
    text = TerminalText()
    text.feed(b"half")
    assert text.skip(b"xx\nyy\nzz") == ["half"]
    assert text.feed(b"end\n") == ["end"]
    text.feed(b"\r 10%")
    assert text.skip(b"\r 11%" * 100) == []
    assert text.feed(b"\r100%\n", final=True) == ["100%"]
