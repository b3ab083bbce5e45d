"""Describe, draw, and list benchmarks of collectives."""
