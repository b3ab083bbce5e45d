"""What a list of jobs can be narrowed to; the page and REST read the same parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import django_filters
from django import forms
from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet

from jobs.kinds import KINDS
from jobs.models import LIVE, Job, Status

TITLES = [(name, kind.title) for name, kind in KINDS.items()]
ARCHIVED = [("only", "archived"), ("too", "all, archived too")]
ACTIVE = "active"
WHOSE = [("mine", "mine")]


def _one_of(names: Iterable[str], words: str = "one of") -> dict[str, str]:
    return {"invalid_choice": f"must be {words} {', '.join(names)}; got %(value)s"}


def _chosen(
    label: str, choices: Sequence[tuple[str, Any]], empty: str, told: Iterable[str] = (), **more: Any
) -> django_filters.ChoiceFilter:
    """`told`: the choices with what each means, where its name alone does not tell."""
    messages = _one_of(told or (name for name, _ in choices))
    return django_filters.ChoiceFilter(label=label, choices=choices, empty_label=empty, error_messages=messages, **more)


class StatesField(forms.MultipleChoiceField):
    """Several states: commas between, or given several times, as a form's boxes are. ACTIVE stands for all of LIVE."""

    widget = forms.CheckboxSelectMultiple

    def to_python(self, value: Any) -> list[str]:
        """Each once, in the order in which a job comes to them."""
        if not value or value == [""]:
            return []
        told = {state for given in value for state in given.split(",")}
        if ACTIVE in told:
            told = told - {ACTIVE} | set(LIVE)
        unknown = sorted(told - set(Status.values))
        if unknown:
            raise ValidationError(
                self.error_messages["invalid_choice"], "invalid_choice", {"value": unknown[0] or "nothing"}
            )
        return [state for state in Status.values if state in told]


class StatesFilter(django_filters.Filter):
    field_class = StatesField


class JobFilter(django_filters.FilterSet):
    """Search words, states, kind, project, tag, owner; archived jobs only where asked for. A parameter that makes no
    sense narrows nothing.

    `user`: who asks; only staff's form has whose jobs they are.
    """

    q = django_filters.CharFilter(label="Search", method="search", max_length=100)
    status = StatesFilter(
        label="Status",
        lookup_expr="in",
        choices=Status.choices,
        error_messages=_one_of([*Status.values, f"{ACTIVE} (all that have not ended)"], "one or more of"),
    )
    kind = _chosen("Kind", TITLES, "any")
    project = django_filters.CharFilter(label="Project", max_length=100)
    tag = django_filters.CharFilter(label="Tag", field_name="tags__name", max_length=50)
    whose = _chosen("Whose", WHOSE, "all", method="of_whom")
    owner = django_filters.CharFilter(label="Owner", field_name="owner__username", max_length=150)
    archived = _chosen(
        "Archive", ARCHIVED, "left out", ("only (archived jobs alone)", "too (all jobs)"), method="from_archive"
    )

    class Meta:
        model = Job
        fields: list[str] = []

    def __init__(self, data: Any, *, queryset: QuerySet[Job], user: Any) -> None:
        super().__init__(data, queryset=queryset)
        self._user = user
        self.form.label_suffix = ""
        for field in self.form.fields.values():
            field.widget.attrs["autocomplete"] = "off"

    def search(self, jobs: QuerySet[Job], _name: str, words: str) -> QuerySet[Job]:
        """Jobs whose name holds the words, or whose id they are."""
        return jobs.filter(Q(name__icontains=words) | Q(id=words))

    def of_whom(self, jobs: QuerySet[Job], _name: str, _mine: str) -> QuerySet[Job]:
        return jobs.filter(owner=self._user)

    def from_archive(self, jobs: QuerySet[Job], _name: str, which: str) -> QuerySet[Job]:
        return jobs.filter(archived=True) if which == "only" else jobs

    def filter_queryset(self, queryset: QuerySet[Job]) -> QuerySet[Job]:
        return self._narrowed(queryset, self.form.cleaned_data)

    @property
    def of_any_status(self) -> QuerySet[Job]:
        """What is found where the status is not asked for."""
        self.form.is_valid()
        return self._narrowed(self.queryset.all(), {**self.form.cleaned_data, "status": []})

    def _narrowed(self, jobs: QuerySet[Job], asked: dict[str, Any]) -> QuerySet[Job]:
        for name, value in asked.items():
            jobs = self.filters[name].filter(jobs, value)
        return jobs if asked.get("archived") else jobs.filter(archived=False)

    @property
    def narrows(self) -> bool:
        """Whether anything was asked for."""
        return any(self.form.cleaned_data.values()) if self.form.is_valid() else True
