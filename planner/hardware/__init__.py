"""Describe accelerators, links, software stacks, and the time of kernels."""
