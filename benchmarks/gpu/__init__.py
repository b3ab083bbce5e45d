"""Compare a GPU machine with the plan: `python -m benchmarks.gpu`."""
