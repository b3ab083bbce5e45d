"""Python client and command line of a Meshboard board. Needs neither Django nor torch."""

from meshboard.client import Client, Job
from meshboard.errors import AwayError, RefusedError, TimedOutError, WrongError

__all__ = ["AwayError", "Client", "Job", "RefusedError", "TimedOutError", "WrongError"]
