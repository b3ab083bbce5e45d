"""The trainer without peers, weights or arithmetic: what any rank of any layout would send, keep and compute."""
