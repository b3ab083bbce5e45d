"""What an order says of the whole gang."""

from __future__ import annotations

from contracts.control import LaunchOrder


def node_of(order: LaunchOrder) -> int:
    """This host's place among the gang's."""
    return order["gang"]["node"] if "gang" in order else 0


def first_rank(order: LaunchOrder) -> int:
    """The global rank of this host's first one."""
    if "gang" not in order:
        return 0
    return sum(node["ranks"] for node in order["gang"]["nodes"][: order["gang"]["node"]])


def ranks_here(order: LaunchOrder) -> range:
    """Global ranks of this host."""
    first = first_rank(order)
    return range(first, first + len(order["slots"]))


def num_ranks(order: LaunchOrder) -> int:
    """Of the whole gang."""
    if "gang" not in order:
        return len(order["slots"])
    return sum(node["ranks"] for node in order["gang"]["nodes"])
