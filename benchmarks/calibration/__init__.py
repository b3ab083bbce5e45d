"""Predicted against measured on this machine: `python -m benchmarks.calibration`."""
