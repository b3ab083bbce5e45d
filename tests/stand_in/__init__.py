"""The trainer's own path on GPUs, on a machine that has none: torch's CUDA build with its `ProcessGroupNCCL`, streams,
events and allocator, over libraries that stand in for CUDA and NCCL. What a kernel would compute, the CPU computes.

It shows what is asked of a GPU and of NCCL, by whom and in which order, and that the answers make one model. It shows
nothing of kernels, of NCCL itself, or of time.
"""
