"""Formats of British English, with the zone in each time."""
