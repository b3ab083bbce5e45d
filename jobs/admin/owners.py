"""Whose jobs a list holds, found as one types: a board may have thousands of accounts."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.widgets import AutocompleteSelect
from unfold.contrib.filters.admin import AutocompleteSelectFilter
from unfold.contrib.filters.forms import AutocompleteDropdownForm


class Anybody(AutocompleteSelect):
    """With words where nobody is chosen: without them it has no name for a reader of the screen."""

    def build_attrs(self, *given: Any, **named: Any) -> dict[str, Any]:
        return {**super().build_attrs(*given, **named), "data-placeholder": "Any owner"}


class OwnerForm(AutocompleteDropdownForm):
    widget = Anybody


class OwnerFilter(AutocompleteSelectFilter):
    form_class = OwnerForm
