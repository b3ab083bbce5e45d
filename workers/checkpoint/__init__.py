"""Checkpoints: written by torch.distributed.checkpoint as boxes of whole tensors, so that any layout reads them."""
