"""From the end of a collective to what a browser shows of it: `python -m benchmarks.latency`."""
