"""Mistakes of the person who asked, told in one line and exit code 2."""


class UserError(Exception):
    """Something the user can mend: a missing file, too little data, a token outside the vocabulary."""
