"""Faults put into a copy of the source tree, each run as a user's own small run, whose own words must tell of it."""
