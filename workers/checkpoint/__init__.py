"""Checkpoints of training jobs: boxes of whole tensors in the format of torch.distributed.checkpoint.

A checkpoint can be loaded in any layout.
"""
