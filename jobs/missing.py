"""What is asked for and is not there, or not for whoever asks: told alike."""

from __future__ import annotations

from django.http import Http404


class MissingError(Http404):
    """`what`: one word, by which REST finds the parameter of the address. `text`: a message other than the default."""

    def __init__(self, what: str, text: str = "") -> None:
        super().__init__(text or f"no such {what}")
        self.what = what
