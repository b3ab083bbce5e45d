"""A board's REST from Python and from the command line. Neither Django nor torch is needed."""

from meshboard.api import AwayError, Client, Job, RefusedError, TimedOutError

__all__ = ["AwayError", "Client", "Job", "RefusedError", "TimedOutError"]
