"""Benchmarks that print ratios measured in one run, with `python -m benchmarks.NAME`."""
