"""Transformers: their shapes, those of published ones, and how many operations they take."""
