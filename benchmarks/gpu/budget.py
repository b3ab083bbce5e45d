"""How the time of one call is shared among the parts that it runs, so that each gets its turn."""

from __future__ import annotations

from collections.abc import Sequence

TOTAL_S = 24 * 60.0  # since the process began; what ends a part that is cut, and the table, come after
MORE = 2.0  # times the time after which a part was cut, when it is tried again


def limit(expected_s: float, later_s: Sequence[float], left_s: float, cut_s: float = 0.0) -> float:
    """Seconds that the next part may take of those left, at most all.

    It has what it is expected to take and half of what nobody is, and so may each after it; the last has all. Where
    less is left than all are expected to take, each has its share by that. `cut_s`: after so long it was cut in an
    earlier call, and gets more if half of what is left is more.
    """
    if not later_s:
        return left_s
    expected = expected_s + sum(later_s)
    free = left_s - expected
    own = expected_s + free / 2 if free > 0 else left_s * expected_s / expected
    return max(own, min(MORE * cut_s, left_s / 2))


def clock(seconds: float) -> str:
    """For who waits: '17 min 20 s'."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
