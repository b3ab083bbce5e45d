"""Mistakes of the person who asked, told in one line and exit code 2."""


class UserError(Exception):
    """Something the user can mend: a missing file, too little data, a token outside the vocabulary."""


def brief(name: str) -> str:
    """A name for one line of an error."""
    return repr(name) if len(name) <= 200 else f"{name[:100]!r}... ({len(name)} characters)"


def reason(error: Exception) -> str:
    """What a library says is wrong, shortened and in one line."""
    text = " ".join(str(error).split())[:200]
    return "".join(char if char.isprintable() else "?" for char in text)
