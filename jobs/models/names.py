"""Names that people give: each can be read, looks like no other by a trick, and turns no line of a page round.

The rule is of what is made from now on: what stands under an older name is read, and can be renamed or removed.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated, Final

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from planner.facts.validation import NO_NUL, Problem

TURNING: Final = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C}
BLANK: Final = {0x115F, 0x1160, 0x2800, 0x3164, 0xFFA0}  # letters and signs that show nothing
PERSON_NAMES: Final = ("username", "first_name", "last_name")  # fields of an account
SHOWN: Final = "LNPS"  # letters, numbers, punctuation, symbols


def unfit(name: str) -> str:
    """Why a name may not be given; empty where it may."""
    for character in name:
        if words := _unfit(character):
            return f"The name contains the character U+{ord(character):04X}, {words}. Remove the character."
    if not any(unicodedata.category(one)[0] in SHOWN and ord(one) not in BLANK for one in name):
        return "The name has no visible character."
    return ""


def name_problems(field: str, name: str) -> list[Problem]:
    """Of a name that was read already."""
    words = unfit(name)
    return [Problem(field, words)] if words else []


def _unfit(character: str) -> str:
    code = ord(character)
    if code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF:
        return "which is not a valid Unicode character"
    if code in TURNING:
        return "which changes the direction of the text"
    kind = unicodedata.category(character)
    if kind == "Cs":
        return "an incomplete character"
    if kind == "Cc":
        return "a control character"
    return "which breaks the line" if kind in ("Zl", "Zp") else ""


def _named(name: str) -> str:
    if words := unfit(name):
        raise PydanticCustomError("name", words)
    return name


Named = AfterValidator(_named)  # of a field of a model that is read once; `name_problems` is for what is stored whole


def _noted(text: str) -> str:
    return _named(text) if text else text


Noted = AfterValidator(_noted)  # of what may be empty
Note = Annotated[str, Field(max_length=200, pattern=NO_NUL), Noted]  # what stands beside names
