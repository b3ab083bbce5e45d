"""What a list of jobs can be narrowed to; the page and REST read the same parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import django_filters
from django import forms
from django.core.exceptions import ValidationError
from django.db.models import Count, Q, QuerySet

from jobs.core.kinds import KINDS
from jobs.models import LIVE, Job, JobTag, Status

STATES = [(state, state) for state in Status.values]
TITLES = [(name, kind.title) for name, kind in KINDS.items()]
ARCHIVED = [("only", "archived"), ("too", "all, including archived")]
ACTIVE = "active"
LONGEST_TAGS = 1020  # characters of as many tags as a job may have, with their commas
WHOSE = [("mine", "mine")]


def _one_of(names: Iterable[str], words: str = "one of") -> dict[str, str]:
    return {"invalid_choice": f"The value '%(value)s' is unknown. Use {words} {', '.join(names)}."}


def _chosen(
    label: str, choices: Sequence[tuple[str, Any]], empty: str, told: Iterable[str] = (), **more: Any
) -> django_filters.ChoiceFilter:
    """`told`: the choices with what each means, where its name alone does not tell."""
    messages = _one_of(told or (name for name, _ in choices))
    return django_filters.ChoiceFilter(label=label, choices=choices, empty_label=empty, error_messages=messages, **more)


class SeveralField(forms.MultipleChoiceField):
    """Several choices: commas between, or given several times, as a form's boxes are. `stands_for`: words for some."""

    widget = forms.CheckboxSelectMultiple

    def __init__(
        self, *, choices: Sequence[tuple[str, Any]], stands_for: Mapping[str, Iterable[str]], **more: Any
    ) -> None:
        super().__init__(choices=choices, **more)
        self._names, self._stands_for = [name for name, _ in choices], stands_for

    def to_python(self, value: Any) -> list[str]:
        """Each once, in the order of the choices."""
        if not value or value == [""]:
            return []
        told = {word for given in value for word in given.split(",")}
        told = {name for word in told for name in self._stands_for.get(word, [word])}
        unknown = sorted(told - set(self._names))
        if unknown:
            raise ValidationError(self.error_messages["invalid_choice"], "invalid_choice", {"value": unknown[0]})
        return [name for name in self._names if name in told]


class SeveralFilter(django_filters.Filter):
    """Jobs with any of the choices."""

    field_class = SeveralField

    def __init__(self, label: str, choices: Sequence[tuple[str, Any]], told: Iterable[str] = (), **stands_for: Any):
        """`told`: `stands_for` with what each means."""
        words = _one_of([*(name for name, _ in choices), *told], "one or more of")
        super().__init__(label=label, lookup_expr="in", choices=choices, stands_for=stands_for, error_messages=words)


class WordsInput(forms.TextInput):
    """What was given several times stands with commas between."""

    def value_from_datadict(self, data: Any, files: Any, name: str) -> Any:
        given = data.getlist(name) if hasattr(data, "getlist") else [data.get(name) or ""]
        return ",".join(given)


class JobFilter(django_filters.FilterSet):
    """Search words, states, kinds, project, tags, owner; archived jobs only where asked for. A parameter that makes no
    sense narrows nothing.

    `user`: who asks; only staff's form has whose jobs they are.
    """

    q = django_filters.CharFilter(label="Search", method="search", max_length=100)
    status = SeveralFilter("Status", STATES, [f"{ACTIVE} (all jobs that have not ended)"], **{ACTIVE: LIVE})
    kind = SeveralFilter("Kind", TITLES)
    project = django_filters.CharFilter(label="Project", max_length=100)
    tag = django_filters.CharFilter(label="Tag", method="tagged", max_length=LONGEST_TAGS, widget=WordsInput)
    whose = _chosen("Whose", WHOSE, "all", method="of_whom")
    owner = django_filters.CharFilter(label="Owner", field_name="owner__username", max_length=150)
    archived = _chosen(
        "Archive", ARCHIVED, "not archived", ("only (archived jobs alone)", "too (all jobs)"), method="from_archive"
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

    def tagged(self, jobs: QuerySet[Job], _name: str, tags: str) -> QuerySet[Job]:
        """Jobs with all of the tags, commas between; or with the one that has those commas in it."""
        names = {name.strip() for name in tags.split(",")} - {""}
        if names == {tags}:
            return jobs.filter(tags__name=tags)
        tagged = JobTag.objects.values("job")
        with_all = tagged.filter(name__in=names).annotate(has=Count("id")).filter(has=len(names)).values("job")
        return jobs.filter(Q(id__in=tagged.filter(name=tags)) | Q(id__in=with_all))

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
