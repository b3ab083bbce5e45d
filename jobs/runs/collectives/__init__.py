"""Benchmarks of collectives: form, pages, REST and results."""
