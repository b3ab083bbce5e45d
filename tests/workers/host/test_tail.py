"""Logs arrive line by line, bounded, with what is left out counted."""

from __future__ import annotations

from pathlib import Path

from workers.host.supervisor.tail import BITE_BYTES, LAUNCHER, LINE_CHARS, LogTail


def rank_log(folder: Path, rank: int) -> Path:
    path = folder / "none_abc" / "attempt_0" / str(rank) / "stdout.log"
    path.parent.mkdir(parents=True)
    return path


def test_only_complete_lines_are_told_and_the_rest_at_the_end(tmp_path: Path) -> None:
    path, tail = rank_log(tmp_path, 3), LogTail(tmp_path)
    path.write_bytes(b"one\ntw")
    assert [(i["rank"], i["first"], i["lines"]) for i in tail.read()] == [(3, 0, ["one"])]
    assert tail.read() == []
    with path.open("ab") as out:
        out.write(b"o\nthree")
    assert [(i["first"], i["lines"]) for i in tail.read()] == [(1, ["two"])]
    assert [(i["first"], i["lines"]) for i in tail.read(final=True)] == [(2, ["three"])]
    assert tail.last_lines(3) == ["one", "two", "three"]


def test_bytes_that_are_no_text_do_not_stop_the_tail_and_long_lines_are_cut(tmp_path: Path) -> None:
    (tmp_path / "launcher.log").write_bytes(b"\xff\x00ok\n" + b"y" * 100_000 + b"\n")
    (item,) = LogTail(tmp_path).read()
    assert item["rank"] == LAUNCHER
    assert item["lines"] == ["\ufffd\ufffdok", "y" * LINE_CHARS]


def test_a_flood_is_skipped_and_every_line_of_it_counted(tmp_path: Path) -> None:
    path, tail = rank_log(tmp_path, 0), LogTail(tmp_path)
    lines = 5 * BITE_BYTES // 8
    path.write_text("".join(f"{number:07d}\n" for number in range(lines)))
    (item,) = tail.read()
    assert item["skipped"] + len(item["lines"]) == lines
    assert item["first"] == item["skipped"] == int(item["lines"][0])
    assert sum(len(line) + 1 for line in item["lines"]) <= BITE_BYTES
