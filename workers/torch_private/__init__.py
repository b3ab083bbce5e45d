"""The one room for torch's private API: names that torch may change without a word.

Everything here was checked on torch 2.13.0; tests/workers/torch_private fail when a signature or a behaviour changes,
and tests/test_floors.py when private API is used anywhere else.
"""

CHECKED_ON = "2.13.0"
