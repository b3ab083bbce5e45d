"""Predict the cost of a layout before it runs. No torch, no Django, no I/O."""
