"""Python client and command line of a Meshboard board. Needs neither Django nor torch."""

from meshboard.client import Client
from meshboard.errors import AwayError, RefusedError, TimedOutError, WrongError
from meshboard.job import Job

__all__ = ["AwayError", "Client", "Job", "RefusedError", "TimedOutError", "WrongError"]
