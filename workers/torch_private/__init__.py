"""Private API of torch, which can change without notice.

The package is checked on torch 2.13.0. tests/workers/torch_private fail if a signature or a behavior changes.
tests/test_import_layers.py fails if private API is used elsewhere.
"""

CHECKED_ON = "2.13.0"
