"""Pipeline schedules run on paper: what follows from simulating a list of actions."""

from planner.cost.pipes.closed import bubble_ratio, chunks_in_flight
from planner.cost.pipes.shared import stretched
from planner.cost.pipes.simulate import Cell, Timeline, simulate

__all__ = ["Cell", "Timeline", "bubble_ratio", "chunks_in_flight", "simulate", "stretched"]
