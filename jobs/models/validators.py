"""Validate names that users enter, such as names of jobs, labels, and branches.

The rules apply to new names. Stored names that break a rule can still be read, renamed, and removed.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any, Final

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from planner.facts.validation import NO_NUL, Problem

BIDI_CONTROLS: Final = {*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C}
INVISIBLE_LETTERS: Final = {0x115F, 0x1160, 0x2800, 0x3164, 0xFFA0}
PERSON_NAMES: Final = ("username", "first_name", "last_name")  # fields of an account
VISIBLE_CATEGORIES: Final = "LNPS"  # letters, numbers, punctuation, symbols
IDENTIFIER = RegexValidator(
    r"\A[A-Za-z0-9][A-Za-z0-9._=-]*\Z", "Use letters, digits, and . _ = -, with a letter or digit first."
)
MAX_LABEL_CHARACTERS = 63
MAX_BRANCH_CHARACTERS = 200
# Rules of `git check-ref-format`.
INVALID_IN_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{")
INVALID_BRANCH_PART = re.compile(r"\..*|.*\.lock|")


def check_labels(labels: Any) -> None:
    """Raise ValidationError unless `labels` is a list of identifiers."""
    if not isinstance(labels, list) or not all(
        isinstance(label, str) and len(label) <= MAX_LABEL_CHARACTERS for label in labels
    ):
        raise ValidationError("Use a list of labels of at most 63 characters each.")
    for label in labels:
        IDENTIFIER(label)


def find_name_problem(name: str) -> str:
    """Return why a name is not allowed, empty if it is allowed."""
    for character in name:
        if problem := _find_character_problem(character):
            return f"The name contains the character U+{ord(character):04X}, {problem}. Remove the character."
    if not any(unicodedata.category(c)[0] in VISIBLE_CATEGORIES and ord(c) not in INVISIBLE_LETTERS for c in name):
        return "The name has no visible character."
    return ""


def check_name(field: str, name: str) -> list[Problem]:
    """Return the problems of a name in a field of a request."""
    problem = find_name_problem(name)
    return [Problem(field, problem)] if problem else []


def _find_character_problem(character: str) -> str:
    code = ord(character)
    if code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF:
        return "which is not a valid Unicode character"
    if code in BIDI_CONTROLS:
        return "which changes the direction of the text"
    category = unicodedata.category(character)
    if category == "Cs":
        return "an incomplete character"
    if category == "Cc":
        return "a control character"
    return "which breaks the line" if category in ("Zl", "Zp") else ""


def _validate_name(name: str) -> str:
    if problem := find_name_problem(name):
        raise PydanticCustomError("name", problem)
    return name


NameRule = AfterValidator(_validate_name)  # for request models. Stored specs use `check_name`.
NoteRule = AfterValidator(lambda text: text and _validate_name(text))  # allows the empty text
Note = Annotated[str, Field(max_length=200, pattern=NO_NUL), NoteRule]


def find_branch_problem(name: str) -> str:
    """Return why a baseline cannot have this Git branch name, empty if it can."""
    if len(name) > MAX_BRANCH_CHARACTERS:
        return f"The branch name has {len(name)} characters. Use at most {MAX_BRANCH_CHARACTERS} characters."
    if any(INVALID_BRANCH_PART.fullmatch(part) for part in name.split("/")):
        return (
            "A part of the branch name is empty, starts with a period, or ends with .lock. Use a valid Git branch name."
        )
    if found := INVALID_IN_BRANCH.search(name):
        return f"The branch name contains {found[0]!r}. Use a valid Git branch name."
    if name.startswith("-") or name.endswith(".") or name == "HEAD":
        return "The branch name starts with a hyphen, ends with a period, or is HEAD. Use a valid Git branch name."
    return find_name_problem(name)
