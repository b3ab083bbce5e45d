"""Errors that end a run with one line instead of a traceback."""


class UserError(Exception):
    """Report a mistake that the user can fix, such as a missing file. The exit code is 2."""


class DivergedError(Exception):
    """Report a loss or gradient norm that is not finite. All ranks raise it at the same step."""


def abbreviate(name: str) -> str:
    """Quote a name for an error message, and shorten a long name."""
    return repr(name) if len(name) <= 200 else f"{name[:100]!r}... ({len(name)} characters)"


def format_reason(error: Exception) -> str:
    """Format the error of a library as one short line."""
    text = " ".join(str(error).split())[:200]
    return "".join(char if char.isprintable() else "?" for char in text)


class VerificationError(Exception):
    """Report a result that differs from the reference or between replicas."""
