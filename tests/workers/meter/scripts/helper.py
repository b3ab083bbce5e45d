"""A module beside the script."""

WIDTH = 32
