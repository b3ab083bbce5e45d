"""Module next to the script."""

WIDTH = 32
