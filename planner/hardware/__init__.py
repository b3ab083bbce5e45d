"""Accelerators, links and kernels: what a machine can do, from data sheets or from a calibration."""
