"""Pipeline schedules as data: the order in which each rank computes, and what follows from simulating it."""

from planner.schedules.actions import Action, actions, splits
from planner.schedules.closed import bubble_ratio, chunks_in_flight
from planner.schedules.shared import stretched
from planner.schedules.simulate import Cell, Timeline, simulate

__all__ = [
    "Action",
    "Cell",
    "Timeline",
    "actions",
    "bubble_ratio",
    "chunks_in_flight",
    "simulate",
    "splits",
    "stretched",
]
