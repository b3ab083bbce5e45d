"""Filter and paginate lists. Pages and REST share the filters of jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import django_filters
from django import forms
from django.core.exceptions import ValidationError
from django.core.paginator import Page, Paginator
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest

from jobs.core.kinds import KINDS
from jobs.core.text import is_storable
from jobs.models import LIVE, Job, JobTag, Status

PAGE_SIZE = 50
MAX_SEARCH_CHARACTERS = 100
MAX_TAGS_CHARACTERS = 1020  # the maximum number of tags of a job, with commas
ACTIVE = "active"
STATUS_CHOICES = [(status, status) for status in Status.values]
KIND_CHOICES = [(name, kind.title) for name, kind in KINDS.items()]
ARCHIVE_CHOICES = [("only", "archived"), ("too", "all, including archived")]


class ListPage(NamedTuple):
    """A page of a list.

    Attributes:
        words: Search words of the request.
        long: True if the list is long enough for a search field.
    """

    page: Page[Any]
    words: str
    long: bool


def get_list_page(request: HttpRequest, rows: QuerySet[Any], field: str, *, size: int = PAGE_SIZE) -> ListPage:
    """Return the requested page of the rows whose field contains the search words `q`."""
    words = request.GET.get("q", "").strip()[:MAX_SEARCH_CHARACTERS]
    if words:
        rows = rows.filter(**{f"{field}__icontains": words}) if is_storable(words) else rows.none()
    page = get_page(request, rows, "page", size=size)
    return ListPage(page, words, bool(words) or page.paginator.num_pages > 1)


def get_page(
    request: HttpRequest, rows: QuerySet[Any] | Sequence[Any], parameter: str, *, size: int = PAGE_SIZE
) -> Page[Any]:
    """Return the page that a parameter of the request selects, or the nearest existing page."""
    return Paginator(rows, size).get_page(request.GET.get(parameter))


def _choice_error(names: Iterable[str], advice: str = "one of") -> dict[str, str]:
    return {"invalid_choice": f"The value '%(value)s' is unknown. Use {advice} {', '.join(names)}."}


class MultiValueField(forms.MultipleChoiceField):
    """Several choices, separated by commas or given as repeated parameters.

    Args:
        aliases: Words that select several choices.
    """

    widget = forms.CheckboxSelectMultiple

    def __init__(
        self, *, choices: Sequence[tuple[str, Any]], aliases: Mapping[str, Iterable[str]], **options: Any
    ) -> None:
        super().__init__(choices=choices, **options)
        self._names, self._aliases = [name for name, _ in choices], aliases

    def to_python(self, value: Any) -> list[str]:
        """Return each selected choice once, in the order of the choices."""
        words = {word for text in value or () for word in text.split(",") if value != [""]}
        names = {name for word in words for name in self._aliases.get(word, [word])}
        if unknown := sorted(names - set(self._names)):
            raise ValidationError(self.error_messages["invalid_choice"], "invalid_choice", {"value": unknown[0]})
        return [name for name in self._names if name in names]


class MultiValueFilter(django_filters.Filter):
    """Rows with any of the selected choices.

    Args:
        alias_words: Aliases with their meaning, for the error message.
        aliases: As in `MultiValueField`.
    """

    field_class = MultiValueField

    def __init__(
        self, label: str, choices: Sequence[tuple[str, Any]], alias_words: Iterable[str] = (), **aliases: Any
    ) -> None:
        errors = _choice_error([*(name for name, _ in choices), *alias_words], "one or more of")
        super().__init__(label=label, lookup_expr="in", choices=choices, aliases=aliases, error_messages=errors)


class CommaSeparatedInput(forms.TextInput):
    """Text field that joins repeated parameters by commas."""

    def value_from_datadict(self, data: Any, files: Any, name: str) -> Any:
        return ",".join(data.getlist(name) if hasattr(data, "getlist") else [data.get(name) or ""])


class JobFilter(django_filters.FilterSet):
    """Filters of a list of jobs. Archived jobs are listed only on request. Invalid parameters have no effect."""

    q = django_filters.CharFilter(label="Search", method="search", max_length=100)
    status = MultiValueFilter("Status", STATUS_CHOICES, [f"{ACTIVE} (all jobs that have not ended)"], **{ACTIVE: LIVE})
    kind = MultiValueFilter("Kind", KIND_CHOICES)
    project = django_filters.CharFilter(label="Project", max_length=100)
    tag = django_filters.CharFilter(
        label="Tag", method="filter_tags", max_length=MAX_TAGS_CHARACTERS, widget=CommaSeparatedInput
    )
    whose = django_filters.ChoiceFilter(
        label="Whose",
        choices=[("mine", "mine")],
        empty_label="all",
        error_messages=_choice_error(["mine"]),
        method="filter_own",
    )
    owner = django_filters.CharFilter(label="Owner", field_name="owner__username", max_length=150)
    archived = django_filters.ChoiceFilter(
        label="Archive",
        choices=ARCHIVE_CHOICES,
        empty_label="not archived",
        error_messages=_choice_error(["only (archived jobs alone)", "too (all jobs)"]),
        method="filter_archived",
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
        """Select jobs whose name contains the words or whose id they are."""
        return jobs.filter(Q(name__icontains=words) | Q(id=words))

    def filter_tags(self, jobs: QuerySet[Job], _name: str, tags: str) -> QuerySet[Job]:
        """Select jobs with all comma-separated tags, or with one tag that contains these commas."""
        names = {name.strip() for name in tags.split(",")} - {""}
        if names == {tags}:
            return jobs.filter(tags__name=tags)
        rows = JobTag.objects.values("job")
        with_all = rows.filter(name__in=names).annotate(count=Count("id")).filter(count=len(names)).values("job")
        return jobs.filter(Q(id__in=rows.filter(name=tags)) | Q(id__in=with_all))

    def filter_own(self, jobs: QuerySet[Job], _name: str, _mine: str) -> QuerySet[Job]:
        return jobs.filter(owner=self._user)

    def filter_archived(self, jobs: QuerySet[Job], _name: str, choice: str) -> QuerySet[Job]:
        return jobs.filter(archived=True) if choice == "only" else jobs

    def filter_queryset(self, queryset: QuerySet[Job]) -> QuerySet[Job]:
        return self._apply(queryset, self.form.cleaned_data)

    @property
    def with_any_status(self) -> QuerySet[Job]:
        """Return the jobs that all filters except the status select."""
        self.form.is_valid()
        return self._apply(self.queryset.all(), {**self.form.cleaned_data, "status": []})

    def _apply(self, jobs: QuerySet[Job], values: dict[str, Any]) -> QuerySet[Job]:
        for name, value in values.items():
            jobs = self.filters[name].filter(jobs, value)
        return jobs if values.get("archived") else jobs.filter(archived=False)

    @property
    def is_narrowed(self) -> bool:
        """Return whether the request sets any filter."""
        return any(self.form.cleaned_data.values()) if self.form.is_valid() else True
