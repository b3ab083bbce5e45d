"""Test the trainer's GPU code on a machine without a GPU.

The tests use torch's CUDA build with its `ProcessGroupNCCL`, streams, events and allocator. Stand-in libraries
replace
CUDA and NCCL, and the CPU computes the kernels. The tests cover the calls to CUDA and NCCL, their callers and order,
and the results of the model. They do not cover GPU kernels, NCCL itself, or timing.
"""
