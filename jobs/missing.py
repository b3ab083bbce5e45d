"""What is asked for and is not there, or not for whoever asks: told alike."""

from __future__ import annotations

from django.http import Http404


class MissingError(Http404):
    """`what`: the thing, in a word, by which a refusal over REST finds the parameter of the address that names it."""

    def __init__(self, what: str, more: str = "") -> None:
        super().__init__(f"no such {what}{more}")
        self.what = what
