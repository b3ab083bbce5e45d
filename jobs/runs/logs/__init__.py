"""Whole logs, fetched from the hosts that they lie on, and where those of other engines are."""
