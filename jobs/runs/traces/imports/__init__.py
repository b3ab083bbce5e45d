"""Traces of runs that we did not launch: read, kept for their owner, and drawn as ours are."""
