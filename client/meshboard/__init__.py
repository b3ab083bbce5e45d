"""A board's REST from Python and from the command line. Neither Django nor torch is needed."""

from meshboard.api import Client
from meshboard.errors import AwayError, RefusedError, TimedOutError, WrongError
from meshboard.job import Job

__all__ = ["AwayError", "Client", "Job", "RefusedError", "TimedOutError", "WrongError"]
