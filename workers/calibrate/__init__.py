"""Calibration of a host: matmuls, memory, layers, optimizer and collectives, with few and many active ranks."""
