"""Each benchmark prints ratios measured in one run: `python -m benchmarks.NAME`."""
