"""What a list of jobs can be narrowed to; the page and REST read the same parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import django_filters
from django.db.models import Q, QuerySet

from jobs.kinds import KINDS
from jobs.models import Job, Status

TITLES = [(name, kind.title) for name, kind in KINDS.items()]


def _one_of(names: Iterable[str]) -> dict[str, str]:
    return {"invalid_choice": f"must be one of {', '.join(names)}; got %(value)s"}


class JobFilter(django_filters.FilterSet):
    """Search words, state, kind, owner. A parameter that makes no sense narrows nothing.

    `user`: whose form it is; only staff's asks for the owner.
    """

    q = django_filters.CharFilter(label="Search", method="search", max_length=100)
    status = django_filters.ChoiceFilter(
        label="Status", choices=Status.choices, empty_label="any", error_messages=_one_of(Status.values)
    )
    kind = django_filters.ChoiceFilter(label="Kind", choices=TITLES, empty_label="any", error_messages=_one_of(KINDS))
    owner = django_filters.CharFilter(label="Owner", field_name="owner__username", max_length=150)

    class Meta:
        model = Job
        fields: list[str] = []

    def __init__(self, data: Any, *, queryset: QuerySet[Job], user: Any = None) -> None:
        super().__init__(data, queryset=queryset)
        if user is not None and not user.is_staff:
            del self.filters["owner"]
        self.form.label_suffix = ""
        for field in self.form.fields.values():
            field.widget.attrs["autocomplete"] = "off"

    def search(self, jobs: QuerySet[Job], _name: str, words: str) -> QuerySet[Job]:
        """Jobs whose name holds the words, or whose id they are."""
        return jobs.filter(Q(name__icontains=words) | Q(id=words))

    @property
    def narrows(self) -> bool:
        """Whether anything was asked for."""
        return any(self.form.cleaned_data.values()) if self.form.is_valid() else True
