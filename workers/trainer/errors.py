"""What ends a run that is told in one line: a mistake of the person who asked (exit code 2), training that diverged."""


class UserError(Exception):
    """Something the user can mend: a missing file, too little data, a token outside the vocabulary."""


class DivergedError(Exception):
    """A loss or gradient norm is not finite any more. Raised on every rank in the same place."""


def brief(name: str) -> str:
    """A name for one line of an error."""
    return repr(name) if len(name) <= 200 else f"{name[:100]!r}... ({len(name)} characters)"


def reason(error: Exception) -> str:
    """What a library says is wrong, shortened and in one line."""
    text = " ".join(str(error).split())[:200]
    return "".join(char if char.isprintable() else "?" for char in text)


class ProofError(Exception):
    """What a run computes is not what it must be: says what, where and by how much."""
