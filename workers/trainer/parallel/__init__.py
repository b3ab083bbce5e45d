"""Parallelism: one module per axis, and the order in which they are applied to a model."""
