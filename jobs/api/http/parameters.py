"""Parameters of an address: each makes sense, or is named. That each is known and given once is `views`' to see to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rest_framework.request import Request

from jobs.api.http.problems import Where
from jobs.core.text import format_choice_problem, format_number_problem, parse_whole_number
from planner.facts.validation import Problem, SpecError

T = TypeVar("T")
D = TypeVar("D")


class BadParameterError(Exception):
    """Every parameter that makes no sense."""

    def __init__(self, problems: list[Problem], where: Where = "query") -> None:
        super().__init__(" ".join(problem.sentence for problem in problems))
        self.problems, self.where = problems, where


class Parameters:
    """What was asked; `check` raises what is wrong with all of it."""

    def __init__(self, request: Request) -> None:
        self._given = request.query_params
        self._problems: list[Problem] = []
        self._clashes: list[Problem] = []

    def read(self, name: str, default: D, words: str, reader: Callable[[str], T | None]) -> T | D:
        """What `reader` makes of it; the default where it was not given. `words`: what it must be."""
        if name not in self._given:
            return default
        found = reader(self._given[name])
        if found is None:
            self._problems.append(Problem(name, words))
            return default
        return found

    def number(self, name: str, default: D, least: int, most: int) -> int | D:
        words = format_number_problem(name, self._given.get(name, ""), least, most)
        return self.read(name, default, words, lambda text: parse_whole_number(text, least, most))

    def one_of(self, name: str, default: D, choices: tuple[str, ...]) -> str | D:
        words = format_choice_problem(name, self._given.get(name, ""), choices)
        return self.read(name, default, words, lambda text: text if text in choices else None)

    def clash(self, name: str, words: str) -> None:
        """It makes sense by itself, and not beside the others."""
        self._clashes.append(Problem(name, words))

    def check(self) -> None:
        """
        Raises:
            BadParameterError: of parameters that make no sense, which is 400.
            SpecError: of some that make none together, which is 422: no document can say it.
        """
        if self._problems:
            raise BadParameterError([*self._problems, *self._clashes])
        if self._clashes:
            raise SpecError(self._clashes)
